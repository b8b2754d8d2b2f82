"""The requests that make a level of load."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_eagle_mrv2.cli.common.load.types import Level, Load, Request
from vllm_eagle_mrv2.cli.common.shapes import VOCABULARY

WORKER = "vllm_eagle_mrv2.cli.common.load.worker"
"""The module that the process of an engine under load runs."""
_FEWEST, _MORE = 6, 48  # with one request in flight, and beyond those in flight: a round of an 8B model takes seconds
_FEWEST_AT_A_RATE, _SECONDS_OF_A_RATE = 12, 30
_FEWEST_TO_MEASURE = 3  # at a rate: one before, one whose end is measured, one that ends the round when it is sent
_SPECIAL_TOKENS = 10
_PROMPTS = 256
_PLACES = 1 << 16  # among which a round begins: more than prompts, which are taken again from the first one on
SETTLES_S = 5.0
"""Seconds that an engine's own choice of the number of draft tokens has to settle."""
USUAL_PROMPTS = (128, 1024)
"""Fewest and most tokens of a random prompt, unless the user says otherwise."""


@dataclass(frozen=True)
class Traffic:
    """What requests ask for."""

    output_tokens: tuple[int, int] = (64, 256)
    """Fewest and most tokens to generate; each request draws its number."""
    temperature: float = 0.0
    top_p: float = 1.0
    requests: int | None = None
    """Requests a round that count; None for as many as the level needs (`requests_of`)."""
    prompts: Sequence[int] = ()
    """Places among the subject's prompts of those that take turns; none for all of them."""

    def tokens_of_a_request(self, prompt_tokens: tuple[int, int]) -> int:
        """The tokens of an average request at its end, given the fewest and the most of a prompt."""
        return round(sum(prompt_tokens) / 2 + sum(self.output_tokens) / 2)

    def requests_of(self, level: Level) -> int:
        """How many requests of a round of a level count."""
        if level.rate is not None:
            usual = max(_FEWEST_AT_A_RATE, round(level.rate * _SECONDS_OF_A_RATE))
            return max(self.requests or usual, _FEWEST_TO_MEASURE)
        many = level.concurrency or 1
        return self.requests or max(_FEWEST, min(4 * many, many + _MORE))

    def _place(self, turn: int) -> int:
        return self.prompts[turn % len(self.prompts)] if self.prompts else turn

    def load(self, level: Level, seed: int, *, fills: bool = True) -> Load:
        """A round of a level, always the same for a seed; in an open loop requests arrive as a Poisson process.

        Those that fill an engine end one after the other, as if they had begun one after the other.
        """
        draw, arrives, requests = random.Random(seed), 0.0, []
        first = draw.randrange(_PLACES)
        fill = level.concurrency + 1 if fills and level.concurrency is not None else 0
        for number in range(fill + self.requests_of(level)):
            output_tokens = draw.randint(*self.output_tokens)
            share = (number + 1) / fill if number < fill else 1.0
            requests.append(
                Request(
                    prompt=self._place(first + number),
                    max_tokens=math.ceil(share * output_tokens),
                    seed=draw.randrange(1, 2**31),
                    arrives=arrives,
                )
            )
            arrives += draw.expovariate(level.rate or 1.0)
        return Load(
            requests=requests,
            concurrency=level.concurrency,
            temperature=self.temperature,
            top_p=self.top_p,
            fills=fills,
        )


def random_prompts(tokens: tuple[int, int]) -> list[list[int]]:
    """Prompts of random token ids, for models with random weights.

    Args:
        tokens: fewest and most tokens of a prompt.
    """
    draw = random.Random(0)
    return [
        [draw.randrange(_SPECIAL_TOKENS, VOCABULARY) for _ in range(draw.randint(*tokens))] for _ in range(_PROMPTS)
    ]
