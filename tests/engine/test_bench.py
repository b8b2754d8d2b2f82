"""``vllm-eagle-mrv2 bench`` on the demo pair: two live engines of this machine's vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.bench import command
from vllm_eagle_mrv2.cli.bench.measurement import measure
from vllm_eagle_mrv2.cli.bench.types import Batch, Row
from vllm_eagle_mrv2.cli.common.engine_process import EngineProcess
from vllm_eagle_mrv2.cli.common.engines import Engines
from vllm_eagle_mrv2.config.families import METHOD

pytestmark = pytest.mark.engine

K, TOKENS, ROUNDS = 2, 12, 2
EQUAL, UNEQUAL = 2, 1  # batch sizes: both engines do the same, and one of them less


class AsksForLess:
    """A live engine that is asked for fewer tokens than the other."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def ask(self, batch: Batch) -> Any:
        return self._process.ask(batch.model_copy(update={"max_tokens": batch.max_tokens - 4}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """One run of the command, and its JSON; in the batch of UNEQUAL ours generates less."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"

    def unequal(pair: Engines, batch: int, *arguments: Any) -> Row:
        if batch == UNEQUAL:
            less: Any = AsksForLess(pair.processes[METHOD])
            pair = replace(pair, processes={**pair.processes, METHOD: less})
        return measure(pair, batch, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure", unequal)
        arguments = ["-k", K, "--batch", EQUAL, UNEQUAL, "--rounds", ROUNDS, "--tokens", TOKENS, "--json", file]
        result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    return result, json.loads(file.read_text())


def test_measures_both_engines(finished: tuple[Any, dict[str, Any]]) -> None:
    row = finished[1]["rows"][0]
    assert (row["k"], row["batch"], row["refusals"]) == (K, EQUAL, [])
    assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
    for side in ("against", "eagle_mrv2"):
        assert len(row[side]["rounds"]) == ROUNDS
        for measured in row[side]["rounds"]:
            assert measured["num_tokens"] == EQUAL * TOKENS
            assert TOKENS / (K + 1) <= measured["iterations"] <= TOKENS
            assert measured["num_drafts"] <= EQUAL * (measured["iterations"] - 1)
            assert measured["num_draft_tokens"] <= K * measured["num_drafts"]
            assert measured["iteration_ms"] == pytest.approx(measured["seconds"] / measured["iterations"] * 1e3)
            assert 0 < measured["itl_p50_ms"] <= measured["itl_p99_ms"] < measured["seconds"] * 1e3
            # All requests are prefilled in the first iteration, however slowly they were put in.
            assert 0 < measured["ttft_p50_ms"] == measured["ttft_p99_ms"] < measured["seconds"] * 1e3
        assert len(row[side]["acceptance"]) == K
        assert 1 >= row[side]["acceptance"][0] >= row[side]["acceptance"][1] > 0
    assert row["against"]["acceptance"] == row["eagle_mrv2"]["acceptance"]


def test_refuses_a_ratio_of_unequal_work(finished: tuple[Any, dict[str, Any]]) -> None:
    result, found = finished
    row = found["rows"][1]
    assert row["ratio"] is None
    assert f"round 1: greedy tokens differ, first at token {TOKENS - 3} of prompt 1" in row["refusals"]
    assert f"round 1: {TOKENS} tokens with stock, {TOKENS - 4} with eagle_mrv2" in row["refusals"]
    assert result.exit_code == 1
    assert not found["passed"]
    assert "refused" in result.stdout
    assert f"K={K}, batch {UNEQUAL}: no ratio; round 1: greedy tokens differ" in result.stdout


def test_says_where_it_ran(finished: tuple[Any, dict[str, Any]]) -> None:
    result, found = finished
    assert found["device"] in ("cpu", "cuda")
    assert found["versions"]["vllm"] in result.stdout
    assert ("mean nothing" in result.stdout) is (found["device"] == "cpu")
