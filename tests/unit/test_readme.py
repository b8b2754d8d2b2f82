"""The tables of README.md are those that the code and the results make."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from scripts import script

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.config.behaviours import Behaviour

pytestmark = pytest.mark.any_release

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return script("readme_tables")


@pytest.fixture
def results(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results of our own instead of benchmarks/results."""
    folder = tmp_path / "results"
    folder.mkdir()
    read = tables.read_results
    monkeypatch.setattr(tables, "read_results", lambda: read(folder))
    return folder


def result(**changed: Any) -> str:
    iteration = {"shape": "1b", "method": "eagle", "k": 3, "batch": 1, "stock": [2.0], "eagle_mrv2": [1.6]}
    return json.dumps(
        {
            "vllm": "0.26.0",
            "where": "H200",
            "date": "2026-11-22",
            "command": "pytest tests/gpu",
            "versions": {"torch": "2.11.0"},
            "tests": {"passed": 41, "failed": 1, "skipped": 0},
            "families": {
                "eagle": {"equal": True, "acceptance": {"stock": 2.5, "eagle_mrv2": 2.625}, "dtype": "float32"},
                "mtp": {"equal": False, "acceptance": {"stock": None, "eagle_mrv2": 1.5}},
            },
            "iteration_ms": [{**iteration, "ratio": 1.25}, {**iteration, "shape": "8b", "ratio": 9.0}],
            "notes": [],
            **changed,
        }
    )


def test_pages_are_up_to_date(tables: ModuleType) -> None:
    for page, sections in tables.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert tables.rewrite(text, sections)[1] == [], f"{page.name}: run python tools/readme_tables.py"


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len(README.splitlines()) <= 120


def test_every_supported_minor_release_is_of_the_newest_package(tables: ModuleType) -> None:
    assert set(list(tables.PACKAGES.values())[-1]) == {tables._minor(release) for release in tables.releases()}


