"""``vllm-eagle-mrv2 tune`` on the demo pair: one live engine that drafts every number in turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app

pytestmark = pytest.mark.engine

K, CONCURRENCY, REQUESTS, ROUNDS = 2, [1, 3], 6, 2
FEWEST, MOST = 8, 16  # tokens of a request
LENGTHS = range(K + 1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """One run of the command, and its JSON."""
    file = tmp_path_factory.mktemp("tune") / "tune.json"
    load = ["--concurrency", *CONCURRENCY, "--requests", REQUESTS, "--output-tokens", FEWEST, MOST, "--rounds", ROUNDS]
    result = CliRunner().invoke(app, ["tune", *map(str, [*load, "-k", K, "--json", file])])
    assert file.exists(), result.output
    return result, json.loads(file.read_text())


def test_every_number_is_drafted(finished: tuple[Any, dict[str, Any]]) -> None:
    rows = finished[1]["rows"]
    assert [row["concurrency"] for row in rows] == CONCURRENCY
    for row in rows:
        assert list(row["rounds"]) == [*map(str, LENGTHS), "auto"]
        assert {len(row["rounds"][name]) for name in ("auto", str(row["best"]))} == {ROUNDS}
        assert {len(rounds) for rounds in row["rounds"].values()} <= {1, ROUNDS}
        for length in LENGTHS:
            for measured in row["rounds"][str(length)]:
                assert measured["drafted_length"] == length
                assert 1 <= measured["accepted_length"] <= 1 + length
                assert 0 < measured["num_tokens"] < (REQUESTS + row["concurrency"]) * MOST
        assert all(0 <= measured["drafted_length"] <= K for measured in row["rounds"]["auto"])
    # Longer drafts have more accepted.
    accepted = [sum(row["rounds"][str(k)][0]["accepted_length"] for row in rows) for k in LENGTHS]
    assert accepted == sorted(set(accepted))


def test_says_what_it_found(finished: tuple[Any, dict[str, Any]]) -> None:
    result, found = finished
    assert result.exit_code == 0, result.output
    assert found["passed"]
    for row in found["rows"]:
        speeds = row["tokens_per_second"]
        assert speeds[str(row["best"])] == max(speeds[str(k)] for k in LENGTHS if len(row["rounds"][str(k)]) == ROUNDS)
        assert row["auto_of_none"] == pytest.approx(speeds["auto"] / speeds["0"])
    assert found["options"]["output_tokens"] == [FEWEST, MOST]
    assert found["versions"]["vllm"] in result.stdout
    assert ("mean nothing" in result.stdout) is (found["device"] == "cpu")
