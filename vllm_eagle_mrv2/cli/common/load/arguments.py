"""The options that `bench-load` and `tune` have in common: what requests ask for, and how many drafts are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.shapes import Shape

ACCEPTANCE = (0.75, 0.55, 0.40, 0.30, 0.22, 0.16, 0.12)
"""Share of random drafts that are accepted up to each position."""

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
