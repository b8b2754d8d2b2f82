"""Writes the results of one release on a GPU into benchmarks/results/h200-vllm-X.Y.Z.json, or of another card.

    python benchmarks/gpu_result.py 0.26.0 --reports gpu-0.26.0.xml --times times.jsonl --date 2026-11-21 \
        --commit d0f8278 --command 'pytest tests/gpu' [--note TEXT]

``--card H100`` names another card than H200.

The reports are pytest's JUnit files of tests/gpu, which carry the measured figures as properties.  If a test is in
several reports, the last one counts, so an interrupted run can be continued.  A test counts as not run if other
processes had taken the GPU memory that its engine needs.  The times are lines printed by benchmarks/ab_time.py, the
loads by benchmarks/load_times.py, and the lengths by benchmarks/draft_lengths.py; lines of other releases are ignored.

Existing contents of the file are kept: replaced measurements move to ``earlier``, and the remaining ones are marked
with the file's previous commit.  If the commit is the same, new pairs of engines are added to the existing ones.
With ``--further-pair`` loads stand beside those of the same case, as they are of another pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
DRAFTS = "draft_what_stock_drafts["
NO_MEMORY = "Free memory on device"  # vLLM's error if others have taken the memory before an engine starts
SIDES = ("stock", "eagle_mrv2")
MEASURED = (*SIDES, "ratio", "quartiles", "rounds")
BUILDS = {
    "test_what_stock_builds": "stock",
    "test_what_stock_takes_for_the_maximum_length": "stock",
    "test_draft_prefill_reads_the_targets_metadata[disable0-0]": "eagle_mrv2",
    "test_max_seq_len_of_the_draft_is_the_batchs": "eagle_mrv2",
}


def read_reports(reports: list[Path]) -> dict[str, Any]:
    """Test counts, acceptance by family at K=3, and the figures of the draft's attention metadata."""
    verdicts: dict[str, str] = {}
    families: dict[str, Any] = {}
    metadata: dict[str, dict[str, float]] = {"stock": {}, "eagle_mrv2": {}}
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):
            name = case.get("name", "")
            if name in ("", "internal"):  # the entry of the whole run, if it was interrupted
                continue
            problems = [*case.iter("failure"), *case.iter("error")]
            failed = bool(problems)
            verdict = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
            if any(NO_MEMORY in problem.get("message", "") for problem in problems):
                verdict = "not_run"
            verdicts[f"{case.get('classname')}::{name}"] = verdict
            found = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
            if DRAFTS in name and found.get("k") == "3":
                families[found["family"]] = {
                    "equal": not failed,
                    "equal_to": "stock",
                    "acceptance": {side: round(float(found[side]), 4) for side in ("stock", "eagle_mrv2")},
                }
            if name in BUILDS:
                metadata[BUILDS[name]] |= {key: float(value) for key, value in found.items()}
    counts = Counter(verdicts.values())
    tests = {verdict: counts[verdict] for verdict in ("passed", "failed", "skipped")}
    if counts["not_run"]:
        tests["not_run"] = counts["not_run"]
    return {"tests": tests, "families": dict(sorted(families.items())), "draft_metadata": metadata}


