"""The bench under load without an engine: its options, its requests, its figures, its verdict, and what it prints."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Gauge
from scripts import script
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.bench_load import measurement
from vllm_eagle_mrv2.cli.bench_load.measurement import measure
from vllm_eagle_mrv2.cli.bench_load.report import LoadReport
from vllm_eagle_mrv2.cli.bench_load.types import Gain, LoadRow
from vllm_eagle_mrv2.cli.common import draft_counters, engines
from vllm_eagle_mrv2.cli.common.arguments import ACCEPTANCE
from vllm_eagle_mrv2.cli.common.engines import Comparison, Engines
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.load import worker
from vllm_eagle_mrv2.cli.common.load.balance import (
    Seen,
    Served,
    balanced,
    iterations,
    prompts_per_token,
    seconds_per_prompt_token,
    usual_seconds,
)
from vllm_eagle_mrv2.cli.common.load.traffic import WORKER, Traffic, random_prompts
from vllm_eagle_mrv2.cli.common.load.types import Level, Load, LoadRound, Request
from vllm_eagle_mrv2.cli.common.load.worker import (
    Counted,
    LoadEngine,
    read_round,
    read_seconds_by_length,
    requests_waiting,
)
from vllm_eagle_mrv2.cli.common.shapes import VOCABULARY, Shape, kv_cache_bytes
from vllm_eagle_mrv2.cli.common.types import Job, Started
from vllm_eagle_mrv2.telemetry.counters import BY_LENGTH, FOLDER_VARIABLE, DraftCounter

from .commands import CPU, H200, comparison, live, shown

EIGHT = Level(concurrency=8)
NAMES = ("stock", "stock again", "eagle_mrv2")
TOO_SHORT = "none: a round was too short, raise --requests or --output-tokens"


def taken(num_tokens: int = 200, **changed: float) -> LoadRound:
    """Two steady seconds."""
    figures: dict[str, Any] = {
        "seconds": 2.0,
        "ttft_p50_ms": 20.0,
        "ttft_p99_ms": 30.0,
        "tpot_p50_ms": 8.0,
        "gap_p99_ms": 40.0,
        "accepted_length": 2.5,
    }
    return LoadRound(num_tokens=num_tokens, **figures | changed)


def empty() -> LoadRound:
    return taken(0, seconds=0.0, tpot_p50_ms=0.0, gap_p99_ms=0.0)


def row(*rounds: list[LoadRound], level: Level = EIGHT, k: int = 3) -> LoadRow:
    """Of stock, of the control if there are three, and of ours."""
    return LoadRow(k=k, level=level, names=NAMES if len(rounds) == 3 else NAMES[::2], rounds=list(rounds))


def fast(*tokens: int) -> list[LoadRound]:
    return [taken(one) for one in tokens]


def report(*rows: LoadRow, started: Started = H200) -> LoadReport:
    return LoadReport(title="a pair", versions={"torch": "2"}, started=started, rows=list(rows))


# Options


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--acceptance", ".7", ".4"], "-k 3 needs --acceptance with as many shares, not 2."),
        (["-k", "2", "4", "--acceptance", ".7", ".4", ".2"], "-k 4 needs --acceptance with as many shares, not 3."),
        (["--shape", "1b", "-k", "8"], "-k 8 needs --acceptance with as many shares, not 7."),
        (["--acceptance", ".7", ".4", ".5"], "no share may be larger than the one before it"),
        (["--acceptance", "1.5"], "Invalid value for '--acceptance'"),
        (["--output-tokens", "20", "10"], "--output-tokens 20 10: give the smaller number first"),
        (["--prompt-tokens", "20", "10"], "--prompt-tokens 20 10: give the smaller number first"),
        (["--output-tokens", "0", "10"], "at least 1"),
        (["--output-tokens", "20"], "requires 2 arguments"),
        (["--concurrency", "0"], "Invalid value for '--concurrency'"),
        (["--rate", "0"], "Invalid value for '--rate'"),
        (["--rounds", "1"], "Invalid value for '--rounds'"),
        (["--shape", "1b", "--model", "x"], "--shape has random weights"),
        (["--draft", "x"], "--draft and --family mtp need --model"),
        (["--engine", "{"], "--engine is not JSON"),
        (["--engine", '{"max_num_seqs": 4}'], "--concurrency 8 is more than max_num_seqs of --engine, 4."),
        (["--option", '{"draft_logits_dtype": "int8"}'], "draft_logits_dtype"),
        (["--json", "no/such/folder.json"], "no such folder"),
        (["--batch", "1"], "No such option"),
        (["3"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_starts_no_engine(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["bench-load", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())


class Fakes:
    """What the command asked of engines that never started."""

    def __init__(self) -> None:
        self.comparisons: list[Comparison] = []
        self.asked: list[tuple[str, Load]] = []


def fake_engines(
    monkeypatch: pytest.MonkeyPatch,
    again: LoadRound,
    ours: LoadRound,
    fails_at: int | None = None,
    started: Started = H200,
) -> Fakes:
    fakes = Fakes()

    @contextmanager
    def start(self: Comparison, k: int) -> Iterator[Engines]:
        if k == fails_at:
            raise CommandError("the engine with stock failed: no memory", 1)
        fakes.comparisons.append(self)
        answers = [taken(), again, ours] if self.control else [taken(), ours]
        yield live(k, list(self.methods), answers, fakes.asked, started)

    monkeypatch.setattr(Comparison, "engines", start)
    return fakes


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench-load", *map(str, arguments)])


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        ([], ["8 in flight"]),
        (["--concurrency", "1", "64"], ["1 in flight", "64 in flight"]),
        (["--rate", "2", "0.5"], ["2/s", "0.5/s"]),
        (["--rate", "2", "--concurrency", "4"], ["4 in flight", "2/s"]),
    ],
)
def test_levels_of_load(given: list[str], levels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engines(monkeypatch, taken(), taken())
    rows = json.loads(run(*given, "--json", "-").stdout)["rows"]
    assert [str(Level(one.get("concurrency"), one.get("rate"))) for one in rows] == levels


def test_what_the_options_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = fake_engines(monkeypatch, taken(), taken())
    sampling = ["--temperature", ".5", "--top-p", ".9", "--output-tokens", "3", "4", "--requests", "200"]
    run("--concurrency", "8", "100", "--acceptance", ".5", ".5", ".2", "--stop-at-eos", *sampling)
    (given,) = fakes.comparisons
    assert (given.control, given.ignore_eos, given.worker) == (True, False, WORKER)
    assert (given.max_num_seqs, list(given.acceptance)) == (100, [0.5, 0.5, 0.2])
    load = fakes.asked[0][1]
    assert (load.concurrency, load.temperature, load.top_p, len(load.requests)) == (8, 0.5, 0.9, 8 + 1 + 200)
    assert {one.max_tokens for one in load.requests[8 + 1 :]} == {3, 4}


def test_random_weights_accept_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = fake_engines(monkeypatch, taken(), taken())
    run("--shape", "1b", "--prompt-tokens", "5", "6", "--no-control")
    run()
    random, trained = fakes.comparisons
    assert (random.acceptance, trained.acceptance) == (ACCEPTANCE, ())
    assert (random.control, trained.control) == (False, True)
    assert {len(prompt) for prompt in random.subject.prompts} == {5, 6}
    assert (random.max_num_seqs, random.ignore_eos) == (64, True)


@pytest.mark.parametrize(("load", "requests"), [(["--concurrency", "8", "200"], 200), (["--rate", "2"], 64)])
def test_random_weights_have_room_for_all_requests(
    load: list[str], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 600 tokens and 100 on average."""
    fakes = fake_engines(monkeypatch, taken(), taken())
    run("--shape", "8b", "--prompt-tokens", "400", "800", "--output-tokens", "50", "150", *load)
    (given,) = fakes.comparisons
    assert given.subject.arguments["kv_cache_memory_bytes"] == kv_cache_bytes(Shape.b8, requests * 700)


