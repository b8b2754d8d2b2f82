"""The scripts of benchmarks/, which otherwise run on machines with a GPU alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import BENCHMARKS, script

from vllm_eagle_mrv2.cli.bench_load.types import LoadRow
from vllm_eagle_mrv2.cli.common import engines
from vllm_eagle_mrv2.cli.common.load.types import Level, LoadRound

from .commands import comparison

pytestmark = pytest.mark.any_release


def machine_with(
    tmp_path: Path, python: str, *jobs: str, what: str = "times", **environment: str
) -> subprocess.Popen[str]:
    """benchmarks/gpu_matrix.sh at the times of jobs, on 0.26.0 alone and with a shell script for Python."""
    (tmp_path / "site-0.26.0").mkdir()
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{python}\n")
    interpreter.chmod(0o755)
    return subprocess.Popen(
        ["bash", str(BENCHMARKS / "gpu_matrix.sh"), str(tmp_path), str(tmp_path / "out"), what, *jobs],
        env=os.environ | {"PYTHON": str(interpreter)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_missing_release_is_found_before_any_starts(tmp_path: Path) -> None:
    """Those that take turns would wait for it until their limit."""
    started = tmp_path / "started"
    run = machine_with(tmp_path, f"touch {started}", "0.26.0", "0.20.2 --steps 7")
    _, error = run.communicate(timeout=60)
    assert (run.returncode, error) == (2, f"error: {tmp_path} has no site-0.20.2\n")
    assert not started.exists()


@pytest.mark.parametrize("what", ["times", "lengths"])
def test_measuring_waits_for_a_file(what: str, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    python = (
        'case "$*" in *pip*) exit ;; esac\n'
        'touch "$4/up-engine"\n'
        'until [ "$(ls "$4" | wc -l)" -ge "$3" ]; do sleep 0.1; done\n'
        f'[ -e "{hold}" ] && echo measured'
    )
    run = machine_with(tmp_path, python, "0.26.0", what=what, EAGLE_MRV2_HOLD=str(hold))
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(3)
    hold.touch()
    assert run.wait(30) == 0
    assert (tmp_path / "out" / f"{what}.jsonl").read_text() == "measured\n"


def test_a_job_of_many_words(tmp_path: Path) -> None:
    """Tests that are named one by one make a name that no folder can have."""
    jobs = [f"0.26.0 {'--setting ' * 40}{last}" for last in ("one", "two")]
    assert machine_with(tmp_path, "echo measured", *jobs).wait(60) == 0
    assert (tmp_path / "out" / "times.jsonl").read_text() == "measured\nmeasured\n"


def test_a_script_without_engines_takes_no_turns(tmp_path: Path) -> None:
    python = 'case "$*" in *pip*) exit ;; esac\necho "$*"; case "$*" in *fp8*) exit 1 ;; esac'
    run = machine_with(tmp_path, python, "0.26.0 argmax", "0.26.0 fp8", what="kernels")
    assert run.wait(60) == 1  # one of them failed
    lines = sorted((tmp_path / "out" / "kernels.jsonl").read_text().splitlines())
    assert lines == [f"benchmarks/kernel_times.py {kind}" for kind in ("argmax", "fp8")]


def test_compiled_code_can_be_kept_for_the_next_call(tmp_path: Path) -> None:
    python = 'case "$*" in *pip*) exit ;; esac\necho "$VLLM_CACHE_ROOT $TRITON_CACHE_DIR"'
    jobs = ["0.26.0 --steps 3", "0.26.0 --steps 7"]
    kept = f"{tmp_path}/kept/0.26.0"
    assert machine_with(tmp_path, python, *jobs, EAGLE_MRV2_CACHES=f"{tmp_path}/kept").wait(60) == 0
    assert (tmp_path / "out" / "times.jsonl").read_text() == f"{kept}/vllm {kept}/triton\n" * 2
    for by_job in ({}, {"EAGLE_MRV2_CACHES": f"{tmp_path}/kept", "EAGLE_MRV2_CACHES_OF": "job"}):
        (tmp_path / "site-0.26.0").rmdir()
        assert machine_with(tmp_path, python, *jobs, **by_job).wait(60) == 0
        folders = (tmp_path / "out" / "times.jsonl").read_text().split()
        assert len(set(folders)) == 4
        assert all(folder.startswith(f"{tmp_path}/kept/") == bool(by_job) for folder in folders)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, {}),
        ({"draft_vocab": 32768}, {"setting": "trimmed to 32,768 tokens"}),
        ({"before": Path("installed/0.1.0")}, {"before": "0.1.0"}),
    ],
)
def test_a_line_says_what_is_special_about_it(given: dict[str, Any], said: dict[str, str]) -> None:
    """Such a case is not the one of two engines that differ only in the speculator."""
    ab_time = script("ab_time")
    row = SimpleNamespace(k=7, batch=1, quartiles=(1.4, 1.5, 1.6), eagle_mrv2=[])
    row.figures = lambda side: SimpleNamespace(iteration_ms=2.0)
    plain = {
        "shape": ab_time.Shape.b1,
        "family": "eagle",
        "disable": [],
        "setting": None,
        "draft_vocab": None,
        "before": None,
    }
    line = ab_time.line_of(row, SimpleNamespace(**plain | {"before": None} | given), "0.26.0")
    assert {key: line[key] for key in ("setting", "without", "before") if key in line} == said


PLAIN_LOAD: dict[str, Any] = {
    "pair": None,
    "accepted": None,
    "setting": None,
    "temperature": 0.0,
    "top_p": 1.0,
    "most": None,
}


@pytest.mark.parametrize(
    ("kind", "given", "setting"),
    [
        ("all", {"setting": "FP8"}, "FP8"),
        ("all", {"temperature": 0.7}, "temperature 0.7, top_p 1"),
        ("all", {"setting": "FP8", "temperature": 1.0, "top_p": 0.9}, "FP8, temperature 1, top_p 0.9"),
        ("editing", {"accepted": "low"}, "editing, low acceptance"),
        ("all", {"accepted": "low", "most": 5}, "low acceptance, auto up to K=5"),
    ],
)
def test_what_is_special_about_a_load(kind: str, given: dict[str, Any], setting: str) -> None:
    options = SimpleNamespace(**PLAIN_LOAD | given)
    setting_of = script("load_times").setting_of
    assert setting_of(options.setting, kind, options) == {"setting": setting}
    assert setting_of(None, "all", SimpleNamespace(**PLAIN_LOAD)) == {}


def test_the_prompts_of_a_kind() -> None:
    """Kinds take turns among the pair's prompts."""
    load_times = script("load_times")
    assert load_times.KINDS == script("readme_tables").KINDS == tuple(sorted(script("smollm2_prompts").KINDS))
    subject = load_times.Subject("", "target", "head", "eagle3", [[kind] for kind in 3 * [0, 1, 2, 3]], {})
    for number, kind in enumerate(load_times.KINDS):
        assert [subject.prompts[place] for place in load_times.places_of(kind, subject)] == 3 * [[number]]
    assert list(load_times.places_of("all", subject)) == list(range(12))