def read_times(files: list[Path], release: str) -> list[dict[str, Any]]:
    """The comparisons of a release, one line per case."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.startswith("{")]
    of_release = [line for line in lines if line.pop("vllm") == release]
    return joined([line | {side: [line[side]] for side in SIDES} for line in of_release])


def put_lines(
    result: dict[str, Any], field: str, files: list[Path], commit: str, *, further_pair: bool = False
) -> None:
    """Put the lines of a script into a field of a result; those of the same case move to ``earlier``, or stay."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.startswith("{")]
    new = [line | {"commit": commit} for line in lines if line.pop("vllm") == result["vllm"]]

    def case(line: dict[str, Any]) -> tuple[Any, ...]:
        fields = ("shape", "method", "k", "setting", "accepted", "change", "concurrency")
        return tuple(line.get(field, "") for field in fields)

    again = set() if further_pair else {case(line) for line in new}
    known = result.get(field, [])
    put_aside(result, field, [line for line in known if case(line) in again])
    result[field] = sorted([*(line for line in known if case(line) not in again), *new], key=case)


def put_aside(result: dict[str, Any], field: str, replaced: list[dict[str, Any]]) -> None:
    """Put lines of a field that were measured again under ``earlier``, by their commits."""
    of: dict[str, list[dict[str, Any]]] = {}
    for line in replaced:
        of.setdefault(line["commit"], []).append({key: value for key, value in line.items() if key != "commit"})
    again = [{"commit": commit, "note": "measured again since", field: lines} for commit, lines in of.items()]
    result["earlier"] = again + result.get("earlier", [])


def case_of(line: dict[str, Any]) -> str:
    """The case of a line: its fields that are not measurements, including the commit if it has one."""
    return json.dumps({key: value for key, value in line.items() if key not in MEASURED}, sort_keys=True)


def joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the lines of each case into one, with geometric means over all pairs of engines."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        cases.setdefault(case_of(line), []).append(line)
    return [_one(same) for same in cases.values()]


def _one(lines: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [len(line["stock"]) for line in lines]

    def mean(values: Iterable[float]) -> float:
        each = [value for value, weight in zip(values, pairs, strict=True) for _ in range(weight)]
        return round(statistics.geometric_mean(each), 4)

    return lines[0] | {
        **{side: [time for line in lines for time in line[side]] for side in SIDES},
        "ratio": mean(line["ratio"] for line in lines),
        "quartiles": [mean(each) for each in zip(*(line["quartiles"] for line in lines), strict=True)],
        "rounds": sum(line["rounds"] for line in lines),
    }


def put_times(result: dict[str, Any], times: list[dict[str, Any]], commit: str) -> None:
    """Put the comparisons of a commit into a result, and keep the ones that they replace under ``earlier``."""
    for line in result["iteration_ms"]:
        line.setdefault("commit", result["commit"])
    lines = joined([*result["iteration_ms"], *(line | {"commit": commit} for line in times)])
    new = {case_of(line) for line in times}
    replaced = []
    result["iteration_ms"] = []
    for line in sorted(lines, key=_place):
        of = line.pop("commit")
        if of == commit:
            result["iteration_ms"].append(line)
        elif case_of(line) in new:
            replaced.append(line | {"commit": of})
        else:
            result["iteration_ms"].append(line | {"commit": of})
    put_aside(result, "iteration_ms", replaced)
    result["commit"] = commit


def _place(line: dict[str, Any]) -> tuple[Any, ...]:
    """Sort key: shape, head, K and batch size; lines with a setting next; comparisons with ours last, unsorted."""
    if "without" in line or "before" in line:
        return (2,)
    return ("setting" in line, line["shape"], line["method"], -line["k"], line["batch"])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--card", default="H200")
    parser.add_argument("--reports", type=Path, nargs="+", default=[])
    parser.add_argument("--times", type=Path, nargs="+", default=[])
    parser.add_argument("--loads", type=Path, nargs="+", default=[])
    parser.add_argument("--lengths", type=Path, nargs="+", default=[])
    parser.add_argument("--date", required=True, help="a file's is that of its tests")
    parser.add_argument("--command", action="append", required=True, help="what was run, as often as needed")
    parser.add_argument("--commit", required=True, help="of the code that ran")
    parser.add_argument(
        "--versions", nargs="+", metavar="NAME=VERSION", help="of python, torch, triton; for a new file"
    )
    parser.add_argument("--note", action="append", default=[])
    parser.add_argument("--further-pair", action="store_true", help="keep earlier loads of the same cases, too")
    options = parser.parse_args()
    target = RESULTS / f"{options.card.lower()}-vllm-{options.version}.json"
    known = json.loads(target.read_text()) if target.exists() else {}
    if not known and not (options.reports and options.versions):
        parser.error(f"{target.name} does not exist yet, and begins with tests; give --reports and --versions.")
    versions = dict(one.split("=", 1) for one in options.versions or ())
    empty: dict[str, Any] = {
        "vllm": options.version,
        "where": options.card,
        "date": options.date,
        "commit": options.commit,
        "command": [],
        "versions": versions,
        "tests": {},
        "families": {},
        "draft_metadata": {},
        "iteration_ms": [],
        "under_load": [],
        "draft_lengths": [],
        "notes": [],
        "earlier": [],
    }
    result = empty | known
    if options.reports:
        result |= {"date": options.date} | read_reports(options.reports)
    if options.versions:
        result["versions"] = versions
    result["command"] += [f"{options.date}, at {options.commit}: {command}" for command in options.command]
    result["notes"] += options.note
    put_lines(result, "under_load", options.loads, options.commit, further_pair=options.further_pair)
    put_lines(result, "draft_lengths", options.lengths, options.commit)
    if options.reports or options.times:  # the others name their own commit
        put_times(result, read_times(options.times, options.version), options.commit)
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{target.name}: {result['tests']}")


if __name__ == "__main__":
    main()