@pytest.mark.parametrize(("started", "given", "rounds"), [(H200, [], 9), (CPU, [], 2), (CPU, ["--rounds", "3"], 3)])
def test_how_many_rounds(started: Started, given: list[str], rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engines(monkeypatch, taken(), taken(), started=started)
    (only,) = json.loads(run(*given, "--json", "-").stdout)["rows"]
    assert {name: len(each) for name, each in only["rounds"].items()} == dict.fromkeys(NAMES, rounds)


# Requests


def test_a_load_is_the_same_for_a_seed() -> None:
    traffic, level = Traffic(output_tokens=(5, 9)), Level(concurrency=4)
    assert traffic.load(level, 1) == traffic.load(level, 1)
    one, other = traffic.load(level, 1).requests, traffic.load(level, 2).requests
    assert one != other
    assert not {request.seed for request in one} & {request.seed for request in other}
    assert {request.max_tokens for request in one[5:] + other[5:]} == {5, 6, 7, 8, 9}
    assert [b.prompt - a.prompt for a, b in pairwise(one)] == [1] * (len(one) - 1)
    assert one[0].prompt != other[0].prompt


def test_the_prompts_of_a_load_take_turns() -> None:
    """All of the subject's, however many it has, or some of them."""
    begins = [Traffic().load(Level(concurrency=8), seed).requests[0].prompt % 5000 for seed in range(40)]
    assert min(begins) < 1000
    assert max(begins) > 4000
    places = [request.prompt for request in Traffic(requests=600).load(Level(concurrency=1), 0).requests]
    assert [b - a for a, b in pairwise(places)] == [1] * (len(places) - 1)
    requests = Traffic(prompts=range(1, 9, 4)).load(Level(concurrency=3), 0).requests
    assert {tuple(request.prompt for request in requests[at : at + 2]) for at in (0, 2, 4)} in ({(1, 5)}, {(5, 1)})


def test_requests_that_fill_an_engine_end_one_after_the_other() -> None:
    traffic, level = Traffic(output_tokens=(160, 160)), Level(concurrency=7)
    lengths = [request.max_tokens for request in traffic.load(level, 1).requests]
    assert lengths == [20, 40, 60, 80, 100, 120, 140, 160] + [160] * 28
    assert {request.max_tokens for request in traffic.load(level, 1, fills=False).requests} == {160}
    assert Traffic(output_tokens=(1, 1)).load(level, 1).requests[0].max_tokens == 1


def test_requests_arrive_as_a_poisson_process() -> None:
    load = Traffic(requests=4000).load(Level(rate=5.0), 1)
    assert load.concurrency is None
    arrivals = [request.arrives for request in load.requests]
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert arrivals[0] == 0
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.1)


