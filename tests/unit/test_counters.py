"""Draft phases are counted in one process, and read in another."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import DEPLOY

from vllm_eagle_mrv2.telemetry import counters
from vllm_eagle_mrv2.telemetry.counters import FOLDER_VARIABLE, DraftCounter, hold, read_counts, share_folder


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Made as by a front-end, and gone after the test."""
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    monkeypatch.setattr(counters, "_folder", None)
    share_folder()
    assert counters._folder is not None
    with counters._folder as name:
        yield Path(name)


def phases(rank: int) -> dict[str, int]:
    """What a rank has counted, without what it has none of."""
    return {path: count for path, count in dict(read_counts())[rank].phases.items() if count}


def test_counts_of_each_rank() -> None:
    first, second = DraftCounter.of_rank(0), DraftCounter.of_rank(10)
    assert first.shared
    first.cells[counters.ONE_GRAPH] += 2
    first.cells[counters.EAGER] += 1
    first.cells[counters.DRAFT_LENGTH] = 2
    second.cells[counters.PREFILL_ONLY] += 1
    assert [rank for rank, _ in read_counts()] == [0, 10]
    assert phases(0) == {"one_graph": 2, "eager": 1}
    assert phases(10) == {"prefill_only": 1}
    assert [counts.draft_length for _, counts in read_counts()] == [2, 0]
    first.clear()
    assert phases(0) == {}


def test_what_the_scheduler_counts() -> None:
    cells = DraftCounter.of_rank(3).cells
    cells[counters.CHANGES], cells[counters.TOKENS], cells[counters.EXPECTED_MILLITOKENS] = 7, 11, 10_250
    cells[counters.MICROSECONDS], cells[counters.EXPECTED_MICROSECONDS] = 2_000_000, 500
    counts = dict(read_counts())[3]
    assert (counts.changes, counts.tokens, counts.expected_tokens) == (7, 11, 10.25)
    assert (counts.seconds, counts.expected_seconds) == (2.0, 0.0005)
    assert counts.seconds_by_length == 7 * (0.0,)
    cells[counters.BY_LENGTH.start + 2] += 1_500_000
    assert dict(read_counts())[3].seconds_by_length[:4] == (0.0, 0.0, 1.5, 0.0)


def test_a_number_is_held_for_all_ranks() -> None:
    held = [DraftCounter.of_rank(rank).cells for rank in (0, 1)]
    for length in (0, 5, None):
        hold(length)
        assert [cells[counters.HELD] for cells in held] == 2 * [0 if length is None else 1 + length]


def test_children_count_into_the_same_folder() -> None:
    worker = (
        "from vllm_eagle_mrv2.telemetry import counters\n"
        "counters.share_folder()\n"  # as an API server beside others does
        "counters.DraftCounter.of_rank(1).cells[counters.FUSED] += 1"
    )
    subprocess.run([sys.executable, "-c", worker], check=True)
    assert phases(1) == {"fused": 1}


def test_the_folder_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    front_end = (
        "import os; from vllm_eagle_mrv2.telemetry import counters; counters.share_folder(); "
        "counters.DraftCounter.of_rank(0); print(os.environ[counters.FOLDER_VARIABLE])"
    )
    made = subprocess.run([sys.executable, "-c", front_end], check=True, capture_output=True, text=True).stdout.strip()
    assert made
    assert not Path(made).exists()


def test_the_folder_ends_with_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which does not run what is registered for the end of the interpreter."""
    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr(counters, "_folder", None)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def front_end() -> None:
        share_folder()
        DraftCounter.of_rank(0)
        theirs.send(os.environ[FOLDER_VARIABLE])

    process = context.Process(target=front_end)
    process.start()
    made = ours.recv()
    process.join()
    assert not Path(made).exists()


def test_counts_are_private_where_no_room_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to a file without room would end the process."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not DraftCounter.of_rank(0).shared
    assert list(read_counts()) == []


@pytest.mark.parametrize("where", [None, "gone"])
def test_without_a_front_end_here(where: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine."""
    if where is None:
        monkeypatch.delenv(FOLDER_VARIABLE)
    else:
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder / where))
    counter = DraftCounter.of_rank(0)
    counter.cells[counters.FUSED] += 1
    assert not counter.shared
    assert list(read_counts()) == []


def test_dashboard_and_alert_rules_are_well_formed() -> None:
    """Which metrics a server has for them, its own test sees."""
    yaml = pytest.importorskip("yaml")
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for rule in rules]
    paths = {path for query in queries for path in re.findall(r'\bpath!?="(\w+)"', query)}
    assert paths
    assert paths <= counters.PATHS.keys()
    for query in queries:
        assert query.count("(") == query.count(")")
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for rule in rules:
        assert rule["annotations"].keys() == {"summary", "description"}
