"""An engine under a load that changes: the worker of benchmarks/draft_lengths.py, on the demo pair."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from scripts import BENCHMARKS, script

from vllm_eagle_mrv2.cli.common.engines import Engines, Setup
from vllm_eagle_mrv2.cli.common.pair import PAIR, load_prompts
from vllm_eagle_mrv2.cli.common.subject import Subject

pytestmark = pytest.mark.engine

K = 2


@pytest.fixture(scope="module")
def lengths() -> ModuleType:
    return script("draft_lengths")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "iterations.csv"


@pytest.fixture(scope="module")
def live(lengths: ModuleType, trace: Path) -> Iterator[Engines]:
    """The engine, which accepts drafts at random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE_MRV2_TRACE", str(trace))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))
        arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 2**29}
        subject = Subject("", str(PAIR / "target"), str(PAIR / "eagle3"), "eagle3", load_prompts(), arguments, True)
        setup = Setup(
            subject,
            options={"draft_length": "auto"},
            acceptance=[0.7, 0.5],
            overrides={"worker_extension_cls": "changing_load.AcceptanceRates"},
            max_num_seqs=8,
            worker="changing_load",
        )
        with setup.engines(K) as engines:
            yield engines


def test_what_is_accepted_changes(lengths: ModuleType, live: Engines) -> None:
    """Of drafts that all are accepted each iteration makes K + 1 tokens, and one of those that never are."""
    for shares, made in (([1.0, 1.0], K + 1), ([0.0, 0.0], 1)):
        lengths.ask(live, [lengths.Phase(concurrency=0, seconds=0.0, acceptance=shares)])
        row = lengths.measure(live, 1, lengths.Traffic((8, 8)), 1)
        (measured,) = row.rounds[K]
        assert measured.accepted_length == pytest.approx(made, abs=0.2)


def test_a_line_has_every_round(lengths: ModuleType, live: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "OUTPUT_TOKENS", (8, 8))
    options = Namespace(accepted=["low"], concurrency=[1], rounds=2, changes=())
    (line,) = lengths.lines(live, options)
    assert list(line["rounds"]) == list(line["tokens_per_second"]) == ["0", "1", "2", "auto"]
    for setting, rounds in line["rounds"].items():
        speeds = [speed for speed, _ in rounds]
        if len(speeds) == 2:  # what is far behind has one round
            assert min(speeds) <= line["tokens_per_second"][setting] <= max(speeds)
    assert len(line["rounds"]["auto"]) == 2
    assert {round(drafts) for _, drafts in line["rounds"]["2"]} == {2}
    assert list(line["chosen"]) == ["0", "1", "2"]
    assert sum(line["chosen"].values()) > 0


def test_the_load_changes(lengths: ModuleType, live: Engines) -> None:
    """Every phase makes tokens, and what is held is drafted."""
    phases = [lengths.Phase(concurrency=many, seconds=7.0, acceptance=[0.5, 0.2]) for many in (1, 6, 1)]
    courses = lengths.ask(live, phases, K, output_tokens=(4, 8))
    assert min(lengths.settled({K: courses})[str(K)]) > 0
    assert {len(one.tokens_per_second) for one in courses.phases} == {14}
    assert {length for one in courses.phases for length in one.draft_length[1:]} == {K}


def test_iterations_are_traced(lengths: ModuleType, live: Engines, trace: Path) -> None:
    lengths.ask(live, [lengths.Phase(concurrency=2, seconds=2.0, acceptance=[1.0, 1.0])], K)
    columns, *rows = (line.split(",") for line in trace.read_text().splitlines())
    microseconds, decodes, length, prefilled, chosen, held, accepted = range(len(columns))
    full = [row for row in rows if row[decodes] == row[length] == row[held] == str(K)]
    assert full
    assert {row[chosen] for row in full} == {str(K)}
    assert f"{K}:2" in {row[accepted] for row in full}
    assert all(int(row[microseconds]) > 0 for row in rows)
    assert any(int(row[prefilled]) for row in rows)
    assert [row[decodes:] for row in rows[::2]] != [row[decodes:] for row in rows[1::2]], "each is written twice"