@pytest.mark.parametrize("control", [True, False])
def test_the_lines_of_a_load(control: bool) -> None:
    """One for each engine of ours, beside stock's."""
    load_times = script("load_times")

    def rounds(*speeds: int) -> list[LoadRound]:
        names = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "gap_p99_ms", "accepted_length")
        figures: dict[str, Any] = dict.fromkeys(names, 2 / 3)
        return [LoadRound(seconds=3.0, num_tokens=speed, **figures) for speed in speeds]

    names = ("stock", "stock again", "eagle_mrv2") if control else ("stock", "eagle_mrv2")
    again = [rounds(99, 101, 100)] if control else []
    row = LoadRow(
        k=7,
        level=Level(concurrency=8),
        names=(*names, "FP8"),
        rounds=[rounds(100, 100, 100), *again, rounds(110, 120, 100), rounds(200, 200, 200)],
    )
    options = SimpleNamespace(**PLAIN_LOAD | {"shape": load_times.Shape.b1, "family": "eagle"})
    line, variant = load_times.lines_of(row, "all", options, "0.26.0")
    assert (variant["setting"], variant["gain"]) == ("FP8", [2, 2, 2])
    assert variant["figures"]["eagle_mrv2"]["tokens_per_second"] == 66.667
    assert variant["figures"].keys() == variant["tokens_per_second"].keys() == set(names)
    assert line.pop("control", None) == ([1, 0.99, 1.01] if control else None)
    figures = line.pop("figures")
    assert tuple(figures) == names
    taken = line.pop("tokens_per_second")
    assert (tuple(taken), taken["eagle_mrv2"]) == (names, [36.7, 40, 33.3])
    assert figures["eagle_mrv2"] == dict.fromkeys(figures["stock"], 0.667) | {"tokens_per_second": 36.667}
    assert line == {
        "vllm": "0.26.0",
        "shape": "1b",
        "method": "eagle",
        "k": 7,
        "concurrency": 8,
        "gain": [1.1, 1, 1.2],
    }
    assert json.dumps(line)


