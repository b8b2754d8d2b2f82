"""``vllm-eagle-mrv2 bench-load`` on the demo pair: three live engines of this machine's vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.bench_load.types import FIGURES

pytestmark = pytest.mark.engine

K, CONCURRENCY, RATE, REQUESTS, ROUNDS = 2, 3, 20, 8, 2
FEWEST, MOST = 6, 12  # tokens of a request
SHARES = (0.7, 0.4)
NAMES = ("stock", "stock again", "eagle_mrv2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """One run of the command, and its JSON."""
    file = tmp_path_factory.mktemp("load") / "load.json"
    load = ["--concurrency", CONCURRENCY, "--rate", RATE, "--requests", REQUESTS, "--output-tokens", FEWEST, MOST]
    result = CliRunner().invoke(
        app, ["bench-load", *map(str, [*load, "--rounds", ROUNDS, "-k", K, "--acceptance", *SHARES, "--json", file])]
    )
    assert file.exists(), result.output
    return result, json.loads(file.read_text())


def test_measures_three_engines(finished: tuple[Any, dict[str, Any]]) -> None:
    row, open_loop = finished[1]["rows"]
    assert (row["k"], row["concurrency"], row["decided_by"]) == (K, CONCURRENCY, "tokens_per_second")
    assert (open_loop["k"], open_loop["rate"], open_loop["decided_by"]) == (K, RATE, "tpot_p50_ms")
    assert tuple(row["rounds"]) == tuple(row["figures"]) == NAMES
    for name in NAMES:
        assert row["figures"][name].keys() == set(FIGURES)
        assert len(row["rounds"][name]) == ROUNDS
        for measured in row["rounds"][name]:
            assert FEWEST < measured["num_tokens"] < (REQUESTS + CONCURRENCY) * MOST
            assert measured["tokens_per_second"] == pytest.approx(
                measured["num_tokens"] / (measured["seconds"] + measured["owed_s"])
            )
            assert 0 < measured["ttft_p50_ms"] <= measured["ttft_p99_ms"]
            assert measured["tpot_p50_ms"] > 0
            assert measured["gap_p99_ms"] > 0
    for name in NAMES[1:]:
        gain = row["gain"][name]
        # Over all rounds together, which differ in their tokens: not always between the worst and the best of them.
        ours, stock = (row["figures"][one]["tokens_per_second"] for one in (name, NAMES[0]))
        assert gain["overall"] == pytest.approx(ours / stock)
        assert 0 < gain["lowest"] <= gain["highest"]
    assert row["noise"] == pytest.approx(abs(row["gain"]["stock again"]["overall"] - 1))


def test_all_engines_accept_the_same(finished: tuple[Any, dict[str, Any]]) -> None:
    """Acceptance at random follows the seeds of the requests, all of which an open loop sees from first to last."""
    _, row = finished[1]["rows"]
    stock, again, ours = ([one["accepted_length"] for one in row["rounds"][name]] for name in NAMES)
    assert stock == again == ours
    assert all(1 < length < K + 1 for length in stock)


def test_says_what_it_found(finished: tuple[Any, dict[str, Any]]) -> None:
    result, found = finished
    verdicts = [row["verdict"] for row in found["rows"]]
    assert result.exit_code == (0 if found["passed"] else 1), result.output
    assert found["error"] is None
    assert found["passed"] is not any(verdict.startswith("none") for verdict in verdicts)
    # A long verdict is folded, so it is read down the last column.
    lines = [line.split("│")[-2] for line in result.stdout.splitlines() if line.startswith("│")]
    shown = " ".join(" ".join(lines).split())
    assert all(verdict in shown for verdict in verdicts)
    assert found["versions"].keys() == {"vllm", "eagle_mrv2", "python", "torch", "triton"}
    assert found["versions"]["vllm"] in result.stdout
    assert found["options"]["output_tokens"] == [FEWEST, MOST]
    assert ("mean nothing" in result.stdout) is (found["device"] == "cpu")