@pytest.mark.parametrize(
    ("given", "level", "requests"),
    [
        (None, Level(concurrency=1), 6),
        (None, Level(concurrency=8), 32),
        (None, Level(concurrency=64), 112),
        (None, Level(rate=0.1), 12),
        (None, Level(rate=4.0), 120),
        (50, Level(concurrency=8), 50),
        (1, Level(concurrency=8), 1),
        (50, Level(rate=4.0), 50),
        (1, Level(rate=4.0), 3),
    ],
)
def test_requests_of_a_round(given: int | None, level: Level, requests: int) -> None:
    traffic = Traffic(requests=given)
    assert traffic.requests_of(level) == requests
    filling, going_on = (traffic.load(level, 1, fills=fills) for fills in (True, False))
    assert (filling.fills, going_on.fills) == (True, False)
    assert len(going_on.requests) == requests
    assert len(filling.requests) - requests == (0 if level.concurrency is None else level.concurrency + 1)


def test_random_prompts() -> None:
    prompts = random_prompts((3, 7))
    assert prompts == random_prompts((3, 7))
    assert {len(prompt) for prompt in prompts} == {3, 4, 5, 6, 7}
    assert all(0 < token < VOCABULARY for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


# Engines


def test_the_control_is_a_second_engine_with_stock() -> None:
    compared = comparison(control=True, acceptance=(0.7, 0.5, 0.4), options={"draft_quantization": "fp8"})
    assert tuple(compared.methods) == NAMES
    stock, again, ours = compared.jobs(2).values()
    assert again == stock
    assert [job.method for job in (stock, ours)] == ["eagle3", "eagle_mrv2:eagle3"]
    assert ours.overrides["additional_config"] == {"eagle_mrv2": {"draft_quantization": "fp8"}}
    assert "additional_config" not in stock.overrides
    for job in (stock, ours):
        assert job.speculative_config is not None
        assert job.speculative_config["rejection_sample_method"] == "synthetic"
        assert job.speculative_config["synthetic_acceptance_rates"] == [0.7, 0.5]
        assert job.arguments["gpu_memory_utilization"] == pytest.approx(0.28)
    for job in comparison(control=True, gpu_memory_utilization=0.2).jobs(2).values():
        assert job.arguments["gpu_memory_utilization"] == 0.2
    assert "rejection_sample_method" not in str(comparison().jobs(2)["stock"])


def test_the_baseline_is_an_engine_without_speculation() -> None:
    both = comparison(control=True, baseline=True, acceptance=(0.7,))
    jobs = both.jobs(1)
    assert list(jobs) == [*NAMES[:2], "no speculation", NAMES[2]]
    assert [job.method for job in jobs.values()] == ["eagle3", "eagle3", None, "eagle_mrv2:eagle3"]
    assert jobs["no speculation"].speculative_config is None
    assert jobs["no speculation"].arguments == jobs["stock"].arguments
    without_control = tuple(comparison(baseline=True).methods)
    assert without_control == (NAMES[0], "no speculation", NAMES[2])
    three = LoadRow(k=1, level=EIGHT, names=without_control, rounds=[fast(100), fast(50), fast(110)])
    assert three.noise is None
    assert three.verdict == "no control"


def test_the_process_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "EngineProcess", lambda module, name, *_: (module, name))
    process: Any = comparison(worker=WORKER)._process("stock", "eagle3")
    assert process == (WORKER, "stock")