def versions(**changed: Any) -> Any:
    """A comparison as benchmarks/ab_time.py makes them."""
    return script("ab_time").Versions(**vars(comparison()) | changed)


def test_stock_may_be_set_up_otherwise() -> None:
    jobs = versions(baseline=True, control=True, stock_speculative={"head": "fp8"}).jobs(5)
    given = {name: (job.speculative_config or {}).get("head") for name, job in jobs.items()}
    assert given == {"stock": "fp8", "stock again": "fp8", "no speculation": None, "eagle_mrv2": None}


def test_an_earlier_version_is_given_what_ours_is() -> None:
    compared = versions(before=Path("0.1.0"), stock_speculative={"head": "fp8"}, options={"lookup_drafts": True})
    earlier, later = compared.jobs(5).values()
    assert earlier == later
    assert (later.method, later.overrides["additional_config"]["eagle_mrv2"]) == ("eagle_mrv2:eagle3", compared.options)
    assert "head" not in later.speculative_config


def test_an_earlier_version_is_imported_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setattr(
        engines, "EngineProcess", lambda module, name, variables, verbose: paths.append(variables["PYTHONPATH"])
    )
    compared = versions(before=Path("installed/0.1.0"))
    assert list(compared.methods) == ["eagle_mrv2 of 0.1.0", "eagle_mrv2"]
    for name in compared.methods:
        compared._process(name, "eagle_mrv2:eagle3")
    assert paths == [f"{Path('installed/0.1.0').resolve()}:elsewhere", "elsewhere"]


def test_variants_are_further_engines_of_ours() -> None:
    load_times = script("load_times")
    subject = load_times.Subject("", "target", "head", "eagle3", [[1]], {})
    compared = load_times.Variants(
        subject, "a_worker", {"lookup_drafts": True}, control=True, variants={"FP8": {"draft_quantization": "fp8"}}
    )
    jobs = compared.jobs(3)
    assert list(jobs) == ["stock", "stock again", "eagle_mrv2", "FP8"]
    given = [job.overrides.get("additional_config", {}).get("eagle_mrv2") for job in jobs.values()]
    assert given == [None, None, {"lookup_drafts": True}, {"lookup_drafts": True, "draft_quantization": "fp8"}]
    assert [job.method for job in jobs.values()] == ["eagle3", "eagle3", "eagle_mrv2:eagle3", "eagle_mrv2:eagle3"]


