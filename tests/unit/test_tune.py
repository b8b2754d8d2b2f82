"""Tuning without an engine: its options, what it asks of an engine, the schedule, and what it prints."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.common.engines import Engines, Setup
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.load.traffic import WORKER, Traffic
from vllm_eagle_mrv2.cli.common.load.types import Load, LoadRound
from vllm_eagle_mrv2.cli.common.pair import PAIR
from vllm_eagle_mrv2.cli.common.types import Started
from vllm_eagle_mrv2.cli.tune import settings
from vllm_eagle_mrv2.cli.tune.report import TuneReport
from vllm_eagle_mrv2.cli.tune.settings import measure
from vllm_eagle_mrv2.cli.tune.types import AUTO, Setting, TuneRow, schedule_of
from vllm_eagle_mrv2.config.draft_lengths import lengths_up_to

from .commands import CPU, H200, shown

OLD = Started(vllm_version="0.24.0", device="cuda", device_name="H200")
SERVER = {"method": "eagle_mrv2", "model": "heads/the [best]"}


def taken(num_tokens: int, drafted_length: float = 0.0) -> LoadRound:
    """A steady second."""
    times: dict[str, Any] = dict.fromkeys(
        ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "gap_p99_ms", "accepted_length"), 1.0
    )
    return LoadRound(seconds=1.0, num_tokens=num_tokens, drafted_length=drafted_length, **times)


def row(concurrency: int, *speeds: int, auto: int = 100) -> TuneRow:
    """A round of each number of draft tokens from 0 on, and one of the engine's own choice."""
    rounds: dict[Setting, list[LoadRound]] = {k: [taken(speed)] for k, speed in enumerate(speeds)}
    return TuneRow(concurrency=concurrency, rounds=rounds | {AUTO: [taken(auto)]})


def report(*rows: TuneRow, started: Started = H200, **changed: Any) -> TuneReport:
    about: dict[str, Any] = {"title": "a pair", "versions": {"torch": "2"}, "speculative": SERVER, "max_num_seqs": 64}
    return TuneReport(started=started, rows=list(rows), **about | changed)


FEWER_AS_MORE_COME = (row(1, 50, 80, 100), row(4, 60, 100, 80), row(64, 100, 90, 60))


# Options


def of_engine(**arguments: Any) -> list[str]:
    return ["--engine", json.dumps(arguments)]


SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 64, 2]]}
VARIES = "tune varies the number of draft tokens, and --engine keeps it from that: "


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (of_engine(data_parallel_size=2), f"{VARIES}data-parallel ranks of one model wait for each other"),
        (
            of_engine(speculative_config=SCHEDULE),
            f"{VARIES}num_speculative_tokens_per_batch_size is given and decides.",
        ),
        (of_engine(speculative_config={"enable_adaptive_verification": True}), f"{VARIES}enable_adaptive_verification"),
        (
            [*of_engine(max_num_seqs=8), "--concurrency", "16", "4"],
            "--concurrency 16 is more than max_num_seqs of --engine, 8.",
        ),
        (["--option", '{"draft_length": "constant"}'], "--option takes no draft_length: tune measures auto beside"),
        (["--option", '{"draft_logits_dtype": "int8"}'], "draft_logits_dtype"),
        (["--acceptance", ".7", ".4"], "-k 5 needs --acceptance with as many shares, not 2."),
        (["--shape", "1b", "-k", "8"], "-k 8 needs --acceptance with as many shares, not 7."),
        (["-k", "2", "--acceptance", ".4", ".5"], "no share may be larger than the one before it"),
        (["--output-tokens", "20", "10"], "--output-tokens 20 10: give the smaller number first"),
        (["--prompt-tokens", "20", "10"], "--prompt-tokens 20 10: give the smaller number first"),
        (["--concurrency", "0"], "Invalid value for '--concurrency'"),
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["-k", "0"], "Invalid value for '-k'"),
        (["--json", "no/such/folder.json"], "no such folder"),
        (["3"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_starts_no_engine(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())


# Engines


class FakeEngine:
    """Answers every load, at a speed that depends on the requests in flight and on the number that is held."""

    def __init__(self, speed: Callable[[int, int | None], int] = lambda in_flight, held: 100) -> None:
        self.asked: list[Load] = []
        self.setups: list[Setup] = []
        self.ks: list[int] = []
        self.started = H200
        self._speed = speed

    def ask(self, load: Load) -> Any:
        self.asked.append(load)
        assert load.concurrency is not None
        return taken(self._speed(load.concurrency, load.draft_length), load.draft_length or 0).model_dump()

    def live(self, k: int) -> Engines:
        process: Any = self
        return Engines(k, {"eagle_mrv2": process}, self.started)

    def instead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the command start this engine."""

        @contextmanager
        def start(setup: Setup, k: int) -> Iterator[Engines]:
            self.setups.append(setup)
            self.ks.append(k)
            yield self.live(k)

        monkeypatch.setattr(Setup, "engines", start)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own choice needs no time to settle."""
    monkeypatch.setattr(settings, "SETTLES_S", 0.0)


def test_the_own_choice_settles_before_rounds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has it alone for a while."""
    engine, clock = FakeEngine(), itertools.count()
    monkeypatch.setattr(settings, "SETTLES_S", 5.0)
    monkeypatch.setattr(settings, "monotonic", lambda: float(next(clock)))
    measure(engine.live(1), 4, Traffic(), 1)
    asked = engine.asked[1:]  # after it was filled
    assert [load.draft_length for load in asked] == [*[None] * 4, None, 1, 0]
    assert len({str(load.requests) for load in asked}) == 2, "and serves other requests"


def test_every_setting_has_the_same_requests_in_turn() -> None:
    engine, done = FakeEngine(lambda in_flight, held: 100 if held is None else 95 + held), list[int]()
    found = measure(engine.live(5), 4, Traffic(), 3, done.append)
    filling, *asked = engine.asked
    assert filling.fills
    assert not any(load.fills for load in asked)
    numbers = [0, 1, 2, 3, 5, None]
    assert [load.draft_length for load in asked] == [*numbers[::-1], *numbers[::-1], *numbers]
    requests = [load.requests for load in asked]
    for number in range(3):
        assert all(one == requests[6 * number] for one in requests[6 * number : 6 * number + 6])
    assert len({load.model_dump_json() for load in asked}) == 3 * 6
    assert {load.concurrency for load in engine.asked} == {found.concurrency} == {4}
    assert found.speeds == {0: 95, 1: 96, 2: 97, 3: 98, 5: 100, AUTO: 100}
    assert {len(rounds) for rounds in found.rounds.values()} == {3}
    assert done == [1, 2, 3]


def test_numbers_that_are_far_behind_have_one_round() -> None:
    engine, done = FakeEngine(lambda in_flight, held: {0: 50, 1: 89, 2: 90, 3: 100, None: 70}[held]), list[int]()
    found = measure(engine.live(3), 4, Traffic(), 3, done.append)
    assert {setting: len(rounds) for setting, rounds in found.rounds.items()} == {0: 1, 1: 1, 2: 3, 3: 3, AUTO: 3}
    assert done == [1, 2, 3]
    # The first load is made faster than the others: by 70 / 50 with the engine's own choice.
    rounds = found.rounds | {AUTO: [taken(70), taken(40), taken(40)], 3: [taken(100), taken(60), taken(50)]}
    assert TuneRow(concurrency=4, rounds=rounds).speeds == {0: 50 * 5 / 7, 1: 89 * 5 / 7, 2: 90, 3: 70, AUTO: 50}
    # One that is not measured further is not the best.
    slower: dict[Setting, list[LoadRound]] = {
        number: [*found.rounds[number][:1], taken(20), taken(20)] for number in (2, 3)
    }
    assert TuneRow(concurrency=4, rounds=found.rounds | slower).best == 3


def test_rounds_are_compared_with_the_prompts_that_they_call_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts this engine prefills nothing, and is faster for it."""
    engine = FakeEngine()

    def ask(load: Load) -> Any:
        tokens, prompts = (100, 0) if load.draft_length == 0 else (80, 200)
        made = taken(tokens, load.draft_length or 0)
        return made.model_copy(update={"prompt_tokens": prompts, "seconds_per_prompt_token": 0.0025}).model_dump()

    monkeypatch.setattr(engine, "ask", ask)
    found = measure(engine.live(1), 4, Traffic(), 3)
    assert {setting: len(rounds) for setting, rounds in found.rounds.items()} == {0: 1, 1: 3, AUTO: 3}
    assert found.best == 1
    assert found.speeds[0] < 0.9 * found.speeds[1] == 0.9 * found.speeds[AUTO]


@pytest.mark.parametrize(("drafted", "held"), [(2.0, False), (2.6, True), (3.0, True)])
def test_an_engine_that_drafts_another_number(drafted: float, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def ask(load: Load) -> Any:
        return taken(100, drafted if load.draft_length == 3 else load.draft_length or 0).model_dump()

    monkeypatch.setattr(engine, "ask", ask)
    if held:
        measure(engine.live(3), 1, Traffic(), 1)
        return
    with pytest.raises(CommandError, match=r"drafts 2\.0 tokens instead of 3") as refused:
        measure(engine.live(3), 1, Traffic(), 1)
    assert refused.value.exit_code == 1


def test_the_engine_that_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.instead(monkeypatch)
    sampling = ["--temperature", ".5", "--top-p", ".9", "--output-tokens", "3", "4", "--requests", "200"]
    option = ["--option", '{"draft_quantization": "fp8"}']
    run("-k", "3", "--concurrency", "100", "2", *option, *sampling, "--stop-at-eos")
    (setup,) = engine.setups
    ((name, job),) = setup.jobs(engine.ks[0]).items()
    assert (name, setup.worker) == ("eagle_mrv2", WORKER)
    assert job.speculative_config is not None
    assert job.method == "eagle_mrv2:eagle"
    assert job.speculative_config["num_speculative_tokens"] == 3
    assert "rejection_sample_method" not in job.speculative_config
    assert job.overrides["additional_config"]["eagle_mrv2"] == {"draft_quantization": "fp8", "draft_length": "auto"}
    assert job.arguments["max_num_seqs"] == 100
    assert not job.ignore_eos
    load = engine.asked[0]
    assert (load.temperature, load.top_p, len(load.requests)) == (0.5, 0.9, 2 + 1 + 200)
    assert [one.concurrency for one in engine.asked[:: len(engine.asked) // 2]] == [2, 100]


def test_random_weights_accept_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.instead(monkeypatch)
    run("--shape", "8b", "--prompt-tokens", "5", "6")
    (setup,) = engine.setups
    (job,) = setup.jobs(5).values()
    assert job.speculative_config is not None
    assert job.speculative_config["synthetic_acceptance_rates"] == [0.75, 0.55, 0.4, 0.3, 0.22]
    assert {len(prompt) for prompt in setup.subject.prompts} == {5, 6}
    # With room for all requests.
    assert "kv_cache_memory_bytes" not in job.arguments
    assert job.arguments["gpu_memory_utilization"] == 0.84


@pytest.mark.parametrize(
    ("started", "given", "levels", "rounds"),
    [
        (H200, [], [1, 4, 16, 64], 5),
        (H200, of_engine(max_num_seqs=16), [1, 4, 16], 5),
        (CPU, [], [1, 4], 1),
        (CPU, ["--rounds", "3", "--concurrency", "8", "2", "8"], [2, 8], 3),
    ],
)
def test_what_is_measured(
    started: Started, given: list[str], levels: list[int], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.started = started
    engine.instead(monkeypatch)
    rows = json.loads(run(*given, "--json", "-").stdout)["rows"]
    assert [one["concurrency"] for one in rows] == levels
    assert {len(each) for one in rows for each in one["rounds"].values()} == {rounds}
    assert list(rows[0]["rounds"]) == ["0", "1", "2", "3", "5", "auto"]


# The schedule


def test_the_best_number_is_one_of_those_held() -> None:
    rounds: dict[Setting, list[LoadRound]] = {
        0: [taken(100), taken(900), taken(110)],
        1: [taken(120), taken(130), taken(1160)],
        AUTO: [taken(200)] * 3,
    }
    found = TuneRow(concurrency=1, rounds=rounds)
    assert found.speeds == {0: 370, 1: 470, AUTO: 200}
    assert found.best == 1


@pytest.mark.parametrize(
    ("rows", "schedule"),
    [
        (FEWER_AS_MORE_COME, [(1, 2, 2), (3, 16, 1), (17, 64, 0)]),
        (FEWER_AS_MORE_COME[:1], [(1, 64, 2)]),
        ((row(1, 50, 100), row(2, 100, 50), row(3, 50, 100)), [(1, 1, 1), (2, 2, 0), (3, 64, 1)]),
        # K of fewer requests is kept where it makes nearly as much.
        ((row(1, 50, 1000), row(9, 1000, 995)), [(1, 64, 1)]),
        ((row(1, 50, 1000), row(9, 1000, 994)), [(1, 3, 1), (4, 64, 0)]),
        ((row(1, 50, 1000), row(9, 1000, 995), row(25, 1000, 50)), [(1, 15, 1), (16, 64, 0)]),
    ],
)
def test_the_schedule(rows: tuple[TuneRow, ...], schedule: list[tuple[int, int, int]]) -> None:
    assert schedule_of(rows, 64) == schedule


def test_vllm_looks_up_the_schedule() -> None:
    dynamic = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    found = json.loads(json.dumps(report(*FEWER_AS_MORE_COME).to_json()))["speculative_config"]
    lookup = dynamic.build_dynamic_sd_schedule_lookup(
        found["num_speculative_tokens_per_batch_size"],
        vllm_max_batch_size=128,
        vllm_num_speculative_tokens=found["num_speculative_tokens"],
    )
    assert [lookup[size] for size in (1, 2, 3, 4, 16, 17, 64, 128)] == [2, 2, 1, 1, 1, 0, 0, 0]


def test_the_numbers_that_an_engine_chooses_from() -> None:
    assert [lengths_up_to(most) for most in (1, 4, 9)] == [(0, 1), (0, 1, 2, 3, 4), (0, 1, 2, 3, 5, 7, 9)]


# What is shown


def test_the_table() -> None:
    lines = shown(report(row(1, 50, 80, 120, auto=114), row(16, 200, 150, 90, auto=190)))
    assert lines[0] == "vLLM 0.32.0 on H200: a pair"
    headings = next(line for line in lines if line.startswith("┃"))
    assert [cell.strip() for cell in headings.split("┃")[1:-1]] == [
        *("in flight", "K=0", "K=1", "K=2", "auto", "best", "auto/best", "auto/K=0")
    ]
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")] == [
        ["1", "50.0", "80.0", "120.0", "114.0", "K=2", "0.950", "2.280"],
        ["16", "200.0", "150.0", "90.0", "190.0", "K=0", "0.950", "0.950"],
    ]


def test_the_best_number_stands_out() -> None:
    (cells,) = (line for line in shown(report(row(1, 50, 120, 80)), force_terminal=True) if "50.0" in line)
    assert "\x1b[1;32m120.0" in cells
    assert cells.count("\x1b[1;32m") == 1


def test_a_schedule_to_paste() -> None:
    *_, measured, heading, line = shown(report(*FEWER_AS_MORE_COME), width=100)
    assert measured.startswith("Measured with up to ")
    assert heading == "A fixed schedule:"
    option, value = shlex.split(line)  # one line, however long
    assert option == "--speculative-config"
    assert json.loads(value) == SERVER | {
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 16, 1], [17, 64, 0]],
    }


@pytest.mark.parametrize("started", [H200, OLD], ids=["new", "old"])
def test_one_number_needs_no_schedule(started: Started) -> None:
    same = report(row(1, 50, 100, 60), row(4, 50, 100, 60), started=started)
    assert same.schedule == [(1, 64, 1)]
    *_, heading, line = shown(same)
    assert heading == "num_speculative_tokens: 1 will do throughout:"
    assert json.loads(shlex.split(line)[1]) == same.speculative_config == SERVER | {"num_speculative_tokens": 1}


def test_no_drafts_at_all() -> None:
    none = report(row(1, 100, 50), row(4, 100, 50))
    assert shown(none)[-1] == (
        "Measured with up to 4 requests in flight. K=0 makes the most tokens a second throughout: serve without "
        "speculation."
    )
    assert none.speculative_config is None


def test_a_release_without_such_a_setting() -> None:
    old = report(*FEWER_AS_MORE_COME, started=OLD)
    setting = "num_speculative_tokens_per_batch_size"
    advice = f"has no {setting}: set draft_length: auto and num_speculative_tokens: 2."
    assert shown(old)[-1] == f"Model Runner V2 of vLLM 0.24.0 {advice}"
    assert old.speculative_config is None
    assert old.to_json()["schedule"]
    assert report(*FEWER_AS_MORE_COME, started=OLD.model_copy(update={"vllm_version": "0.25.1"})).speculative_config


def test_times_of_a_cpu_mean_nothing() -> None:
    assert "mean nothing" in shown(report(row(1, 50, 100), started=CPU))[-1]
    assert not any("mean nothing" in line for line in shown(report(row(1, 50, 100))))


def test_requests_that_wait_allow_no_schedule() -> None:
    crowded = row(20, 50, 100)
    crowded.rounds[1][0].waiting = 3
    found = report(row(1, 50, 100), crowded)
    assert not found.passed
    assert "3 of 20 requests waited, mostly for room in the KV cache" in shown(found)[-1]


@pytest.mark.parametrize("short", [row(4, 100, 0), row(4, 0, 0, auto=0)])
def test_a_round_that_was_too_short_allows_no_schedule(short: TuneRow) -> None:
    found = report(row(1, 50, 100), short)
    assert not found.passed
    assert shown(found)[-1] == "a round was too short, raise --requests or --output-tokens"
    assert (found.to_json()["schedule"], found.speculative_config) == ([], None)


def test_the_json_has_every_round() -> None:
    found = json.loads(json.dumps(report(row(1, 50, 100, auto=90)).to_json()))
    assert found["versions"] == {"vllm": "0.32.0", "torch": "2"}
    (one,) = found["rows"]
    assert one["tokens_per_second"] == {"0": 50, "1": 100, "auto": 90}
    assert (one["concurrency"], one["best"], one["auto_of_best"], one["auto_of_none"]) == (1, 1, 0.9, 1.8)
    assert [made["num_tokens"] for made in one["rounds"]["auto"]] == [90]
    assert (found["passed"], found["schedule"]) == (True, [[1, 64, 1]])


@pytest.mark.parametrize("rows", [FEWER_AS_MORE_COME, FEWER_AS_MORE_COME[:1], [row(4, 0, 0)]])
def test_the_drawing(rows: list[TuneRow], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report(*rows, started=CPU).draw(tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


# The command


def fewer_with_more(in_flight: int, held: int | None) -> int:
    return 100 + (1 if in_flight < 8 else -1) * (held or 0)


def test_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeEngine(fewer_with_more).instead(monkeypatch)
    file = tmp_path / "tune.json"
    result = run("--concurrency", "4,16", "--engine", '{"max_num_seqs": 200}', "--json", file)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    config = {
        "method": "eagle_mrv2",
        "model": str(PAIR / "eagle"),
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": [[1, 8, 5], [9, 200, 0]],
    }
    assert found["speculative_config"] == config
    assert f"--speculative-config '{json.dumps(config)}'" in result.stdout
    assert (found["options"]["k"], found["options"]["concurrency"]) == (5, [4, 16])
    assert found["versions"].keys() == {"vllm", "eagle_mrv2", "python", "torch", "triton"}


@pytest.mark.parametrize(
    ("given", "config"),
    [
        (["--family", "eagle3"], {"method": "eagle_mrv2:eagle3", "model": str(PAIR / "eagle3")}),
        (["--shape", "1b"], {"method": "eagle_mrv2"}),  # whose models are gone
        (
            ["--engine", '{"speculative_config": {"draft_tensor_parallel_size": 1}}'],
            {"draft_tensor_parallel_size": 1, "method": "eagle_mrv2", "model": str(PAIR / "eagle")},
        ),
    ],
)
def test_the_models_to_paste(given: list[str], config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEngine(fewer_with_more).instead(monkeypatch)
    found = json.loads(run("--concurrency", "4", "--json", "-", *given).stdout)
    assert found["speculative_config"] == config | {"num_speculative_tokens": 5}


def failing(error: BaseException) -> FakeEngine:
    def speed(in_flight: int, held: int | None) -> int:
        if in_flight > 1:
            raise error
        return 100

    return FakeEngine(speed)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (CommandError("the engine failed: no memory", 1), "the engine failed: no memory"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_what_was_measured_before_the_end_is_kept(
    error: BaseException, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(error).instead(monkeypatch)
    result = run("--concurrency", "1", "4", "--json", "-")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [one["concurrency"] for one in found["rows"]] == [1]
    assert (found["passed"], found["error"], found["schedule"]) == (False, sentence, [])
    assert result.stderr.endswith(f"error: {sentence}\n")


def test_an_engine_that_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(CommandError("the engine failed: no memory", 1)).instead(monkeypatch)
    result = run("--concurrency", "4", "--json", "-")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"error": "the engine failed: no memory"}