def test_three_engines_take_turns() -> None:
    asked: list[tuple[str, Load]] = []
    names = ("a", "b", "c")
    answers = fast(100, 200, 300)
    done: list[int] = []
    measured = measure(live(2, names, answers, asked, H200), Level(concurrency=2), Traffic(), 3, done.append)
    assert "".join(name for name, _ in asked) == "cba" + "cba" + "abc" + "cba"
    loads = [load for _, load in asked]
    assert all(load == loads[3 * (place // 3)] for place, load in enumerate(loads))
    assert len({load.model_dump_json() for load in loads}) == 4
    assert [load.fills for load in loads[::3]] == [True, False, False, False]
    assert measured == LoadRow(k=2, level=Level(concurrency=2), names=names, rounds=[[one] * 3 for one in answers])
    assert done == [1, 2, 3]


def test_engines_have_time_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many seconds each, of requests that do not count."""
    asked: list[tuple[str, Load]] = []
    clock = itertools.count()
    monkeypatch.setattr(measurement, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(measurement, "SETTLES_S", 1.5)
    choosing = replace(live(2, ("a", "b"), fast(100, 200), asked, H200), chooses_length=True)
    measured = measure(choosing, EIGHT, Traffic(), 1)
    filling, *settling = [load for _, load in asked[:-2]]
    assert filling.fills
    assert len(settling) == 1 + 2 * 2
    assert not any(load.fills for load in settling[1:])
    assert all(load.requests != settling[-1].requests for _, load in asked[-2:])
    assert [len(rounds) for rounds in measured.rounds] == [1, 1]


class FakeEngine:
    """Gives each request an output of one token every ``step`` seconds, unless it is paused."""

    def __init__(self, step: float = 0.001) -> None:
        self.step, self.running, self.dead = step, asyncio.Event(), False
        self.asked: list[tuple[Any, Any, str]] = []
        self.in_flight: list[int] = []
        self.aborted = self.live = self.pauses = 0

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, request_id))
        self.live += 1
        self.in_flight.append(self.live)
        try:
            for tokens in [[], *([number] for number in range(params.max_tokens))]:
                await self.running.wait()
                if self.dead:
                    raise RuntimeError("the engine died")
                await asyncio.sleep(self.step)
                ids = [1, 2] if isinstance(prompt, str) else prompt["prompt_token_ids"]
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], prompt_token_ids=ids)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.live -= 1

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.running.clear()
        self.pauses += 1
        await asyncio.sleep(0.02)

    async def resume_generation(self) -> None:
        self.running.set()

    def shutdown(self) -> None:
        assert not self.live
        self.dead = True


Live = tuple[LoadEngine, FakeEngine]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """An engine under load whose vLLM is a fake."""
    pytest.importorskip("vllm")
    fake = FakeEngine()

    async def start(job: Job) -> FakeEngine:
        return fake

    monkeypatch.setattr(LoadEngine, "_start", staticmethod(start))
    job = Job(model="x", speculative_config=None, arguments={}, overrides={}, prompts=[[5], [7, 8]], ignore_eos=True)
    engine = LoadEngine(job)
    yield engine, fake
    engine.end()


def load_of(*max_tokens: int, concurrency: int | None = 2, fills: bool = False, every: float = 0.0) -> Load:
    requests = [
        Request(prompt=place, max_tokens=tokens, seed=11 + place, arrives=place * every)
        for place, tokens in enumerate(max_tokens)
    ]
    return Load(requests=requests, concurrency=concurrency, temperature=0.5, top_p=0.9, fills=fills)


def test_an_engine_ends_with_its_requests(served: Live) -> None:
    engine, fake = served
    engine.measure(load_of(90, 90, 90, fills=True))
    clients = engine._clients
    assert fake.live
    for _ in range(2):
        engine.end()
        assert fake.dead
        assert all(client.cancelled() for client in clients)


def test_what_a_request_asks_for(served: Live) -> None:
    engine, fake = served
    load = load_of(5, 6, 1, concurrency=None)
    engine.measure(load)
    assert [prompt["prompt_token_ids"] for prompt, _, _ in fake.asked] == [[5], [7, 8], [5]]
    assert len({request_id for _, _, request_id in fake.asked}) == 3
    for (_, params, _), request in zip(fake.asked, load.requests, strict=True):
        assert (params.seed, params.max_tokens) == (request.seed, request.max_tokens)
        assert (params.temperature, params.top_p, params.ignore_eos) == (0.5, 0.9, True)
    engine._prompts = ["text"]
    engine.measure(load)
    assert fake.asked[-1][0] == "text"


def test_each_request_that_ends_is_replaced(served: Live) -> None:
    """Between rounds those in flight stay; only a round that fills the engine begins with none."""
    engine, fake = served
    first = engine.measure(load_of(10, 30, 30, 5, 5, fills=True))
    assert fake.in_flight == [1, 2, 2, 2, 2]
    assert 0 < first.prompt_tokens < 8
    assert 10 < first.num_tokens < 60  # not the ten of the first request, nor what is still to come
    assert (fake.live, fake.pauses) == (2, 1)
    second = engine.measure(load_of(7, 7))
    assert fake.in_flight[5:] == [2, 2]
    assert second.num_tokens > 0
    assert second.tpot_p50_ms > 0
    assert (fake.live, fake.aborted) == (2, 0)
    engine.measure(load_of(5, 10, 15, 20, 25, concurrency=3, fills=True))
    assert fake.aborted == 2
    assert fake.in_flight[7:] == [1, 2, 3, 3, 3]
    engine.measure(load_of(5, 5, 5, concurrency=None))
    assert (fake.aborted, fake.live) == (5, 0)


def test_a_round_counts_from_its_own_drafts(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the number of draft tokens changes, those in flight first have drafts of the old number verified."""
    engine, _ = served
    begins: list[list[int]] = []

    def beginning() -> Any:
        begins.append([len(one.outputs) for one in engine._served])
        return draft_counters.read_counters()

    monkeypatch.setattr("vllm_eagle_mrv2.cli.common.load.worker.read_counters", beginning)
    engine.measure(load_of(90, 90, 30, fills=True))
    for length, settles in ((3, True), (3, False), (0, True), (None, True)):
        before = [len(one.outputs) for one in engine._served]
        engine.measure(load_of(90, 20, 20).model_copy(update={"draft_length": length}))
        waited = [now - then for now, then in zip(begins[-1], before, strict=False)]
        assert (min(waited) >= 4) is settles


def test_a_load_that_changes(served: Live) -> None:
    """As many requests are in flight as each phase of benchmarks/changing_load.py says, once the others have ended."""
    engine: Any
    engine, fake = served
    changing = script("changing_load")
    engine.__class__ = changing.ChangingEngine
    phases = [{"concurrency": many, "seconds": 1.0} for many in (2, 5, 1)]
    task = changing.Task.model_validate({"phases": phases, "output_tokens": (5, 10)})
    courses = engine.measure(task)
    assert [len(one.tokens_per_second) for one in courses.phases] == [2, 2, 2]
    assert fake.in_flight[:2] == [1, 2]
    assert max(fake.in_flight) == 5
    assert fake.in_flight[-1] == 1
    assert fake.live == 0
    assert all(sum(one.tokens_per_second) > 0 for one in courses.phases)
    assert [one.settled.seconds for one in courses.phases] == [0, 0, 0], "none is long enough"


def test_what_comes_once_a_phase_has_settled(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any
    engine, _ = served
    changing = script("changing_load")
    monkeypatch.setattr(changing, "SETTLES_S", 0.5)
    engine.__class__ = changing.ChangingEngine
    task = changing.Task.model_validate({"phases": [{"concurrency": 2, "seconds": 1.5}], "output_tokens": (5, 10)})
    (course,) = engine.measure(task).phases
    assert course.settled.seconds == pytest.approx(1.0)
    assert course.settled.num_tokens == pytest.approx(0.5 * sum(course.tokens_per_second[1:]), rel=0.1)
    assert course.settled.prompt_tokens > 0


def test_phases_are_compared_with_the_prompts_that_they_call_for() -> None:
    """Of two that are as fast, one prefills twice as much."""
    lengths, changing = script("draft_lengths"), script("changing_load")

    def courses(tokens: int, prompts: int) -> Any:
        made = taken(tokens, prompt_tokens=prompts, seconds_per_prompt_token=0.005)
        return changing.Courses(phases=[changing.Course(tokens_per_second=[], draft_length=[], settled=made)])

    found = lengths.settled({0: courses(200, 100), "auto": courses(100, 200)})
    assert found == {"0": [round(200 / 2.5, 1)], "auto": [round(100 / 1.5, 1)]}


def test_a_pause_counts_for_nothing(served: Live) -> None:
    engine, _ = served
    engine.measure(load_of(40, 40, 40, 40, fills=True))
    time.sleep(0.5)
    found = engine.measure(load_of(3, 3))
    assert found.seconds < 0.4
    assert found.gap_p99_ms < 300
    assert found.tpot_p50_ms < 300
    assert found.ttft_p99_ms < 300


def test_an_engine_that_dies_ends_the_round(served: Live) -> None:
    engine, fake = served
    engine.measure(load_of(40, 40, 40, 40, fills=True))
    fake.dead = True
    with pytest.raises(RuntimeError, match="the engine died"):
        engine.measure(load_of(3, 3))


def test_requests_at_a_rate_do_not_wait_for_others(served: Live) -> None:
    engine, fake = served
    found = engine.measure(load_of(400, 400, 400, 400, 400, concurrency=None, every=0.05))
    assert fake.in_flight == [1, 2, 3, 4, 5]
    assert found.seconds == pytest.approx(0.15, abs=0.05)  # from the second to the last that is sent


# Figures


def test_what_came_outside_of_the_round_counts_for_nothing() -> None:
    requests = [
        Served(0.0, [(1.0, 1), (10.0, 1)], ended=True),
        Served(0.0, [(9.0, 1), (11.0, 2), (13.0, 1)], ended=True),
        Served(10.0, [(10.5, 1), (12.0, 3), (14.0, 2)], ended=True),
        Served(13.0, [(13.25, 1), (14.0, 1)]),  # goes on
        Served(14.0, [(15.0, 1), (27.0, 3)], ended=True),
        Served(14.0),
    ]
    found = read_round(requests, 10.0, 14.0, accepted_length=2.0, drafted_length=3.0)
    assert (found.seconds, found.num_tokens, found.tokens_per_second) == (4.0, 3 + 6 + 2, 2.75)
    assert (found.ttft_p50_ms, found.ttft_p99_ms) == (250, 500)
    assert found.tpot_p50_ms == pytest.approx(700)  # 5 tokens in 3.5 s; the other that ended took longer
    assert found.gap_p99_ms == 2000
    assert (found.accepted_length, found.drafted_length) == (2, 3)


def test_a_round_knows_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "seconds_per_prompt_token", len)
    requests = [
        Served(0.0, [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)], prompt_tokens=5),
        Served(1.5, [(2.0, 1), (3.0, 1)], prompt_tokens=7),
        Served(2.5, [(4.0, 1)], prompt_tokens=9),
    ]
    found = read_round(requests, 1.5, 4.0, accepted_length=1.0, drafted_length=0.0)
    assert (found.prompt_tokens, found.seconds_per_prompt_token) == (7 + 9, 3)


def test_a_steady_time_in_which_nothing_ends() -> None:
    found = read_round([Served(0.0, [(9.0, 1), (10.0, 1)])], 9.5, 11.0, accepted_length=1.0, drafted_length=0.0)
    assert (found.num_tokens, found.tpot_p50_ms, found.ttft_p50_ms) == (1, 0, 0)
    assert read_round([], 3.0, 3.0, accepted_length=1.0, drafted_length=0.0).tokens_per_second == 0


# Balance


def test_iterations_are_told_by_their_outputs() -> None:
    """A request has one output of each; what was sent after an iteration is none of its requests."""
    first = Served(0.0, [(1.0, 1), (2.0, 3), (3.0, 2)], prompt_tokens=50)
    second = Served(0.0, [(2.001, 1), (3.001, 2)], prompt_tokens=70)
    third = Served(0.0, [(0.5, 1), (1.001, 1)], ended=True, prompt_tokens=90)  # the first output was before
    fourth = Served(3.002, [(4.0, 1)], prompt_tokens=20)
    assert iterations([first, second, third, fourth], 0.9, 4.0) == [(1.0, 50), (2.0, 70), (3.0, 0), (4.0, 20)]
    assert iterations([first], 3.0, 9.0) == []
    one_after_the_other = [Served(at, [(at + 0.5, 1), (at + 0.9, 1)], prompt_tokens=8) for at in (0.0, 0.95)]
    assert iterations(one_after_the_other, 0.0, 9.0) == [(0.5, 8), (0.9, 0), (1.45, 8), (1.85, 0)]


def test_what_a_prompt_token_takes() -> None:
    """Half of it is found in the iteration before."""
    draw = random.Random(0)
    prompts = [draw.choice((0, 0, 100, 500)) for _ in range(200)]
    at, seen = 0.0, []
    for own, after in pairwise(prompts):
        at += 0.01 + 10e-6 * (own + after) + draw.gauss(0.0, 0.001)
        seen.append(Seen(at, own))
    assert seconds_per_prompt_token(seen) == pytest.approx(20e-6, rel=0.05)
    steady = [Seen(0.1 * number, 300) for number in range(200)]
    assert seconds_per_prompt_token(steady) == pytest.approx(0.0, abs=1e-9), "nothing tells"
    assert seconds_per_prompt_token(seen[:19]) == 0
    shorter = [Seen(one.at - 30e-6 * sum(prompts[: place + 1]), one.prompt_tokens) for place, one in enumerate(seen)]
    assert seconds_per_prompt_token(shorter) == 0


def test_a_round_has_the_prompts_that_its_outputs_call_for() -> None:
    """Three rounds at one pace: 1000 tokens take a second, and a prompt token a millisecond."""
    rounds = [
        taken(tokens, seconds=0.001 * (tokens + prompts), prompt_tokens=prompts, seconds_per_prompt_token=seconds)
        for tokens, prompts, seconds in ((1000, 2000, 0.001), (1000, 3000, 0.001), (2000, 3000, 0.9))
    ]
    assert usual_seconds(rounds) == 0.001
    assert prompts_per_token(rounds) == 2
    assert [one.owed_s for one in balanced(rounds, 2, 0.001)] == pytest.approx([0, -1, 1])
    assert [one.tokens_per_second for one in balanced(rounds, 2, 0.001)] == pytest.approx([1000 / 3] * 3)
    assert [one.owed_s for one in balanced(rounds, 2, 9.0)] == pytest.approx([0, -2, 2.5])  # at most a half
    assert balanced([empty()], prompts_per_token([empty()]), 0.001) == [empty()]


@pytest.mark.parametrize(
    ("level", "speeds"), [(EIGHT, [200 / 2.25, 200 / 1.75]), (Level(rate=2.0), [100, 100])], ids=str
)
def test_only_a_closed_loop_is_balanced(level: Level, speeds: list[float]) -> None:
    answers = [taken(prompt_tokens=prompts, seconds_per_prompt_token=0.005) for prompts in (100, 200)]
    measured = measure(live(2, ("a", "b"), answers, [], H200), level, Traffic(), 3)
    assert [measured.figures(engine)["tokens_per_second"] for engine in (0, 1)] == pytest.approx(speeds)


def test_how_long_each_number_was_drafted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the round began, over all ranks."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert read_seconds_by_length() == []
    ranks = [DraftCounter.of_rank(rank).cells for rank in (0, 1)]
    ranks[0][BY_LENGTH.start + 3] = 9_000_000
    before = Counted.now()
    for cells in ranks:
        cells[BY_LENGTH.start + 3] += 1_500_000
    assert before.since()["seconds_by_length"] == [0, 0, 0, 3, 0, 0, 0]


def test_the_gain_is_that_of_all_rounds() -> None:
    """A round that lasts longer counts for more."""
    measured = row(
        [taken(100, seconds=1.0), taken(600, seconds=3.0)], [taken(100, seconds=0.5), taken(600, seconds=2.0)]
    )
    assert measured.gain(-1) == pytest.approx(Gain(1.6, 1.5, 2.0))
    assert str(measured.gain(-1)) == "1.600 (1.500-2.000)"
    assert measured.figures(-1)["tokens_per_second"] == 700 / 2.5
    slow, quick = ([taken(tpot_p50_ms=each) for each in times] for times in ((8.0, 12.0), (4.0, 6.0)))
    assert row(slow, quick, level=Level(rate=2.0)).gain(-1) == (2, 2, 2)
    assert row(fast(100, 200), fast(110, 180)).figures(-1)["tpot_p50_ms"] == 8


@pytest.mark.parametrize(
    ("rounds", "noise", "verdict"),
    [
        ((fast(100, 100), fast(110, 110)), None, "no control"),
        ((fast(100, 100), fast(101, 101), fast(110, 110)), 0.01, "10.0% better"),
        ((fast(100, 100), fast(99, 99), fast(90, 90)), 0.01, "10.0% worse"),
        ((fast(1000, 1000), fast(985, 985), fast(1010, 1010)), 0.015, "no difference"),
        ((fast(1000, 1000), fast(1015, 1015), fast(990, 990)), 0.015, "no difference"),
        ((fast(1000, 1000), fast(1001, 1001), fast(1019, 1019)), 0.001, "no difference"),  # the control was lucky
        ((fast(100, 100), fast(101, 101), fast(100, 130)), 0.01, "no difference"),  # the rounds disagree
        ((fast(100, 100), fast(100, 106), fast(150, 150)), 0.03, "none: two engines with stock differ by 3.0%"),
        ((fast(100, 100), fast(97, 97), fast(150, 150)), 0.03, "none: two engines with stock differ by 3.0%"),
    ],
)
def test_the_verdict(rounds: tuple[list[LoadRound], ...], noise: float | None, verdict: str) -> None:
    measured = row(*rounds)
    assert measured.noise == (noise if noise is None else pytest.approx(noise))
    assert measured.verdict == verdict
    assert measured.decided is not verdict.startswith("none")
    assert report(measured).passed is measured.decided


def test_at_a_rate_the_time_per_token_decides() -> None:
    stock, again, ours = (
        [taken(tokens, tpot_p50_ms=tpot)] * 2 for tokens, tpot in ((100, 10.0), (100, 10.1), (50, 8.0))
    )
    measured = row(stock, again, ours, level=Level(rate=4.0))
    assert measured.decisive == "tpot_p50_ms"
    assert measured.gain(-1).overall == pytest.approx(1.25)
    assert measured.verdict == "25.0% better"
    assert row(stock, again, ours).verdict == "50.0% worse"


@pytest.mark.parametrize(("waiting", "level", "waited"), [(1, EIGHT, 0), (2, EIGHT, 2), (9, Level(rate=4.0), 0)])
def test_requests_that_wait_allow_no_verdict(waiting: int, level: Level, waited: int) -> None:
    """They are not in flight, and the times to their first token are of the queue."""
    rounds = [fast(100, 100), fast(100, 100), fast(110, 110)]
    rounds[1][1] = rounds[1][1].model_copy(update={"waiting": waiting})
    measured = row(*rounds, level=level)
    assert measured.decided is not bool(waited)
    assert measured.verdict.startswith(f"none: {waited} of 8 requests waited") is bool(waited)


def test_waiting_requests_are_those_of_the_metrics() -> None:
    name = "vllm:num_requests_waiting"
    if name in REGISTRY._names_to_collectors:
        pytest.skip("an engine of this process has it")
    gauge = Gauge(name, "As vLLM's.", ["engine"])
    try:
        for engine, waiting in (("0", 2), ("1", 3)):
            gauge.labels(engine).set(waiting)
        assert requests_waiting() == 5
    finally:
        REGISTRY.unregister(gauge)


@pytest.mark.parametrize("level", [EIGHT, Level(rate=4.0)])
def test_a_round_that_was_too_short_allows_no_verdict(level: Level) -> None:
    for place in range(3):
        rounds = [fast(100, 100), fast(100, 100), fast(110, 110)]
        rounds[place][1] = empty()
        measured = row(*rounds, level=level)
        assert measured.verdict == TOO_SHORT
        assert not measured.decided
    assert measured.gain(-1).overall == pytest.approx(1.0 if level.rate else 1.1)  # of the other rounds
    assert row([empty()], [empty()], level=level).gain(-1) == (0, 0, 0)


# What is shown


def test_the_table() -> None:
    open_loop = row(fast(100, 100), [taken(tpot_p50_ms=4.0)] * 2, level=Level(rate=2.5), k=7)
    lines = shown(report(row(fast(200, 200), fast(202, 202), fast(230, 250)), open_loop))
    assert lines[0] == "vLLM 0.32.0 on H200: a pair"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    times = ["8.00", "20.0", "30.0", "40.0", "2.50"]
    assert cells == [
        ["3", "8 in flight", "stock", "100.0", *times, "", ""],
        ["3", "8 in flight", "stock again", "101.0", *times, "1.010 (1.010-1.010)", ""],
        ["3", "8 in flight", "eagle_mrv2", "120.0", *times, "1.200 (1.150-1.250)", "20.0% better"],
        ["7", "2.5/s", "stock", "50.0", *times, "", ""],
        ["7", "2.5/s", "eagle_mrv2", "100.0", "4.00", *times[1:], "2.000 (2.000-2.000)", "no control"],
    ]
    assert lines[-1].startswith("gain over stock")


def test_times_of_a_cpu_mean_nothing() -> None:
    one = row(fast(100, 100), fast(100, 100))
    assert "mean nothing" in shown(report(one, started=CPU))[-1]
    assert not any("mean nothing" in line for line in shown(report(one)))


def test_the_json_has_every_round() -> None:
    found = report(row(fast(200, 200), fast(202, 202), fast(230, 250))).to_json()
    assert (found["title"], found["device_name"], found["passed"], found["error"]) == ("a pair", "H200", True, None)
    assert found["versions"] == {"vllm": "0.32.0", "torch": "2"}
    (one,) = found["rows"]
    assert (one["k"], one["concurrency"], one["decided_by"]) == (3, 8, "tokens_per_second")
    assert "rate" not in one
    assert (one["noise"], one["verdict"]) == (pytest.approx(0.01), "20.0% better")
    assert {name: figures["tokens_per_second"] for name, figures in one["figures"].items()} == {
        "stock": 100,
        "stock again": 101,
        "eagle_mrv2": 120,
    }
    assert list(one["gain"]) == ["stock again", "eagle_mrv2"]
    assert one["gain"]["eagle_mrv2"] == pytest.approx({"overall": 1.2, "lowest": 1.15, "highest": 1.25})
    assert [made["tokens_per_second"] for made in one["rounds"]["eagle_mrv2"]] == [115, 125]


@pytest.mark.parametrize("ours", [taken(220), empty()], ids=["measured", "too short"])
@pytest.mark.parametrize("control", [True, False])
def test_the_drawing(ours: LoadRound, control: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rounds = [fast(200, 200), *([fast(202, 201)] if control else []), [taken(230), ours]]
    levels = [Level(concurrency=1), Level(concurrency=8), Level(rate=2.0)]
    rows = [row(*rounds, level=level, k=k) for k in (3, 5) for level in levels]
    report(*rows, started=CPU).draw(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_exit_status_and_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_engines(monkeypatch, taken(202), taken(240))
    file = tmp_path / "load.json"
    result = run("-k", "2", "4", "--concurrency", "1,2", "--rounds", "3", "--json", file)
    assert result.exit_code == 0, result.output
    assert "20.0% better" in result.stdout
    found = json.loads(file.read_text())
    assert [(one["k"], one["concurrency"]) for one in found["rows"]] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert found["passed"]
    assert (found["options"]["k"], found["options"]["rounds"]) == ([2, 4], 3)
    assert found["versions"].keys() == {"vllm", "eagle_mrv2", "python", "torch", "triton"}


def test_without_a_verdict_the_status_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engines(monkeypatch, taken(220), taken(240))
    result = run("--rounds", "2", "--json", "-")
    assert result.exit_code == 1
    (only,) = json.loads(result.stdout)["rows"]
    assert only["verdict"] == "none: two engines with stock differ by 10.0%"
    assert run("--rounds", "2", "--no-control").exit_code == 0


def test_rows_before_a_failure_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_engines(monkeypatch, taken(), taken(240), fails_at=4)
    result = run("-k", "2", "4", "--rounds", "2")
    assert result.exit_code == 1
    assert "20.0% better" in result.stdout
    assert result.stderr.endswith("error: the engine with stock failed: no memory\n")
    first = run("-k", "4", "2", "--json", "-")
    assert first.exit_code == 1
    assert json.loads(first.stdout) == {"error": "the engine with stock failed: no memory"}