@pytest.mark.parametrize("k", [0, 2])
def test_ours_may_draft_more_than_stock(k: int) -> None:
    load_times = script("load_times")
    subject = load_times.Subject("", "target", "head", "eagle3", [[1]], {})
    acceptance = [0.5, 0.4, 0.3, 0.2, 0.1]
    compared = load_times.Variants(
        subject, "a_worker", acceptance=acceptance, options={"draft_length": "auto"}, variants={"FP8": {}}, most=5
    )
    stocks, *ours = (job.speculative_config for job in compared.jobs(k).values())
    for config in ours:
        assert (config["num_speculative_tokens"], config["synthetic_acceptance_rates"]) == (5, acceptance)
        assert config["method"] == "eagle_mrv2:eagle3"
    if k:
        assert (stocks["num_speculative_tokens"], stocks["synthetic_acceptance_rates"]) == (k, acceptance[:k])
        assert stocks["method"] == "eagle3"
    else:
        assert stocks is None


def test_what_the_host_does_in_an_iteration() -> None:
    class Speculator:
        def propose(self) -> None:
            time.sleep(0.002)

    class Runner:
        speculator = Speculator()

        def execute_model(self) -> None:
            time.sleep(0.001)

        def sample_tokens(self) -> None:
            self.speculator.propose()

    class Output:
        def get_output(self) -> None:
            time.sleep(0.001)

    runner = Runner()
    get_output = Output.get_output

    def generate() -> None:
        for _ in range(3):
            runner.execute_model()
            runner.sample_tokens()
            Output().get_output()

    found = script("draft_timeline").host_times(runner, Output, generate)
    host, functions = found["host_us"], found["host_functions_us"]
    assert host["execute_model"] >= 1000
    assert 2000 <= host["propose"] <= host["sample_tokens"]
    slowest, us = next(iter(functions.items()))
    assert "sleep" in slowest
    assert us >= 4000  # of one iteration, asleep in all three
    assert host["get_output"] >= 1000
    assert host["iteration"] >= 4000
    assert not vars(runner)
    assert not vars(runner.speculator)
    assert Output.get_output is get_output


def timeline_of(prefills: list[bool]) -> list[Any]:
    """The events of iterations of 1 ms; those that prefill draft for 50 us more."""
    event = script("draft_timeline").Event
    return [
        event(iteration * 1_000_000 + start, iteration * 1_000_000 + end, name)
        for iteration, prefill in enumerate(prefills)
        for start, end, name in (
            (0, 500_000, "verify"),
            (510_000, 511_000, "spin_kernel(long)"),
            (520_000, 620_000, "draft"),
            (590_000, 600_000, "beside"),
            (640_000, 770_000 if prefill else 720_000, "draft"),
            (780_000, 781_000, "spin_kernel(long)"),
        )
    ]


def test_what_a_timeline_says() -> None:
    timeline = script("draft_timeline")
    batches = [timeline.Batch(prefills=False, tokens=tokens) for tokens in range(9)]
    found = timeline.summary(timeline_of([False] * 9), batches)
    assert (found["iterations"], found["tokens"]) == (2, 4.5)
    assert (found["phase_us"], found["busy_us"], found["idle_share"]) == (200.0, 180.0, 0.1)
    assert (found["iteration_us"], found["iteration_busy_us"]) == (1000.0, 682.0)
    assert found["kernels"] == {"draft": {"count": 2, "us": 180.0}, "beside": {"count": 1, "us": 10.0}}
    assert (found["verification_busy_us"], found["verification_kernels"]) == (
        500.0,
        {"verify": {"count": 1, "us": 500.0}},
    )
    assert found["largest_gaps_us"] == [40.0, -30.0]
    assert found["iteration_gaps_us"][:2] == [
        (219.0, "spin_kernel(long)", "verify"),
        (60.0, "draft", "spin_kernel(long)"),
    ]


