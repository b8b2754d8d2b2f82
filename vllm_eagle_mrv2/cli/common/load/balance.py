"""Corrects rounds of a closed loop for the prompts that they happened to prefill.

In the long run every request's prompt is prefilled once and its output generated once.  A round of some seconds begins
more requests than it ends, or fewer, and as prefills take up to half of the time, rounds with the same engine differ by
10 % and more.  What a prompt token takes shows in the round itself: iterations with prefills are longer than others.
So a round's time can be corrected to what its outputs take together with as many prompts as they call for.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from vllm_eagle_mrv2.cli.common.load.types import LoadRound

_Setting = TypeVar("_Setting")
_FEWEST = 20
"""Iterations that tell what a prompt token takes."""
_MOST = 0.5
"""A round's time is corrected by at most this share of it."""


@dataclass
class Served:
    """When a request was sent, its outputs, (time in seconds, new tokens), and whether these are all."""

    sent: float
    outputs: list[tuple[float, int]] = field(default_factory=list)
    ended: bool = False
    prompt_tokens: int = 0


class Seen(NamedTuple):
    """An iteration as its outputs show it."""

    at: float
    """When the first of its outputs came, in seconds."""
    prompt_tokens: int
    """Of the requests whose first output it gave."""


def iterations(served: Sequence[Served], begins: float, ends: float) -> list[Seen]:
    """The iterations whose outputs came in a time, in order: each gives one output of a request at most."""
    outputs = sorted(
        (at, place, 0 if number else one.prompt_tokens)
        for place, one in enumerate(served)
        for number, (at, _) in enumerate(one.outputs)
        if begins < at <= ends
    )
    found: list[Seen] = []
    places: set[int] = set()
    for at, place, prompt_tokens in outputs:
        if not found or place in places or served[place].sent > found[-1].at:
            found.append(Seen(at, 0))
            places.clear()
        places.add(place)
        found[-1] = found[-1]._replace(prompt_tokens=found[-1].prompt_tokens + prompt_tokens)
    return found


def seconds_per_prompt_token(seen: Sequence[Seen]) -> float:
    """By how much a prompt token lengthens the iteration that prefills it and its neighbours; 0 where that is unknown.

    With asynchronous scheduling the time of a prefill is not only in its own iteration.
    """
    import numpy as np  # vLLM brings it; without vLLM the commands still explain themselves

    if len(seen) < _FEWEST:
        return 0.0
    seconds = np.diff([one.at for one in seen])[1:-1]
    prompts = np.array([one.prompt_tokens for one in seen[1:]], float)
    around = np.stack([prompts[:-2], prompts[1:-1], prompts[2:]], axis=1)
    each, *_ = np.linalg.lstsq(around - around.mean(0), seconds - seconds.mean(), rcond=None)
    return max(float(each.sum()), 0.0)


def prompts_per_token(rounds: Sequence[LoadRound]) -> float:
    """The prompt tokens that each generated token calls for, by all rounds."""
    tokens = sum(one.num_tokens for one in rounds)
    return sum(one.prompt_tokens for one in rounds) / tokens if tokens else 0.0


def usual_seconds(rounds: Sequence[LoadRound]) -> float:
    """The seconds that a prompt token usually takes in the rounds of an engine."""
    return statistics.median(one.seconds_per_prompt_token for one in rounds)


def balanced(rounds: Sequence[LoadRound], called_for: float, seconds: float) -> list[LoadRound]:
    """The rounds with `owed_s`: the time of the prompts that a round lacks, or has too many of, for its outputs.

    Args:
        called_for: prompt tokens for each generated token.
        seconds: that a prompt token takes.
    """
    return [one.model_copy(update={"owed_s": _owed(one, called_for, seconds)}) for one in rounds]


def of_one_engine(rounds: Mapping[_Setting, Sequence[LoadRound]]) -> dict[_Setting, list[LoadRound]]:
    """The rounds of one engine by its setting, `balanced`."""
    every = list(itertools.chain.from_iterable(rounds.values()))
    called_for, seconds = prompts_per_token(every), usual_seconds(every)
    return {setting: balanced(those, called_for, seconds) for setting, those in rounds.items()}


def _owed(one: LoadRound, called_for: float, seconds: float) -> float:
    owed = seconds * (called_for * one.num_tokens - one.prompt_tokens)
    return max(-_MOST * one.seconds, min(owed, _MOST * one.seconds))