def test_a_stale_readme_is_found_and_rewritten(tables: ModuleType, tmp_path: Path, capsys: Any) -> None:
    copy = tmp_path / "README.md"
    row = next(line for line in README.splitlines() if line.startswith("| 1b eagle, K=7, batch 32"))
    copy.write_text(tables.rewrite(README)[0].replace(row + "\n", ""), encoding="utf-8")
    arguments = ["--readme", str(copy)]
    assert tables.main([*arguments, "--check"]) == 1
    assert "stale: gains:" in capsys.readouterr().out
    assert row not in copy.read_text(encoding="utf-8")
    assert tables.main(arguments) == 0
    assert tables.main([*arguments, "--check"]) == 0
    assert copy.read_text(encoding="utf-8") == tables.rewrite(README)[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [("<!-- generated: gains -->", ""), ("<!-- end: gains -->", ""), ("generated: gains", "generated: giants")],
)
def test_a_readme_without_a_place_for_a_section(
    old: str, new: str, tables: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(README.replace(old, new), encoding="utf-8")
    assert tables.main(["--readme", str(copy)]) == 1
    assert "gains" in capsys.readouterr().err


def test_behaviours_by_release(tables: ModuleType) -> None:
    head, _, *lines = tables.behaviours_section().splitlines()
    minors = [f"0.{cell.strip()}" for cell in head.split("|")[2:-1]]
    assert minors == sorted((minor for adapter in releases.all_releases() for minor in adapter.series), key=Version)
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == len(Behaviour)
    for behaviour, row in zip(Behaviour, rows, strict=True):
        name, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        assert name == f"`{behaviour}`: {behaviour.summary}"
        assert len(cells) == len(minors)
        for release, cell in zip(tables.releases(), cells, strict=True):
            assert cell == tables.CELLS[releases.release_for(release).supplier(behaviour, Version(release))]


def test_a_release_has_one_row_for_all_its_runs(tables: ModuleType, results: Path) -> None:
    (results / "cpu.json").write_text(result(where="CPU engine", tests=None, families={}, iteration_ms=[]))
    (results / "h200.json").write_text(result())
    (row,) = (line for line in tables.results_section().splitlines() if line.startswith("| 0.26.0 |"))
    assert row == (
        "| 0.26.0 | CPU engine<br>H200 | 2026-11-22<br>2026-11-22 | -<br>41, 1 failed | -<br>eagle, **not mtp** "
        "| -<br>eagle 2.62 / 2.50, mtp 1.50 / - |"
    )


def test_tests_that_have_not_run_are_shown(tables: ModuleType, results: Path) -> None:
    tests = {"passed": 26, "failed": 0, "skipped": 1, "not_run": 7}
    (results / "h200.json").write_text(result(tests=tests))
    assert "| 26, 1 skipped, 7 not run |" in tables.results_section()


def test_what_was_timed(tables: ModuleType, results: Path) -> None:
    one = {"shape": "1b", "method": "eagle", "k": 7, "batch": 1, "stock": [3.0], "eagle_mrv2": [2.5]}
    rows = [
        {**one, "ratio": 1.2, "quartiles": [1.19, 1.215], "rounds": 9},
        {**one, "ratio": 1.5, "setting": "drafts from 32768 tokens"},
        {**one, "ratio": 1.03, "without": ["two_stage_argmax"]},
        {**one, "ratio": 0.98, "before": "0.1.0"},
        {**one, "ratio": 1.1, "batch": 32},
        {**one, "ratio": 1.04, "k": 3, "batch": 8},
    ]
    (results / "a.json").write_text(result(iteration_ms=rows))
    (results / "b.json").write_text(result(vllm="0.22.1", iteration_ms=rows[:1]))
    older = [{**one, "ratio": 1.3 + batch / 100, "batch": batch} for batch in (1, 8, 32)]
    (results / "older.json").write_text(result(vllm="0.20.2", iteration_ms=older))
    (results / "c.json").write_text(result(vllm="0.32.0", iteration_ms=[]))
    assert tables.speed_section().splitlines()[:-2] == [
        "| case | 0.20.2 | 0.22.1 | 0.26.0 |",
        "| --- | --- | --- | --- |",
        "| 1b eagle, K=7, batch 1 | 1.31 | 1.20 (1.19 to 1.22) | 1.20 (1.19 to 1.22) |",
        "| 1b eagle, K=7, drafts from 32768 tokens, batch 1 | - | - | 1.50 |",
        "| 1b eagle, K=7, batch 32 | 1.62 | - | 1.10 |",
    ]
    assert tables.batches_section().splitlines() == [
        "| stock / eagle_mrv2 on 0.20.2, 0.26.0 | batch 1 | batch 8 | batch 32 |",
        "| --- | --- | --- | --- |",
        "| 1b eagle, K=7 | 1.31, 1.20 | 1.38, - | 1.62, 1.10 |",
        "| 1b eagle, K=3 | - | -, 1.04 | - |",
    ]
    assert tables.alone_section().splitlines()[2:] == ["| `two_stage_argmax`: 1b eagle, K=7, 0.26.0 | 1.03 |"]


def test_gains_under_load(tables: ModuleType, results: Path) -> None:
    one = {"shape": "8b", "method": "eagle3", "k": 3, "concurrency": 8, "gain": [1.05, 0.9, 1.1], "figures": {}}
    rows = [{**one, "control": [1.03, 0.98, 1.07]}, {**one, "concurrency": 64}, {**one, "setting": "FP8"}]
    rows.append({**one, "concurrency": 64, "gain": [1.2, 1.1, 1.3]})  # of another pair
    (results / "h100.json").write_text(result(where="H100", under_load=rows))
    assert tables.load_section().splitlines() == [
        "| tokens per second, eagle_mrv2 / stock | 8 in flight | 64 in flight |",
        "| --- | --- | --- |",
        "| 8b eagle3, K=3, 0.26.0, H100 | 1.05 (0.90 to 1.10); 1.03 | 1.05 (0.90 to 1.10)<br>1.20 (1.10 to 1.30) |",
        "| 8b eagle3, K=3, FP8, 0.26.0, H100 | 1.05 (0.90 to 1.10) | - |",
    ]


def test_speeds_with_a_real_model(tables: ModuleType, results: Path) -> None:
    """Are not among those of random weights."""
    speeds = {"no speculation": 300, "stock": 500, "eagle_mrv2": 600}
    about = {"shape": "smollm2", "method": "eagle3", "k": 5, "concurrency": 8, "gain": [1.2, 1.1, 1.3]}
    one = {**about, "figures": {engine: {"tokens_per_second": speed} for engine, speed in speeds.items()}}
    rows = [one, {**one, "setting": "FP8"}, {**one, "setting": "editing, FP8"}]
    (results / "h100.json").write_text(result(where="H100", under_load=rows))
    assert tables.load_section().splitlines()[2:] == []
    assert tables.smollm2_speed_section().splitlines() == [
        "| vLLM | on | prompts | in flight | no speculation | stock | eagle_mrv2 | FP8 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0.26.0 | H100 | all | 8 | 300 | 500 | 600, 1.20 (1.10 to 1.30) | 600, 1.20 (1.10 to 1.30) |",
        "| 0.26.0 | H100 | editing | 8 | 300 | 500 | - | 600, 1.20 (1.10 to 1.30) |",
    ]


def test_beside_adaptive_verification(tables: ModuleType, results: Path) -> None:
    """Is in neither of the other tables."""
    figures = {"stock": {"tokens_per_second": 500, "accepted_length": 2.5}}
    figures["eagle_mrv2"] = {"tokens_per_second": 600.4, "accepted_length": 3.0}
    one = {"shape": "8b", "method": "eagle3", "k": 5, "concurrency": 8, "gain": [1.2, 1.1, 1.3], "figures": figures}
    rows = [{**one, "setting": "adaptive, auto up to K=5"}, {**one, "shape": "smollm2", "setting": "adaptive"}]
    (results / "h100.json").write_text(result(where="H100", under_load=rows))
    assert tables.load_section().splitlines()[2:] == tables.smollm2_speed_section().splitlines()[2:] == []
    assert tables.adaptive_section().splitlines() == [
        "| vLLM | case | in flight | adaptive verification | auto | auto / adaptive verification |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 0.26.0, H100 | 8b eagle3, K=5 | 8 | 500 (2.50) | 600 (3.00) | 1.20 (1.10 to 1.30) |",
        "| 0.26.0, H100 | smollm2 eagle3, K=5 | 8 | 500 (2.50) | 600 (3.00) | 1.20 (1.10 to 1.30) |",
    ]


def test_chosen_draft_lengths(tables: ModuleType, results: Path) -> None:
    about = {"shape": "8b", "method": "eagle3", "k": 1}
    steady = {**about, "accepted": "low", "concurrency": 8, "tokens_per_second": {"0": 100, "1": 80, "auto": 98}}
    fewer = {**steady, "tokens_per_second": {"0": 100, "auto": 98}}
    speeds = {"0": [100.0, 50.0], "1": [80.0, 90.0], "auto": [99.0, 81.0]}
    course = {"tokens_per_second": [[90.0, 99.0], [60.0]], "draft_length": [[1, 0], [1]]}
    changing = {**about, "change": "load", "tokens_per_second": speeds, "course": course}
    assert tables.lengths_section() == tables.changes_section() == "Not measured yet."
    rounds = {"0": [(80.0, 0.0), (100.0, 0.0), (133.3, 0.0)], "auto": [(78.4, 0.5), (98.0, 0.5), (133.3, 0.5)]}
    chosen = {"0": 3.0, "1": 1.0}
    (results / "h100.json").write_text(
        result(where="H100", draft_lengths=[steady, {**steady, "rounds": rounds, "chosen": chosen}, fewer, changing])
    )
    assert tables.lengths_section().splitlines() == [
        "| vLLM | case | accepted | in flight | K=0 | K=1 | auto | auto / best | chosen / best | auto / K=0 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0.26.0, H100 | 8b eagle3, K=1 | low | 8 | 100 | 80 | 98 | 0.98 | - | 0.98 |",
        "| 0.26.0, H100 | 8b eagle3, K=1 | low | 8 | 100 | 80 | 98 | 0.98 ± 0.01 | 0.950 | 0.98 |",  # of 0.98, 0.98, 1
        "| 0.26.0, H100 | 8b eagle3, K=1 | low | 8 | 100 | - | 98 | 0.98 | - | 0.98 |",
        "",
        "![lengths, 0.26.0, H100](draft-length-lengths-0.26.0-h100.svg)",
    ]
    assert tables.changes_section().splitlines() == [
        "| vLLM | case | what changes | auto, of the best number of each phase |",
        "| --- | --- | --- | --- |",
        "| 0.26.0, H100 | 8b eagle3, K=1 | load | 0.99 of K=0, 0.90 of K=1 |",
        "",
        "![changes, 0.26.0, H100](draft-length-changes-0.26.0-h100.svg)",
    ]
    plots = script("draft_length_plots")
    (results / "h200.json").write_text(result())  # has nothing to draw
    drawn = plots.draw_all(tables.read_results(), results)
    assert [path.name for path in drawn] == [f"draft-length-{what}-0.26.0-h100.svg" for what in ("lengths", "changes")]
    texts = [path.read_text() for path in drawn]
    assert all(label in texts[0] for label in ("low acceptance", "K=1", "auto"))
    assert "draft tokens" in texts[1]
    plots.draw_all(tables.read_results(), results)
    assert [path.read_text() for path in drawn] == texts


def test_gains_are_those_of_releases_with_most_cases(tables: ModuleType, results: Path) -> None:
    one = {"shape": "1b", "method": "eagle", "k": 3, "batch": 1, "stock": [2.0], "eagle_mrv2": [1.6], "ratio": 1.25}
    rows = [{**one, "quartiles": [1.2, 1.3]}, {**one, "k": 7}, {**one, "k": 7, "batch": 32}]
    (results / "a.json").write_text(result(iteration_ms=rows))
    (results / "b.json").write_text(result(vllm="0.22.1", iteration_ms=rows[:1]))
    (results / "c.json").write_text(result(vllm="0.33.0", where="H100", iteration_ms=rows))
    head, _, *lines = tables.gains_section().splitlines()
    assert head == "| H200, steady decode | 0.26.0 |"
    assert lines[0] == "| 1b eagle, K=3, batch 1 | 1.25 (1.20 to 1.30) |"
    assert lines[3] == "| 8b eagle3, K=5, batch 1 | - |"


def test_where_tests_ran(tables: ModuleType, results: Path) -> None:
    (results / "h200.json").write_text(result())
    (results / "cpu.json").write_text(result(where="CPU engine", tests={"passed": 3, "failed": 0, "skipped": 0}))
    (head,) = (line for line in tables.compatibility_section().splitlines() if line.startswith("| vLLM 0."))
    column = [cell.strip() for cell in head.split("|")].index("26")
    cells = {}
    for line in tables.compatibility_section().splitlines()[2:-2]:
        parts = [cell.strip() for cell in line.split("|")]
        cells[parts[1]] = parts[column]
    assert cells["vllm-eagle-mrv2 0.1.0"] == "●"
    assert cells["tests passed on: H200"] == "1 failed"
    (results / "h200.json").write_text(result(tests={"passed": 3, "failed": 0, "skipped": 0, "not_run": 2}))
    assert "● (2 not run)" in tables.compatibility_section()
    assert cells["tests passed on: CPU engine"] == "●"
    assert cells["tests passed on: H100"] == "-"


def test_what_the_drafts_metadata_costs(tables: ModuleType, results: Path) -> None:
    builds = {"draft_prefill_builds": 1.0, "draft_decode_builds": 2.0, "max_seq_len": 256.0}
    ours = builds | {"draft_prefill_builds": 0.0, "max_seq_len": 64.0}
    (results / "h200.json").write_text(result(draft_metadata={"stock": builds, "eagle_mrv2": ours}))
    (results / "h100.json").write_text(result(where="H100", draft_metadata={"stock": builds, "eagle_mrv2": ours}))
    assert tables.metadata_section().splitlines()[2:] == ["| 0.26.0 | 1 → 0 | 2 → 2 | 256 → 64 |"]
    (results / "h100.json").unlink()
    del builds["max_seq_len"]
    (results / "h200.json").write_text(result(draft_metadata={"stock": builds, "eagle_mrv2": ours}))
    assert tables.metadata_section().splitlines()[-1] == "| 0.26.0 | 1 → 0 | 2 → 2 | - |"


def test_a_release_without_results_says_so(tables: ModuleType, results: Path) -> None:
    rows = [line for line in tables.results_section().splitlines() if "not run" in line]
    assert len(rows) == len(tables.releases())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (result(vlm="0.26.0"), "vlm"),
        (result(tests={"passed": 3}), "tests.failed"),
        (result(iteration_ms=[{"shape": "1b"}]), "iteration_ms.0.method"),
        ("{", "JSON"),
    ],
)
def test_a_result_of_another_form(text: str, problem: str, tables: ModuleType, results: Path) -> None:
    (results / "h200.json").write_text(text)
    with pytest.raises(tables.Stale, match=problem) as refused:
        tables.read_results()
    assert str(refused.value).startswith("h200.json: ")


def test_results_are_filed_under_their_release(tables: ModuleType) -> None:
    for file in tables.RESULTS.glob("*.json"):
        place, release = file.stem.split("-vllm-")
        found = tables.Result.model_validate_json(file.read_text(encoding="utf-8"))
        assert found.vllm == release
        assert releases.release_for(release)
        assert found.where.lower().startswith(place)


def test_the_vllm_extra_admits_what_is_supported() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = (Requirement(one) for one in project["optional-dependencies"]["vllm"])
    series = {minor for adapter in releases.all_releases() for minor in adapter.series}
    for minor in (f"0.{number}" for number in range(15, 50)):
        assert extra.specifier.contains(f"{minor}.2") == (minor in series), minor