def test_iterations_that_prefill_are_apart() -> None:
    timeline = script("draft_timeline")
    prefills = [False, False, False, False, True, False, True, True, False, True, True, True]
    batches = [timeline.Batch(prefill, 500 if prefill else 8) for prefill in prefills]
    events = timeline_of(prefills)
    nothing_drafted = [timeline.Event(at, at + 1, "spin_kernel(long)") for at in (-20, -10)]
    found = timeline.summary(nothing_drafted + events, [timeline.Batch(True, 900), *batches])
    assert found.keys() == {"mixed", "decodes"}
    mixed, decodes = found["mixed"], found["decodes"]
    assert (mixed["tokens"], decodes["tokens"]) == (500, 8)
    assert (mixed["iterations"], mixed["phase_us"], mixed["busy_us"]) == (3, 250.0, 230.0)
    assert (decodes["iterations"], decodes["phase_us"], decodes["busy_us"]) == (2, 200.0, 180.0)
    assert mixed["kernels"]["draft"] == {"count": 2, "us": 230.0}
    with pytest.raises(AssertionError):  # a phase too many
        timeline.summary(events, [timeline.Batch(True, 900), *batches])


def test_what_a_start_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, name, None)
    compiled: dict[str, float] = {}
    script("draft_timeline").record_compilations(compiled)

    def compile_kernel(name: str, module: str = "vllm.v1") -> None:
        given: dict[str, Any] = {"fn": SimpleNamespace(name=name, module=module), "repr": f"{name}(a: i32)"}
        assert not runtime.jit_cache_hook(**given)  # or Triton would leave it
        time.sleep(0.01)
        runtime.jit_post_compile_hook(**given)

    for name in ("once", "twice", "twice"):
        compile_kernel(name)
    compile_kernel("ours", "vllm_eagle_mrv2.kernels.greedy")
    other = threading.Thread(target=compile_kernel, args=("by another thread",))
    other.start()
    other.join()
    assert compiled.keys() == {"once", "twice", "ours(a: i32)"}
    assert compiled["twice"] > compiled["once"] > 0


def test_what_found_no_memory_has_not_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    failure = '<failure message="ValueError: Free memory on device cuda:0 (6.32/139.8 GiB) on startup is less than"/>'
    cut_short = '<testcase name="internal"><error message="internal error"/></testcase>'
    cases = f'<testcase name="a">{failure}</testcase><testcase name="b"/>{cut_short}'
    report.write_text(f"<testsuite>{cases}</testsuite>")
    tests = script("gpu_result").read_reports([report])["tests"]
    assert tests == {"passed": 1, "failed": 0, "skipped": 0, "not_run": 1}


def test_pairs_of_one_case_are_one_result(tmp_path: Path) -> None:
    times = tmp_path / "times.jsonl"
    case = {"vllm": "0.26.0", "shape": "1b", "method": "eagle", "k": 3, "batch": 1}
    pair = {"stock": 2.0, "eagle_mrv2": 1.0, "ratio": 2.0, "quartiles": [1.0, 4.0], "rounds": 11}
    other = {"stock": 8.1, "eagle_mrv2": 1.0, "ratio": 8.0, "quartiles": [4.0, 9.0], "rounds": 7}
    lines = [case | pair, case | {"setting": "FlashInfer"} | pair, case | other, case | {"vllm": "0.33.0"} | other]
    times.write_text("\n".join(["a log", *map(json.dumps, lines)]))
    joined, alone = script("gpu_result").read_times([times], "0.26.0")
    del case["vllm"]
    measured = {"stock": [2.0, 8.1], "eagle_mrv2": [1.0, 1.0], "ratio": 4.0, "quartiles": [2.0, 6.0], "rounds": 18}
    assert joined == case | measured
    assert alone == case | {"setting": "FlashInfer"} | pair | {"stock": [2.0], "eagle_mrv2": [1.0]}


