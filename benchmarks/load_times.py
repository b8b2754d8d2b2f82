#!/usr/bin/env python3
"""``vllm-eagle-mrv2 bench-load --shape`` for several releases on one GPU, as JSON lines for benchmarks/gpu_result.py.

    python3 benchmarks/load_times.py --shape 8b --family eagle3 --steps 3 --concurrency 1 8 32 64
    python3 benchmarks/load_times.py --pair FOLDER --steps 5 --concurrency 1 8 --requests 16 96 --kinds all editing

Prints one JSON object per number of requests in flight: the figures of both engines, and the gain of eagle_mrv2 over
stock in tokens a second: over all rounds, and the lowest and highest of a round.  ``--control`` starts a second engine
with stock's method and adds how far it is from the first.  ``--setting TEXT`` records what is special about a line.
``--variant SETTING OPTIONS`` starts a further engine of eagle_mrv2, with these options too, and has lines of its own.
``--most N`` has engines of eagle_mrv2 choose up to N draft tokens, beside stock with ``--steps`` of them, or none.
``--head JSON`` adds fields to the head's configuration; ``logit_scale`` decides how sure random weights are of a draft.

``--pair`` measures SmolLM2 with its head, as ``python -m vllm_eagle_mrv2_smollm2 --out FOLDER`` makes them, on prompts
that the head was not trained on; answers end where the model ends them.  It needs ``PYTHONPATH=tools``.

Starting engines takes longer than measuring them: ``--together N FOLDER``, as in benchmarks/ab_time.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ab_time import Versions, arrive, turn
from draft_lengths import ACCEPTED

from vllm_eagle_mrv2.cli.bench_load.measurement import measure
from vllm_eagle_mrv2.cli.bench_load.types import LoadRow
from vllm_eagle_mrv2.cli.common.arguments import ACCEPTANCE
from vllm_eagle_mrv2.cli.common.engines import Method
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.load.traffic import USUAL_PROMPTS, WORKER, Traffic, random_prompts
from vllm_eagle_mrv2.cli.common.load.types import Level
from vllm_eagle_mrv2.cli.common.shapes import Shape
from vllm_eagle_mrv2.cli.common.subject import FIXED_KV_CACHE, Subject, shape_subject
from vllm_eagle_mrv2.cli.common.types import Job
from vllm_eagle_mrv2.config.families import METHOD

PAIR = "smollm2"
KINDS = ("chat", "code", "editing", "prose")
"""Of the pair's prompts, in alphabetical order."""
PROMPTS = 48
"""Of each kind, for the pair."""


def pair_subject(folder: Path) -> Subject:
    """SmolLM2 with its head, and prompts of all kinds in turn."""
    from smollm2_prompts import prompts
    from train_smollm2_head import chat_prompt
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    of_kinds = [spread(texts, PROMPTS) for _, texts in sorted(prompts(held_out=True).items())]
    ids = [chat_prompt(tokenizer, text) for texts in zip(*of_kinds, strict=True) for text in texts]
    arguments = {"max_model_len": 2048, FIXED_KV_CACHE: 2 * 2**30}
    return Subject(PAIR, str(folder / "target"), str(folder / "eagle3"), "eagle3", ids, arguments, offline=True)


