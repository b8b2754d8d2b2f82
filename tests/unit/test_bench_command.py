"""The bench without an engine: its options, its figures, when it refuses a ratio, and what it prints."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.bench import worker
from vllm_eagle_mrv2.cli.bench.measurement import measure
from vllm_eagle_mrv2.cli.bench.report import BenchReport
from vllm_eagle_mrv2.cli.bench.types import Round, Row
from vllm_eagle_mrv2.cli.common import arguments, subject
from vllm_eagle_mrv2.cli.common.engines import Comparison, Engines
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.list_options import expand
from vllm_eagle_mrv2.cli.common.shapes import Shape, token_prompts
from vllm_eagle_mrv2.cli.common.subject import ShapeRequests, shape_subject
from vllm_eagle_mrv2.cli.common.types import Started
from vllm_eagle_mrv2.cli.common.worker import percentile
from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.heads import detect_family

from .commands import CPU, H200, comparison, live, shown

pytestmark = pytest.mark.any_release


def taken(**changed: Any) -> Round:
    """Two requests of four tokens in two iterations of 10 ms; of four drafts all are accepted once, half twice."""
    return Round(
        **{
            "seconds": 0.02,
            "iterations": 2,
            "token_ids": [[1, 2, 3, 4], [5, 6, 7, 8]],
            "num_drafts": 4,
            "num_draft_tokens": 8,
            "num_accepted_tokens": 6,
            "num_accepted_tokens_per_pos": [4, 2],
            "itl_p50_ms": 2.0,
            "itl_p99_ms": 3.0,
            "ttft_p50_ms": 4.0,
            "ttft_p99_ms": 5.0,
            **changed,
        }
    )


def row(against: list[Round], ours: list[Round], k: int = 2, batch: int = 2) -> Row:
    return Row(k=k, batch=batch, names=("stock", "eagle_mrv2"), against=against, eagle_mrv2=ours)


def report(*rows: Row, started: Started = H200) -> BenchReport:
    return BenchReport(title="a pair", versions={"torch": "2"}, started=started, rows=list(rows))


# Options


@pytest.mark.parametrize(
    "given",
    [
        ["-k", "3", "5", "--rounds", "4", "--batch", "1", "8"],
        ["-k", "3,5", "--rounds", "4", "--batch=1,8"],
        ["-k", "3", "-k", "5", "--rounds", "4", "--batch=1", "8"],
    ],
)
def test_several_values_of_an_option(given: list[str]) -> None:
    wanted = ["-k", "3", "-k", "5", "--rounds", "4", "--batch", "1", "--batch", "8"]
    assert expand(given, {"-k", "--batch"}) == wanted


def test_other_options_stay_as_they_are() -> None:
    for given in (["--engine", '{"a": 1, "b": 2}', "--json=a,b"], ["-k"], ["stray", "-k", "3"], []):
        assert expand(given, {"-k"}) == given


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--against", "ours"], "--against ours needs --disable"),
        (["--shape", "1b", "--model", "x"], "--shape has random weights"),
        (["--shape", "1b", "--family", "mtp"], "eagle and eagle3 only"),
        (["--draft", "x"], "--draft and --family mtp need --model"),
        (["--engine", "{"], "--engine is not JSON"),
        (
            ["--engine", '{"max_num_seqs": 4}', "--batch", "1", "8"],
            "--batch 8 is more than max_num_seqs of --engine, 4.",
        ),
        (["--engine", "[1]"], "--engine must be a JSON object"),
        (["--option", '{"disable": []}'], "use --disable"),
        (["--option", '{"draft_logits_dtype": "int8"}'], "draft_logits_dtype"),
        (["--json", "no/such/folder.json"], "no such folder"),
        (["-k"], "requires an argument"),
        (["-k", "0"], "Invalid value for '-k'"),
        (["-k", "three"], "Invalid value for '-k'"),
        (["--disable", "everything"], "'everything' is not"),
        (["3"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_starts_no_engine(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("command", ["bench", "bench-load", "tune", "demo"])
def test_a_plugin_that_vllm_does_not_load_starts_no_engine(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    result = CliRunner().invoke(app, [command], env={"COLUMNS": "300"})
    assert result.exit_code == 2, result.output
    assert "set VLLM_PLUGINS=lora,eagle_mrv2, or unset it" in " ".join(result.output.split())


@pytest.mark.usefixtures("no_engine")
def test_a_drawing_without_matplotlib_is_refused_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    present = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else present(name))
    result = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "bench.png")])
    assert result.exit_code == 2
    assert result.output == "error: --plot needs matplotlib: pip install 'vllm-eagle-mrv2[plot]'.\n"


@pytest.mark.usefixtures("no_engine")
def test_a_drawing_of_no_known_format_is_refused_first(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "bench.txt")])
    assert result.exit_code == 2
    assert "ends in one of" in result.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\ntwo\n", ["one", "two"]),
        ("one\r\ntwo", ["one", "two"]),
        ('{"prompt": "one"}\n{"prompt": "two"}\n', ["one", "two"]),
        ('\ufeff{"prompt": "one"}\n{"prompt": "two"}\n', ["one", "two"]),  # as some editors begin files
        ('{"prompt": "one\u2028line"}\n{"prompt": "two"}\n', ["one\u2028line", "two"]),
        ("one\fpage\ntwo\n", ["one\fpage", "two"]),
    ],
)
def test_prompts_of_a_file(text: str, expected: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(text.encode())
    assert subject.read_prompts(file) == expected


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_folder_is_no_file_for_results(option: str, tmp_path: Path) -> None:
    folder = tmp_path / "results.png"
    folder.mkdir()
    json_output, plot = (str(folder), None) if option == "--json" else (None, folder)
    with pytest.raises(CommandError, match="cannot be written"):
        arguments.check_outputs(json_output, plot)


def test_the_family_is_read_as_the_engine_reads_the_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def detect(*given: Any) -> str:
        print("vLLM says something")
        asked.extend(given)
        return "mtp"

    monkeypatch.setattr(subject, "detect_family", detect)
    overrides = {"trust_remote_code": True, "hf_token": "secret", "speculative_config": {"revision": "main"}}
    nothing = ShapeRequests([])
    found = subject.subject_of(tmp_path, "target", None, None, None, None, None, overrides, nothing)
    assert found.family == "mtp"
    assert asked == [None, "target", "main", Reader(trust_remote_code=True, hf_token="secret")]
    assert capsys.readouterr().out == "", "standard output may be the JSON's alone"


@pytest.mark.parametrize("text", ["\n", '{"prompt": "one"}\ntwo\n', '{"text": "one"}\n', '{"prompt": 1}\n'])
def test_prompts_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(CommandError) as refused:
        subject.read_prompts(file)
    assert refused.value.exit_code == 2


# Engines


def test_what_the_engines_are_started_with() -> None:
    compared = comparison(overrides={"seed": 7, "speculative_config": {"enforce_eager": True}})
    job = compared.job(5, "eagle3", {"disable": ["actual_max_seq_len"]})
    assert job.speculative_config == {
        "method": "eagle3",
        "model": "head",
        "num_speculative_tokens": 5,
        "enforce_eager": True,
    }
    assert job.overrides == {"seed": 7, "additional_config": {"eagle_mrv2": {"disable": ["actual_max_seq_len"]}}}
    assert job.arguments["max_model_len"] == 512
    assert job.arguments["gpu_memory_utilization"] == 0.42
    assert job.arguments["enable_prefix_caching"] is False


def test_what_either_side_is_given() -> None:
    stock, ours = comparison(options={"draft_quantization": "fp8"}).jobs(5).values()
    assert [job.method for job in (stock, ours)] == ["eagle3", "eagle_mrv2:eagle3"]
    assert "additional_config" not in stock.overrides
    assert ours.overrides["additional_config"] == {"eagle_mrv2": {"draft_quantization": "fp8"}}


def test_a_random_eagle3_head_keeps_its_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = shape_subject(tmp_path, Shape.b8, "eagle3", [[1]])
    (name, folder), *others = subject.plugins.items()
    assert not others
    assert subject.environment({"PYTHONPATH": "elsewhere", "VLLM_PLUGINS": "eagle_mrv2"}) == {
        "PYTHONPATH": f"{folder}:elsewhere",
        "VLLM_PLUGINS": f"eagle_mrv2,{name}",
    }
    assert subject.environment({}) == {"PYTHONPATH": folder}
    assert shape_subject(tmp_path, Shape.b8, "eagle", [[1]]).environment({"PYTHONPATH": "elsewhere"}) == {}

    head = pytest.importorskip("vllm.model_executor.models.llama_eagle3").Eagle3LlamaForCausalLM
    monkeypatch.setattr(head, "has_own_lm_head", False, raising=False)
    monkeypatch.syspath_prepend(folder)
    (plugin,) = entry_points(group="vllm.general_plugins", name=name)
    plugin.load()()
    assert head.has_own_lm_head is True


def test_names_of_the_sides() -> None:
    assert list(comparison().methods) == ["stock", "eagle_mrv2"]
    assert list(comparison(disable=["a", "b"]).methods) == ["stock", "eagle_mrv2 without a, b"]
    assert list(comparison(disable=["a"], against_ours=True).methods) == ["eagle_mrv2 without a", "eagle_mrv2"]


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("shape", Shape)
def test_shapes_are_taken_for_their_family(shape: Shape, family: str, tmp_path: Path) -> None:
    subject = shape_subject(tmp_path, shape, family, token_prompts(4))
    assert subject.draft is not None
    assert detect_family(subject.draft, subject.model) == family
    assert len({tuple(prompt) for prompt in subject.prompts}) == 4
    config = json.loads((Path(subject.model) / "config.json").read_text())
    assert config["num_attention_heads"] * config["head_dim"] == config["hidden_size"]


def test_a_shape_has_room_for_its_requests_in_flight(tmp_path: Path) -> None:
    """Of 8B 33 layers with eight heads of 128 keys and as many values each, in two bytes."""
    for tokens, room in ((0, 4 * 2**30), (100_000, 100_000 * 33 * 8 * 128 * 2 * 2)):
        subject = shape_subject(tmp_path, Shape.b8, "eagle", [[1]], tokens)
        assert subject.arguments["kv_cache_memory_bytes"] == room


def test_the_engines_take_turns() -> None:
    asked: list[tuple[str, Any]] = []
    measured = measure(live(2, ("a", "b"), [taken(), taken()], asked), 2, 3, 64)
    assert [f"{name} {job.max_tokens}" for name, job in asked] == [
        *(["a 32", "b 32"] * 2),
        *("b 64", "a 64", "a 64", "b 64", "b 64", "a 64"),
    ]
    assert len(measured.against) == len(measured.eagle_mrv2) == 3


@dataclass
class StartedProcess:
    """The process of an engine that has started at once."""

    device: str = "cuda"
    kept: list[list[int]] = field(default_factory=list)
    """The cores that it was told to keep to."""

    def __enter__(self) -> StartedProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def send(self, job: object) -> None: ...

    def finish(self) -> None: ...

    def receive(self) -> Any:
        return H200.model_copy(update={"device": self.device}).model_dump()

    def keep_to(self, cores: list[int]) -> None:
        self.kept.append(cores)


@pytest.mark.parametrize(
    ("device", "gpus", "cores"), [("cuda", 1, [4, 5, 6, 7]), ("cuda", 2, list(range(8))), ("cpu", 1, None)]
)
def test_the_engines_share_their_cores(
    device: str, gpus: int, cores: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = StartedProcess(device)
    monkeypatch.setattr(Comparison, "_process", lambda *_: process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with comparison(overrides={"tensor_parallel_size": gpus}).engines(3):
        assert process.kept == ([] if cores is None else [cores, cores])


@pytest.mark.parametrize(("options", "chooses"), [({}, False), ({"draft_length": "auto"}, True)])
def test_whether_an_engine_chooses_its_draft_length(
    options: dict[str, Any], chooses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "_process", lambda *_: StartedProcess())
    with comparison(options=options).engines(3) as started:
        assert started.chooses_length is chooses


def fake_engines(monkeypatch: pytest.MonkeyPatch, ours: Round, fails_at: int | None = None) -> None:
    @contextmanager
    def engines(self: Comparison, k: int) -> Iterator[Engines]:
        if k == fails_at:
            raise CommandError("the engine with stock failed: no memory", 1)
        yield live(k, list(self.methods), [taken(), ours], [])

    monkeypatch.setattr(Comparison, "engines", engines)


def test_exit_status_and_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_engines(monkeypatch, taken(seconds=0.01))
    file = tmp_path / "bench.json"
    result = CliRunner().invoke(app, ["bench", "-k", "2", "4", "--batch", "1,2", "--rounds", "3", "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [(one["k"], one["batch"]) for one in found["rows"]] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert found["passed"]
    assert found["options"]["k"] == [2, 4]
    assert found["versions"].keys() == {"vllm", "eagle_mrv2", "python", "torch", "triton"}
    assert found["device_name"] == "H200"
    assert found["rows"][0]["ratio"] == pytest.approx(2)


def test_json_alone_on_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engines(monkeypatch, taken(num_drafts=5))
    result = CliRunner().invoke(app, ["bench", "--rounds", "2", "--json", "-"])
    assert result.exit_code == 1
    (only,) = json.loads(result.stdout)["rows"]
    assert only["ratio"] is None
    assert only["refusals"] == ["round 1: 4 drafts with stock, 5 with eagle_mrv2"]


def test_rows_before_a_failure_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engines(monkeypatch, taken(), fails_at=4)
    result = CliRunner().invoke(app, ["bench", "-k", "2", "4", "--rounds", "2"])
    assert result.exit_code == 1
    assert "1.000 (1.000-1.000)" in result.stdout
    assert result.stderr.endswith("error: the engine with stock failed: no memory\n")
    first = CliRunner().invoke(app, ["bench", "-k", "4", "2", "--json", "-"])
    assert first.exit_code == 1
    assert json.loads(first.stdout) == {"error": "the engine with stock failed: no memory"}


# Figures


def test_a_burst_counts_as_so_many_tokens() -> None:
    assert worker.inter_token_latencies([(1.0, 1), (1.3, 3), (1.5, 1)]) == pytest.approx([0.1, 0.1, 0.1, 0.2])
    assert worker.inter_token_latencies([(1.0, 4)]) == []


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 99)) == (50, 99)
    assert percentile([3.0], 99) == 3
    assert percentile([], 50) == 0


def test_steps_are_sorted_by_request() -> None:
    def output(request: int, *tokens: int) -> Any:
        return SimpleNamespace(request_id=str(request), outputs=[SimpleNamespace(token_ids=list(tokens))])

    steps = [(10.0, []), (10.5, [output(1, 7), output(0, 1)]), (11.5, [output(0, 2, 3)]), (12.0, [output(1, 8)])]
    read = worker._read_steps(steps, 10.0, 2)
    assert read["token_ids"] == [[1, 2, 3], [7, 8]]
    assert read["iterations"] == 3
    assert (read["itl_p50_ms"], read["itl_p99_ms"]) == (500, 1500)
    assert read["ttft_p50_ms"] == 500


def test_figures_are_medians_of_the_rounds() -> None:
    rounds = [taken(seconds=seconds) for seconds in (0.02, 0.04, 0.2)]
    figures = row(rounds, rounds).figures("eagle_mrv2")
    assert figures.iteration_ms == pytest.approx(20)
    assert figures.tokens_per_second == pytest.approx(200)
    assert figures.acceptance == [1.0, 0.5]
    assert figures.acceptance_length == 2.5


def test_the_ratio_is_the_median_over_neighbours() -> None:
    against = [taken(seconds=seconds) for seconds in (0.3, 0.2, 0.8, 0.5, 0.4)]
    ours = [taken(seconds=seconds) for seconds in (0.1, 0.1, 0.2, 0.1, 0.4)]
    assert row(against, ours).quartiles == pytest.approx((2, 3, 4))


@pytest.mark.parametrize(
    ("changed", "reasons"),
    [
        ({"token_ids": [[1, 2, 3, 4], [5, 6, 0, 8]]}, ["greedy tokens differ, first at token 3 of prompt 2"]),
        (
            {"token_ids": [[1, 2, 3, 4], [5, 6, 7]]},
            ["greedy tokens differ, first at token 4 of prompt 2", "8 tokens with stock, 7 with eagle_mrv2"],
        ),
        ({"iterations": 3}, ["2 engine iterations with stock, 3 with eagle_mrv2"]),
        ({"num_drafts": 5}, ["4 drafts with stock, 5 with eagle_mrv2"]),
        ({"num_draft_tokens": 7}, ["8 draft tokens with stock, 7 with eagle_mrv2"]),
    ],
)
def test_other_work_has_no_ratio(changed: dict[str, Any], reasons: list[str]) -> None:
    refused = row([taken(), taken()], [taken(), taken(**changed)])
    unsteady = ["the tokens of eagle_mrv2 differ between its own rounds too: its arithmetic is not repeatable"]
    expected = [f"round 2: {reason}" for reason in reasons] + (unsteady if "token_ids" in changed else [])
    assert refused.refusals == expected
    assert refused.quartiles is None
    assert not report(refused).passed
    assert report(row([taken(), taken()], [taken(), taken()])).passed


def test_no_ratio_without_drafts() -> None:
    nothing = taken(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, num_accepted_tokens_per_pos=[0, 0])
    refused = row([nothing, nothing], [nothing, nothing])
    assert refused.refusals == ["round 1: nothing was drafted"]
    assert refused.figures("against").acceptance == []


# What is shown


def test_the_table() -> None:
    good = row([taken(), taken()], [taken(seconds=0.016), taken(seconds=0.016)])
    refused = row([taken(), taken()], [taken(iterations=4), taken()], k=7)
    lines = shown(report(good, refused))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells == [
        ["2", "2", "stock", "10.000", "400.0", "2.000", "3.000", "4.00", "100% 50%", ""],
        ["2", "2", "eagle_mrv2", "8.000", "500.0", "2.000", "3.000", "4.00", "100% 50%", "1.250 (1.250-1.250)"],
        ["7", "2", "stock", "10.000", "400.0", "2.000", "3.000", "4.00", "100% 50%", ""],
        ["7", "2", "eagle_mrv2", "7.500", "400.0", "2.000", "3.000", "4.00", "100% 50%", "refused"],
    ]
    assert lines[-1] == "K=7, batch 2: no ratio; round 1: 2 engine iterations with stock, 4 with eagle_mrv2"


def test_times_of_a_cpu_mean_nothing() -> None:
    one = row([taken(), taken()], [taken(), taken()])
    assert "mean nothing" in shown(report(one, started=CPU))[-1]
    assert not any("mean nothing" in line for line in shown(report(one)))


def test_the_json_has_every_round_but_no_tokens() -> None:
    found = report(row([taken(), taken(seconds=0.04)], [taken(), taken()])).to_json()
    (one,) = found["rows"]
    assert [made["iteration_ms"] for made in one["against"]["rounds"]] == pytest.approx([10, 20])
    assert one["quartiles"] == pytest.approx([1.25, 1.75])
    assert one["names"] == {"against": "stock", "eagle_mrv2": "eagle_mrv2"}
    assert "token_ids" not in json.dumps(found)


@pytest.mark.parametrize("ours", [taken(), taken(iterations=4)], ids=["ratio", "refused"])
def test_the_drawing(ours: Round, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row([taken(), taken()], [ours, ours], k=k, batch=batch) for k in (3, 5) for batch in (1, 8)]
    report(*rows).draw(tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