def test_a_load_that_was_measured_again_is_replaced_or_joined(tmp_path: Path) -> None:
    put = script("gpu_result").put_lines
    result: dict[str, Any] = {"vllm": "0.26.0"}

    def measured(commit: str, *lines: tuple[str, int, float], further_pair: bool = False) -> list[tuple[Any, ...]]:
        file = tmp_path / commit
        case = {"shape": "8b", "method": "eagle3", "k": 3}
        loads = [{"vllm": vllm, **case, "concurrency": many, "gain": gain} for vllm, many, gain in lines]
        file.write_text("\n".join(["a log", *map(json.dumps, loads)]))
        put(result, "under_load", [file], commit, further_pair=further_pair)
        return [(line["concurrency"], line["gain"], line["commit"]) for line in result["under_load"]]

    lines = measured("a", ("0.26.0", 8, 1.1), ("0.33.0", 8, 9), ("0.26.0", 1, 1.2))
    assert lines == [(1, 1.2, "a"), (8, 1.1, "a")]
    assert measured("b", ("0.26.0", 8, 1.3)) == [(1, 1.2, "a"), (8, 1.3, "b")]
    assert measured("c", ("0.26.0", 8, 1.4), further_pair=True) == [(1, 1.2, "a"), (8, 1.3, "b"), (8, 1.4, "c")]
    assert measured("d", ("0.26.0", 8, 1.5)) == [(1, 1.2, "a"), (8, 1.5, "d")]
    aside = [(old["commit"], line["gain"]) for old in result["earlier"] for line in old["under_load"]]
    assert aside == [("b", 1.3), ("c", 1.4), ("a", 1.1)]


def test_draft_lengths_of_nothing_starts_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = script("draft_lengths")
    monkeypatch.delattr(lengths, "Setup")
    monkeypatch.setattr(sys, "argv", ["draft_lengths.py", "--accepted"])
    with pytest.raises(SystemExit, match="2"):
        lengths.main()
    assert "nothing to measure" in capsys.readouterr().err


def test_lines_about_draft_lengths(tmp_path: Path) -> None:
    """Those of a steady load differ from those of one that changes."""
    file = tmp_path / "lengths.jsonl"
    result: dict[str, Any] = {"vllm": "0.26.0"}
    about: list[dict[str, Any]] = [
        {"accepted": "low", "concurrency": 4},
        {"change": "load"},
        {"accepted": "high", "concurrency": 16},
    ]
    about += [{"accepted": "low", "concurrency": 64}, {"change": "acceptance"}]
    file.write_text("\n".join(json.dumps({"vllm": "0.26.0", "shape": "8b", "k": 5} | one) for one in about))
    for commit in ("a", "b"):
        script("gpu_result").put_lines(result, "draft_lengths", [file], commit)
    found: Any = result["draft_lengths"]
    assert [line.get("change") or (line["accepted"], line["concurrency"]) for line in found] == [
        *("acceptance", "load"),
        *(("high", 16), ("low", 4), ("low", 64)),
    ]
    assert {line["commit"] for line in found} == {"b"}