def configure_head(subject: Subject, fields: dict[str, Any]) -> None:
    """Put further fields into the configuration of a head with random weights."""
    assert subject.draft is not None
    file = Path(subject.draft) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def spread(texts: list[str], count: int) -> list[str]:
    """So many of the texts, from all over."""
    return [texts[number * len(texts) // count] for number in range(count)]


def places_of(kind: str, subject: Subject) -> range:
    """Where the prompts of a kind are among those of the subject, or all of them."""
    count = len(subject.prompts)
    return range(count) if kind == "all" else range(KINDS.index(kind), count, len(KINDS))


@dataclass(frozen=True)
class Variants(Versions):
    """A comparison with several engines of eagle_mrv2."""

    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> options beside those of all."""
    most: int | None = None
    """``num_speculative_tokens`` of eagle_mrv2, where it is not that of stock."""

    @property
    def methods(self) -> dict[str, Method]:
        """The methods of the engines, by their names."""
        further: dict[str, Method] = {name: (self.ours, self.options | more) for name, more in self.variants.items()}
        return {**super().methods, **further}

    def jobs(self, k: int) -> dict[str, Job]:
        """The jobs of the engines, by their names."""
        most = self.most or k
        jobs = super().jobs(most)
        if k != most:
            none = jobs["stock"].model_copy(update={"speculative_config": None})
            jobs["stock"] = super().jobs(k)["stock"] if k else none
        return jobs


def lines_of(row: LoadRow, kind: str, options: argparse.Namespace, version: str) -> Iterator[dict[str, Any]]:
    """A row in the format of benchmarks/results: a line for each engine of eagle_mrv2."""
    ours = row.names.index(METHOD)
    for place, setting in ((ours, options.setting), *enumerate(row.names[ours + 1 :], ours + 1)):
        shown = {**{name: other for other, name in enumerate(row.names[:ours])}, METHOD: place}
        yield {
            "vllm": version,
            "shape": PAIR if options.pair else options.shape.value,
            "method": options.family,
            "k": row.k,
            "concurrency": row.level.concurrency,
            **setting_of(setting, kind, options),
            "gain": [round(one, 4) for one in row.gain(place)],
            **({} if row.noise is None else {"control": [round(one, 4) for one in row.gain(1)]}),
            "figures": {
                name: {metric: round(value, 3) for metric, value in row.figures(engine).items()}
                for name, engine in shown.items()
            },
            "tokens_per_second": {
                name: [round(one.tokens_per_second, 1) for one in row.rounds[engine]] for name, engine in shown.items()
            },
        }


def setting_of(name: str | None, kind: str, options: argparse.Namespace) -> dict[str, str]:
    """What is special about a line, if anything is."""
    sampled = options.temperature and f"temperature {options.temperature:g}, top_p {options.top_p:g}"
    accepted = options.accepted and f"{options.accepted} acceptance"
    chosen = options.most and f"auto up to K={options.most}"
    setting = ", ".join(filter(None, [kind if kind != "all" else None, accepted, name, chosen, sampled]))
    return {"setting": setting} if setting else {}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape, choices=list(Shape), metavar="{1b,3b,8b}", default=Shape.b1)
    parser.add_argument("--pair", type=Path, metavar="FOLDER", help="SmolLM2 and its head, in place of a shape")
    parser.add_argument("--kinds", nargs="+", default=["all"], choices=("all", *KINDS), help="of the pair's prompts")
    parser.add_argument("--family", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--steps", type=int, default=3, help="num_speculative_tokens; 0: stock without speculation")
    parser.add_argument(
        "--most", type=int, help="num_speculative_tokens of eagle_mrv2, which chooses how many it drafts"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[None], help="a round, at each concurrency or at all"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--accepted", choices=ACCEPTED, help="how many drafts; default: 2.7 tokens an iteration")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engines, as JSON")
    parser.add_argument("--option", type=json.loads, default={}, help="options of eagle_mrv2, as JSON")
    parser.add_argument(
        "--head", type=json.loads, default={}, help="further fields of the head's configuration, as JSON"
    )
    parser.add_argument("--stock", type=json.loads, default={}, help="for stock's speculative configuration, as JSON")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="``pip install --no-deps --target FOLDER``")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--baseline", action="store_true", help="an engine without speculation, too")
    parser.add_argument("--setting")
    parser.add_argument("--variant", nargs=2, action="append", default=[], metavar=("SETTING", "OPTIONS"))
    parser.add_argument("--together", nargs=2, metavar=("N", "FOLDER"))
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if options.pair:
        options.family = "eagle3"
    if options.most:
        options.option["draft_length"] = "auto"
    elif not options.steps:
        parser.error("--steps 0 takes --most")
    if options.pair and options.head:
        parser.error("--pair has a head of its own, and excludes --head")
    if options.most and (options.control or options.before):
        parser.error("--most excludes --control and --before")
    requests = options.requests if len(options.requests) > 1 else options.requests * len(options.concurrency)
    if len(requests) != len(options.concurrency):
        parser.error("--requests takes one number, or one for each of --concurrency")
    levels = list(zip(options.concurrency, requests, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        if options.pair:
            subject = pair_subject(options.pair)
        else:
            tokens = max(options.concurrency) * Traffic().tokens_of_a_request(USUAL_PROMPTS)
            prompts = random_prompts(USUAL_PROMPTS)
            subject = shape_subject(Path(folder), options.shape, options.family, prompts, tokens)
            configure_head(subject, options.head)
        comparison = Variants(
            subject=subject,
            before=options.before,
            options=options.option,
            stock_speculative=options.stock,
            acceptance=() if options.pair else ACCEPTED.get(options.accepted, ACCEPTANCE),
            ignore_eos=not options.pair,
            overrides=options.engine,
            max_num_seqs=max(options.concurrency),
            verbose=True,
            control=options.control,
            baseline=options.baseline,
            worker=WORKER,
            variants={name: json.loads(more) for name, more in options.variant},
            most=options.most,
        )
        try:
            with comparison.engines(options.steps) as engines, turn(options.together):
                for kind, (concurrency, requests) in product(options.kinds, levels):
                    traffic = Traffic(
                        temperature=options.temperature,
                        top_p=options.top_p,
                        requests=requests,
                        prompts=places_of(kind, comparison.subject),
                    )
                    row = measure(engines, Level(concurrency=concurrency), traffic, options.rounds)
                    for line in lines_of(row, kind, options, engines.started.vllm_version):
                        print(json.dumps(line), flush=True)
        except CommandError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            if options.together:
                arrive(options.together)
    return 0


if __name__ == "__main__":
    sys.exit(main())
