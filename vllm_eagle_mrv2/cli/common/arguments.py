"""The options that the measuring commands have in common."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.shapes import Shape
from vllm_eagle_mrv2.config.options import OPTIONS_KEY, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error

ACCEPTANCE = (0.75, 0.55, 0.40, 0.30, 0.22, 0.16, 0.12)
"""Share of random drafts that are accepted up to each position."""


class FamilyName(str, Enum):
    """Kind of the draft head."""

    eagle = "eagle"
    eagle3 = "eagle3"
    mtp = "mtp"


Model = Annotated[str | None, typer.Option(metavar="TARGET", help="Target model; without it the demo pair.")]
Draft = Annotated[str | None, typer.Option(metavar="HEAD", help="Its head; not for MTP inside the target.")]
HeadFamily = Annotated[FamilyName | None, typer.Option(help="Kind of head, instead of what its checkpoint says.")]
RandomShape = Annotated[Shape | None, typer.Option(help="Random weights in this shape, no checkpoint.")]
DraftTokens = Annotated[
    list[int], typer.Option("-k", "--num-speculative-tokens", min=1, help="Draft tokens an iteration: 3 5 7.")
]
MethodOptions = Annotated[str, typer.Option(metavar="JSON", help="Options of eagle_mrv2.")]
EngineArguments = Annotated[
    str, typer.Option(metavar="JSON", help="Further arguments for the engines, as for LLM(...).")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False, exists=True, help='A prompt a line, or JSON lines with "prompt"; no chat template is applied.'
    ),
]
StopAtEos = Annotated[bool, typer.Option("--stop-at-eos", help="End texts at their end of sequence.")]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="As in vLLM (default 4096; for the demo pair 512).")]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, help="gpu_memory_utilization of each engine (default: an equal share)."),
]
JsonOutput = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write all figures; - prints them instead.")
]
Plot = Annotated[Path | None, typer.Option(dir_okay=False, help="Draw them; needs matplotlib.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on stderr.")]

# Of requests under load:
PromptTokens = Annotated[tuple[int, int], typer.Option(help="Length of random prompts, from and to.")]
OutputTokens = Annotated[tuple[int, int], typer.Option(help="Tokens to generate, from and to.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 samples greedily.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1.0)]
Acceptance = Annotated[
    list[float] | None,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Have drafts accepted at random, this share up to each position: .7 .5 .4 (default: "
        "for --shape one that falls from .75, else the model's own).",
    ),
]


def check_outputs(json_output: str | None, plot: Path | None) -> None:
    """Raise `CommandError` if the results cannot be written where they are asked for."""
    for option, path in (("--json", json_output), ("--plot", plot)):
        if path is None or path == "-":
            continue
        file = Path(path).resolve()
        if not file.parent.is_dir():
            raise CommandError(f"{option} {path}: there is no such folder; make it first.", 2)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise CommandError(f"{option} {path}: this cannot be written; give a file that can.", 2)
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'vllm-eagle-mrv2[plot]'.", 2)
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix.removeprefix(".") not in formats:
        raise CommandError(f"--plot {plot}: give a name that ends in one of {', '.join(formats)}.", 2)


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option gives; `CommandError` if it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option} is not JSON ({error}): {text}", 2) from None
    if not isinstance(value, dict):
        raise CommandError(f"{option} must be a JSON object, such as '{{\"name\": 1}}', not {text}", 2)
    return value


def check_in_flight(option: str, most: int, overrides: Mapping[str, Any]) -> None:
    """Raise `CommandError` if so many requests at a time are more than ``--engine`` lets run."""
    limit = overrides.get("max_num_seqs", math.inf)
    if most > limit:
        raise CommandError(f"{option} {most} is more than max_num_seqs of --engine, {limit}.", 2)


def method_options(text: str, disable: list[str]) -> dict[str, Any]:
    """The options of ``eagle_mrv2`` in ``--option``; `CommandError` if it rejects them."""
    options = json_object("--option", text)
    if "disable" in options:
        raise CommandError("--option takes no disable: use --disable NAME of bench.", 2)
    try:
        parse_options({OPTIONS_KEY: options | {"disable": disable}})
    except EagleMRV2Error as error:
        raise CommandError(str(error), 2) from None
    return options


def shares_of(acceptance: Sequence[float] | None, shape: Shape | None, k: int) -> Sequence[float]:
    """The share of drafts to accept at random up to each position, at least ``k`` of them; none for the model's own.

    Raises:
        CommandError: there are too few shares, or one is larger than the one before it.
    """
    shares = acceptance or (ACCEPTANCE if shape is not None else ())
    if shares and len(shares) < k:
        raise CommandError(f"-k {k} needs --acceptance with as many shares, not {len(shares)}.", 2)
    if any(after > before for before, after in pairwise(shares)):
        raise CommandError("--acceptance: no share may be larger than the one before it.", 2)
    return shares


def check_range(option: str, fewest: int, most: int) -> None:
    """Raise `CommandError` if an option's two numbers are no range."""
    if not 1 <= fewest <= most:
        raise CommandError(f"{option} {fewest} {most}: give the smaller number first, and at least 1.", 2)
