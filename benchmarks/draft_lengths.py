#!/usr/bin/env python3
"""``draft_length: auto`` beside each number of draft tokens that it chooses from, under load, as JSON lines.

    python3 benchmarks/draft_lengths.py --shape 8b --family eagle3 --acceptance middle --concurrency 1 16 64 256

One engine of ``eagle_mrv2`` serves all of it: its number of draft tokens is held for a round, or left to the choice.
The rounds of the settings alternate, with the same requests.  Drafts are accepted at random, by vLLM's synthetic
rejection sampling.  Prints an object for each number of requests in flight, with tokens a second by setting and round,
and how often each number of draft tokens was chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_eagle_mrv2.cli.bench.engines import Comparison, shape_subject
from vllm_eagle_mrv2.cli.bench.shapes import Shape
from vllm_eagle_mrv2.cli.engine_process import environment
from vllm_eagle_mrv2.cli.load.traffic import Traffic, random_prompts
from vllm_eagle_mrv2.cli.load.types import Level
from vllm_eagle_mrv2.config.draft_lengths import LENGTHS
from vllm_eagle_mrv2.config.method import METHOD

ACCEPTANCE = {
    "high": (0.85, 0.75, 0.65, 0.55, 0.45),
    "middle": (0.70, 0.50, 0.35, 0.25, 0.17),
    "low": (0.45, 0.20, 0.08, 0.03, 0.01),
}
AUTO = "auto"


def hold(worker: Any, length: int | None) -> dict[int, int]:
    """Hold the number of draft tokens, or leave it to the choice; return how often each was chosen since.

    Runs in the process of the engine core, which is the worker's too.
    """
    from collections import Counter

    from vllm_eagle_mrv2.draft_length.chooser import DraftLength

    owner: Any = DraftLength
    if not hasattr(owner, "free"):
        owner.free, owner.seen, owner.held = (owner.choose, owner.learn), Counter(), None

        def choose(self: Any, requests: int) -> int:
            if owner.held is None:
                owner.free[0](self, requests)
            else:
                self.length = owner.held
            owner.seen[self.length] += 1
            return int(self.length)

        def learn(self: Any, *iteration: Any) -> None:
            if owner.held is None:
                owner.free[1](self, *iteration)

        owner.choose, owner.learn = choose, learn
    owner.held, seen = length, dict(owner.seen)
    owner.seen.clear()
    return seen


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape, choices=list(Shape), metavar="{1b,3b,8b}", default=Shape.b1)
    parser.add_argument("--family", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--steps", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--acceptance", choices=list(ACCEPTANCE), default="middle")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests-each", type=float, default=4, help="requests a round for each in flight")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engine, as JSON")
    options = parser.parse_args()
    os.environ |= environment(METHOD, VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `hold`
    with tempfile.TemporaryDirectory() as folder:
        subject = shape_subject(Path(folder), options.shape, options.family, random_prompts((128, 1024)))
        os.environ |= subject.environment(os.environ)
        sys.path[:0] = subject.plugins.values()
        comparison = Comparison(
            subject=subject,
            acceptance=ACCEPTANCE[options.acceptance],
            overrides=options.engine,
            max_num_seqs=max(options.concurrency),
        )
        return measure(comparison, options)


def measure(comparison: Comparison, options: argparse.Namespace) -> int:
    """Measure every number of requests in flight with every setting."""
    import vllm

    from vllm_eagle_mrv2.cli.load.worker import LoadEngine

    engine = LoadEngine(comparison.job(options.steps, f"{METHOD}:{options.family}", {"draft_length": "auto"}))
    lengths = [length for length in LENGTHS if length < options.steps] + [options.steps]

    def held(length: int | None) -> dict[int, int]:
        found: list[dict[int, int]] = engine._loop.run_until_complete(
            engine._engine.collective_rpc(hold, args=(length,))
        )
        return found[0]

    for concurrency in options.concurrency:
        level = Level(concurrency=concurrency)
        traffic = Traffic(requests=max(12, round(options.requests_each * concurrency)))
        speeds: dict[str, list[float]] = {str(one): [] for one in (AUTO, *lengths)}
        for warm_up in (*lengths, None):
            held(warm_up)
            engine.measure(traffic.load(level, 0))
        chosen: dict[int, int] = {}
        order: list[int | None] = [None, *lengths]
        for number in range(1, options.rounds + 1):
            order.reverse()
            for length in order:
                held(length)
                found = engine.measure(traffic.load(level, number))
                speeds[AUTO if length is None else str(length)].append(round(found.tokens_per_second, 1))
                if length is None:
                    chosen = held(None)
        medians = {setting: statistics.median(rounds) for setting, rounds in speeds.items()}
        best = max(map(str, lengths), key=lambda setting: medians[setting])
        line = {
            "vllm": vllm.__version__,
            "shape": options.shape.value,
            "method": options.family,
            "k": options.steps,
            "acceptance": options.acceptance,
            "concurrency": concurrency,
            "best": int(best),
            "of_best": round(medians[AUTO] / medians[best], 4),
            "of_none": round(medians[AUTO] / medians["0"], 4),
            "tokens_per_second": speeds,
            "chosen": chosen,
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
