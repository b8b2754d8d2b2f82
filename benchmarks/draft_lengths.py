#!/usr/bin/env python3
"""What an engine makes of each number of draft tokens and of its own choice, as lines for benchmarks/gpu_result.py.

    python3 benchmarks/draft_lengths.py --shape 8b --family eagle3 --steps 5 --concurrency 1 4 16 64 128 256
    python3 benchmarks/draft_lengths.py --shape 8b --family eagle3 --steps 5 --changes acceptance load --accepted

Prints JSON.  One engine with ``draft_length: auto`` and random weights is up.  As in ``vllm-eagle-mrv2 tune``, rounds
that hold each number alternate with rounds that leave it to the engine, for every number of requests in flight and each
kind of shares of accepted drafts (``--accepted``).  A line has the tokens a second of all of them, of each round that
and its drafts per request, and the seconds for which the engine chose each number.

``--changes`` begins with a line for each of what is named: the shares of accepted drafts change, or the load rises and
falls.  It has the tokens a second of each phase from five seconds after its begin on, and the course of the engine's
own choice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import changing_load
import iteration_trace
from ab_time import arrive, turn
from changing_load import Changes, Courses, Phase

from vllm_eagle_mrv2.cli.common.engines import Engines, Setup
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.load.balance import of_one_engine
from vllm_eagle_mrv2.cli.common.load.traffic import USUAL_PROMPTS, Traffic, random_prompts
from vllm_eagle_mrv2.cli.common.load.types import throughput
from vllm_eagle_mrv2.cli.common.shapes import Shape
from vllm_eagle_mrv2.cli.common.subject import FIXED_KV_CACHE, shape_subject
from vllm_eagle_mrv2.cli.tune.settings import measure
from vllm_eagle_mrv2.cli.tune.types import AUTO, Setting
from vllm_eagle_mrv2.config.draft_lengths import lengths_up_to

ACCEPTED = {
    "high": [0.85, 0.75, 0.65, 0.55, 0.45],
    "middle": [0.70, 0.50, 0.35, 0.25, 0.17],
    "low": [0.45, 0.20, 0.08, 0.03, 0.01],
}
"""Share of drafts accepted up to each position."""
OUTPUT_TOKENS = (64, 256)
"""Requests of one length would fall in step, and rounds differ by how many of their prefills share an iteration."""
CHANGES = {"acceptance": "high, low, high acceptance at 16 in flight", "load": "8, 256, 8 in flight"}


def phases_of(change: str, seconds: float) -> list[Phase]:
    """What changes while the engine serves; a phase lasts so long."""
    if change == "acceptance":
        return [Phase(concurrency=16, seconds=seconds, acceptance=ACCEPTED[kind]) for kind in ("high", "low", "high")]
    load = [Phase(concurrency=many, seconds=seconds) for many in (8, 256, 8)]
    load[0].acceptance = ACCEPTED["middle"]
    return load


def settled(courses: dict[Setting, Courses]) -> dict[str, list[float]]:
    """Tokens a second of each phase once it has settled, by setting; all with the prompts that they call for."""
    phases = [
        of_one_engine({setting: [one.settled] for setting, one in zip(courses, phase, strict=True)})
        for phase in zip(*(one.phases for one in courses.values()), strict=True)
    ]
    return {str(setting): [round(throughput(phase[setting]), 1) for phase in phases] for setting in courses}


def ask(engines: Engines, phases: list[Phase], setting: Setting = AUTO, **further: Any) -> Courses:
    """Have the engine go through phases.

    Args:
        further: fields of `Changes`.
    """
    (process,) = engines.processes.values()
    job = Changes(phases=phases, draft_length=None if setting == AUTO else setting, **further)
    return Courses.model_validate(process.ask(job))


def lines(engines: Engines, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What was measured, as it comes."""
    for change in options.changes:
        phases = phases_of(change, options.seconds)
        settings: list[Setting] = [*lengths_up_to(engines.k), AUTO]
        courses = {setting: ask(engines, phases, setting) for setting in settings}
        yield {
            "change": CHANGES[change],
            "tokens_per_second": settled(courses),
            "course": {
                "tokens_per_second": [one.tokens_per_second for one in courses[AUTO].phases],
                "draft_length": [one.draft_length for one in courses[AUTO].phases],
            },
        }
    for concurrency, kind in product(options.concurrency, options.accepted):
        ask(engines, [Phase(concurrency=0, seconds=0.0, acceptance=ACCEPTED[kind])])
        row = measure(engines, concurrency, Traffic(OUTPUT_TOKENS), options.rounds)
        chosen = [sum(seconds) for seconds in zip(*(one.seconds_by_length for one in row.rounds[AUTO]), strict=True)]
        yield {
            "accepted": kind,
            "concurrency": concurrency,
            "tokens_per_second": {str(setting): round(speed, 1) for setting, speed in row.speeds.items()},
            "rounds": {
                str(setting): [(round(one.tokens_per_second, 1), round(one.drafted_length, 2)) for one in rounds]
                for setting, rounds in row.rounds.items()
            },
            "chosen": {
                str(length): round(seconds, 2)
                for length, seconds in zip(lengths_up_to(engines.k), chosen, strict=False)
            },
        }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape, choices=list(Shape), metavar="{1b,3b,8b}", default=Shape.b1)
    parser.add_argument("--family", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--steps", type=int, default=5, choices=range(1, 6), help="the most draft tokens")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--accepted", nargs="*", choices=ACCEPTED, default=list(ACCEPTED), help="none: changes only")
    parser.add_argument("--rounds", type=int, default=2, help="of each number of requests")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=(), help="what changes while it serves")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a phase, at least six")
    parser.add_argument("--trace", type=Path, help="write the engine's iterations here; see iteration_trace.py")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    parser.add_argument("--option", type=json.loads, default={}, help="further options of eagle_mrv2, as JSON")
    parser.add_argument("--together", nargs=2, metavar=("N", "FOLDER"), help="as in ab_time.py")
    options = parser.parse_args()
    if not options.accepted and not options.changes:
        parser.error("nothing to measure: name a kind after --accepted, or name what --changes")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    here = str(Path(__file__).resolve().parent)
    if options.trace:
        os.environ[iteration_trace.VARIABLE] = str(options.trace.resolve())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        subject = shape_subject(Path(folder), options.shape, options.family, random_prompts(USUAL_PROMPTS))
        del subject.arguments[FIXED_KV_CACHE]  # the only engine takes what its requests in flight need
        setup = Setup(
            subject=subject,
            options=options.option | {"draft_length": AUTO},
            acceptance=ACCEPTED["middle"],
            overrides={"worker_extension_cls": "changing_load.AcceptanceRates"} | options.engine,
            max_num_seqs=max([*options.concurrency, 256 if options.changes else 1]),
            verbose=True,
            worker=changing_load.__name__,
        )
        about = {"shape": options.shape.value, "method": options.family, "k": options.steps}
        try:
            with setup.engines(options.steps) as engines, turn(options.together):
                for line in lines(engines, options):
                    print(json.dumps({"vllm": engines.started.vllm_version} | about | line), flush=True)
        except CommandError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if options.together:
                arrive(options.together)
    return 0


if __name__ == "__main__":
    sys.exit(main())