def test_what_was_measured_again_moves_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_result = script("gpu_result")
    monkeypatch.setattr(gpu_result, "RESULTS", tmp_path)
    report, times = tmp_path / "tests.xml", tmp_path / "times.jsonl"
    report.write_text('<testsuites><testsuite><testcase classname="gpu" name="a"/></testsuite></testsuites>')

    def put(commit: str, ratios: dict[int, float], *further: str) -> Any:
        case = {"vllm": "0.26.0", "shape": "1b", "method": "eagle", "batch": 1, "rounds": 3}
        times.write_text(
            "\n".join(
                json.dumps(case | {"k": k, "stock": ratio, "eagle_mrv2": 1.0, "ratio": ratio, "quartiles": [1, ratio]})
                for k, ratio in ratios.items()
            )
        )
        command = f"- 0.26.0 --times {times} --date day-{commit} --commit {commit} --command pairs"
        monkeypatch.setattr(sys, "argv", [*command.split(), *further])
        gpu_result.main()
        return json.loads((tmp_path / "h200-vllm-0.26.0.json").read_text())

    of_run = ("--reports", str(report), "--note", "once"), ("--versions", "python=3.12.3", "torch=2.11.0")
    for lacking in ((), *of_run):  # nothing to add to
        with pytest.raises(SystemExit):
            put("a", {3: 2.0}, *lacking)
    assert put("a", {3: 2.0, 7: 4.0}, *of_run[0], *of_run[1])["versions"] == {"python": "3.12.3", "torch": "2.11.0"}
    put("b", {1: 1.0, 3: 8.0})
    result = put("b", {3: 1.0})
    assert [(line["k"], line["ratio"], line.get("commit")) for line in result["iteration_ms"]] == [
        (7, 4.0, "a"),
        (3, 2.8284, None),  # two pairs of one commit
        (1, 1.0, None),
    ]
    assert result["iteration_ms"][1] | {"stock": [8.0, 1.0], "rounds": 6} == result["iteration_ms"][1]
    old = [(each["commit"], [line["ratio"] for line in each["iteration_ms"]]) for each in result["earlier"]]
    assert old == [("a", [2.0])]
    assert result["tests"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert (result["commit"], result["notes"]) == ("b", ["once"])
    assert result["date"] == "day-a"  # of the tests
    assert result["command"] == ["day-a, at a: pairs", "day-b, at b: pairs", "day-b, at b: pairs"]
    assert put("c", {}, "--reports", str(report))["date"] == "day-c"
    loads = tmp_path / "loads.jsonl"
    loads.write_text(json.dumps({"vllm": "0.26.0", "shape": "1b", "concurrency": 1, "gain": [1.1, 1.0, 1.2]}))
    monkeypatch.setattr(sys, "argv", f"- 0.26.0 --loads {loads} --date day-d --commit d --command loads".split())
    gpu_result.main()
    result = json.loads((tmp_path / "h200-vllm-0.26.0.json").read_text())
    assert result["commit"] == "c"  # of the tests and pairs
    assert result["under_load"][0]["commit"] == "d"


def test_the_last_report_of_a_test_counts(tmp_path: Path) -> None:
    reports = []
    for number, cases in enumerate(
        (
            '<testcase classname="gpu" name="a"/><testcase classname="gpu" name="b"><failure/></testcase>',
            '<testcase classname="gpu" name="b"/><testcase classname="gpu" name="c"><skipped/></testcase><testcase/>',
        )
    ):
        reports.append(tmp_path / f"{number}.xml")
        reports[-1].write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    read = script("gpu_result").read_reports
    assert read(reports)["tests"] == {"passed": 2, "failed": 0, "skipped": 1}
    assert read(reports[:1])["tests"] == {"passed": 1, "failed": 1, "skipped": 0}


@pytest.mark.parametrize(
    ("steps", "cores"),
    [
        # Two slices of nine cores; the third comparison shares with the first, as one is measured at a time.
        ([1, 3, 7], ["0,1,4,8", "0,1,4,8", "9,10,11,12"]),
        ([3], ["0,1,4,8,9,10,11,12,13"]),
    ],
)
def test_each_comparison_has_cores_of_its_own(tmp_path: Path, steps: list[int], cores: list[str]) -> None:
    given = tmp_path / "given"
    taskset = tmp_path / "taskset"
    taskset.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -c ]; then echo "$2" >> {given}; shift 2; exec "$@"; fi\n'
        'echo "pid 1\'s current affinity list: 0-1,4,8-13"\n'
    )
    taskset.chmod(0o755)
    jobs = [f"0.26.0 --steps {k}" for k in steps]
    run = machine_with(tmp_path, ":", *jobs, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.wait(30) == 0
    assert sorted(given.read_text().split()) == cores
