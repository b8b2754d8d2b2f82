"""Puts together what came out of one release on a GPU: ci/results/h200-vllm-X.Y.Z.json.

    python ci/gpu_result.py 0.26.0 --reports gpu-0.26.0.xml --times ab.json --date 2026-11-21 \
        --commit d0f8278 --command 'pytest tests/gpu' [--note TEXT]

The reports are pytest's JUnit files of tests/gpu, which carry the measured figures as properties; of a test that is in
several, the last counts, so a run that was cut short can be gone on with.  A test whose engine found the GPU's memory
taken by others has not run.  The times are lines that ci/ab_time.py
printed, those of other releases are passed over.
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
NO_MEMORY = "Free memory on device"  # of vLLM, when others have taken it before an engine starts
MEASURED = ("stock", "eagle_mrv2", "ratio", "quartiles", "rounds")
VERSIONS = ["python=3.12.3", "torch=2.11.0+cu130", "triton=3.6.0"]
BUILDS = {
    "test_what_stock_builds": "stock",
    "test_what_stock_takes_for_the_maximum_length": "stock",
    "test_draft_prefill_reads_the_targets_metadata[disable0-0]": "eagle_mrv2",
    "test_max_seq_len_of_the_draft_is_the_batchs": "eagle_mrv2",
}


def read_reports(reports: list[Path]) -> dict[str, Any]:
    """Counts, acceptance by family at K=3, and the figures of the draft's metadata."""
    verdicts: dict[str, str] = {}
    families: dict[str, Any] = {}
    metadata: dict[str, dict[str, float]] = {"stock": {}, "eagle_mrv2": {}}
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase"):
            name = case.get("name", "")
            if name in ("", "internal"):  # the whole run's, where it was cut short
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
    return {"tests": tests, "families": families, "draft_metadata": metadata}


def read_times(file: Path, release: str) -> list[dict[str, Any]]:
    """The comparisons of a release; several pairs of engines in one case are one, of geometric means."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        if line.startswith("{"):
            one = json.loads(line)
            if one.pop("vllm") == release:
                case = {key: value for key, value in one.items() if key not in MEASURED}
                cases.setdefault(json.dumps(case, sort_keys=True), []).append(one)
    return [_joined(pairs) for pairs in cases.values()]


def _joined(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    def mean(values: Iterable[float]) -> float:
        return round(statistics.geometric_mean(values), 4)

    return pairs[0] | {
        **{side: [pair[side] for pair in pairs] for side in ("stock", "eagle_mrv2")},
        "ratio": mean(pair["ratio"] for pair in pairs),
        "quartiles": [mean(each) for each in zip(*(pair["quartiles"] for pair in pairs), strict=True)],
        "rounds": sum(pair["rounds"] for pair in pairs),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--reports", type=Path, nargs="+", required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--date", required=True)
    parser.add_argument("--command", action="append", required=True, help="what was run, as often as needed")
    parser.add_argument("--commit", required=True, help="of the code that ran")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="NAME=VERSION")
    parser.add_argument("--note", action="append", default=[])
    options = parser.parse_args()
    target = RESULTS / f"h200-vllm-{options.version}.json"
    earlier = json.loads(target.read_text()).get("earlier", []) if target.exists() else []
    result = {
        "vllm": options.version,
        "where": "H200",
        "date": options.date,
        "commit": options.commit,
        "command": options.command,
        "versions": dict(one.split("=", 1) for one in options.versions),
        **read_reports(options.reports),
        "iteration_ms": read_times(options.times, options.version),
        "notes": options.note,
        "earlier": earlier,
    }
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{target.name}: {result['tests']}")


if __name__ == "__main__":
    main()
