#!/usr/bin/env python3
"""``vllm-eagle-mrv2 bench --shape`` for several releases on one GPU, as JSON lines for benchmarks/gpu_result.py.

    python3 benchmarks/ab_time.py --shape 1b --steps 3 --batch 1 --rounds 15

Prints one JSON object per batch size: the median milliseconds per iteration (verify and draft) of the stock method and
of eagle_mrv2, and the median and quartiles of the ratios stock / eagle_mrv2 of neighbouring rounds.  If the bench
refuses a ratio, its row is not printed and the exit status is 1.  ``--disable NAME`` compares eagle_mrv2 without a
behaviour, instead of the stock method, with eagle_mrv2.  ``--before FOLDER`` compares the version of this package that
is installed in a folder, instead of the stock method, with this one.  ``--setting TEXT`` records what is special about
a line.

Starting engines takes longer than measuring them.  Several comparisons (releases) can start together and then take
turns: ``--together N FOLDER`` waits until N of them have started, and measures one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_eagle_mrv2.cli.bench.measurement import WORKER, measure
from vllm_eagle_mrv2.cli.bench.types import Row
from vllm_eagle_mrv2.cli.common.engines import Comparison, Method
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.shapes import PROMPT_TOKENS, VOCABULARY, Shape, token_prompts
from vllm_eagle_mrv2.cli.common.subject import ahead_of_path, shape_subject
from vllm_eagle_mrv2.cli.common.types import Job
from vllm_eagle_mrv2.config.families import METHOD


@dataclass(frozen=True)
class Versions(Comparison):
    """A comparison with another version of this package, or with stock's speculator set up otherwise."""

    before: Path | None = None
    """Folder of the other version, whose ``eagle_mrv2`` is the one to compare with."""
    stock_speculative: dict[str, Any] = field(default_factory=dict)
    """What to add to the speculative configuration of the stock speculator."""

    @property
    def sides(self) -> tuple[tuple[str, Method], tuple[str, Method]]:
        """Name and method of the engine to compare against, and of ours."""
        if self.before is None:
            return super().sides
        (_, reduced), _ = replace(self, against_ours=True, before=None).sides
        return (f"{METHOD} of {self.before.name}", reduced), (METHOD, (self.ours, self.options))

    def jobs(self, k: int) -> dict[str, Job]:
        """The jobs of the engines, by their names."""
        return {name: self._with_stocks_own(job) for name, job in super().jobs(k).items()}

    def _with_stocks_own(self, job: Job) -> Job:
        if job.speculative_config is None or job.method == self.ours:
            return job
        return job.model_copy(update={"speculative_config": job.speculative_config | self.stock_speculative})

    def _environment(self, name: str, method: str | None) -> dict[str, str]:
        variables = super()._environment(name, method)
        if name != METHOD and self.before is not None:
            variables["PYTHONPATH"] = ahead_of_path(variables, str(self.before.resolve()))
        return variables


def line_of(row: Row, options: argparse.Namespace, version: str) -> dict[str, Any] | None:
    """A row in the format of benchmarks/results; None if its ratio is refused."""
    if row.quartiles is None:
        return None
    low, ratio, high = row.quartiles
    trimmed = options.draft_vocab and f"trimmed to {options.draft_vocab:,} tokens"
    special = {"setting": options.setting or trimmed, "without": options.disable}
    special["before"] = options.before and options.before.name
    return {
        "vllm": version,
        "shape": options.shape.value,
        "method": options.family,
        "k": row.k,
        "batch": row.batch,
        **{key: value for key, value in special.items() if value},
        "stock": round(row.figures("against").iteration_ms, 4),
        "eagle_mrv2": round(row.figures("eagle_mrv2").iteration_ms, 4),
        "ratio": round(ratio, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "rounds": len(row.eagle_mrv2),
    }


def draft_options(folder: Path, given: dict[str, Any], draft_vocab: int | None) -> dict[str, Any]:
    """Options of eagle_mrv2; random weights prefer no token, so any ranking will do."""
    if draft_vocab is None:
        return given
    ranking = folder / "ranking.json"
    ranking.write_text(json.dumps({"vocab_size": VOCABULARY, "tokens": list(range(draft_vocab))}), encoding="utf-8")
    return given | {"draft_vocab": {"size": draft_vocab, "ranking": str(ranking)}}


def arrive(together: tuple[str, str]) -> None:
    """Tell the other comparisons that this one has started or ended."""
    folder = Path(together[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"up-{os.getpid()}").touch()


@contextlib.contextmanager
def turn(together: tuple[str, str] | None) -> Iterator[None]:
    """Wait until all comparisons have started and no other one measures."""
    if together is None:
        yield
        return
    count, folder = int(together[0]), Path(together[1])
    arrive(together)
    while len(list(folder.glob("up-*"))) < count:
        time.sleep(0.5)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape, choices=list(Shape), metavar="{1b,3b,8b}", default=Shape.b1)
    parser.add_argument("--family", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--steps", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--engine", type=json.loads, default={}, help="further LLM(...) arguments, as JSON")
    parser.add_argument("--option", type=json.loads, default={}, help="options of eagle_mrv2, as JSON")
    parser.add_argument("--stock", type=json.loads, default={}, help="for stock's speculative configuration, as JSON")
    parser.add_argument("--disable", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--draft-vocab", type=int, metavar="SIZE", help="ours drafts from so many tokens")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="``pip install --no-deps --target FOLDER``")
    parser.add_argument("--setting")
    parser.add_argument("--pair", type=int, help="which of several pairs of the same case")
    parser.add_argument("--together", nargs=2, metavar=("N", "FOLDER"))
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        most = max(options.batch)
        tokens = most * (PROMPT_TOKENS + options.tokens)
        subject = shape_subject(Path(folder), options.shape, options.family, token_prompts(most), tokens)
        comparison = Versions(
            subject=subject,
            worker=WORKER,
            against_ours=bool(options.disable),
            before=options.before,
            options=draft_options(Path(folder), options.option, options.draft_vocab),
            stock_speculative=options.stock,
            disable=options.disable,
            overrides=options.engine,
            verbose=True,
        )
        try:
            with comparison.engines(options.steps) as pair, turn(options.together):
                for batch in options.batch:
                    row = measure(pair, batch, options.rounds, options.tokens)
                    line = line_of(row, options, pair.started.vllm_version)
                    if line:
                        print(json.dumps(line), flush=True)
                        continue
                    status = 1
                    for reason in row.refusals:
                        print(f"K={row.k}, batch {batch}: no ratio; {reason}", file=sys.stderr)
        except CommandError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        finally:
            if options.together:
                arrive(options.together)
    return status


if __name__ == "__main__":
    sys.exit(main())
