"""The measurement of one live engine with each number of draft tokens, in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import monotonic

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.bench.engines import Engines, in_turn
from vllm_eagle_mrv2.cli.engine_process import EngineProcess
from vllm_eagle_mrv2.cli.errors import CommandError
from vllm_eagle_mrv2.cli.load.traffic import Traffic
from vllm_eagle_mrv2.cli.load.types import Level, LoadRound
from vllm_eagle_mrv2.cli.tune.types import AUTO, Setting, TuneRow
from vllm_eagle_mrv2.config.draft_lengths import lengths_up_to

SETTLES_S = 5.0
"""Seconds that the engine's own choice has to settle; it learns nothing while a number is held."""
_BRIEF = 4
"""By this much a round is shorter that has compiled what a number needs."""
_FEWEST = 2
"""Requests of a round."""


def measure(
    engines: Engines,
    concurrency: int,
    traffic: Traffic,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> TuneRow:
    """Measure a live engine with every setting, in turn, after a brief round of each that does not count.

    The engine is filled once; a setting takes over the requests in flight from the one before it.  Before the rounds
    that count, the engine's own choice has further ones until it has settled.

    Raises:
        CommandError: the engine failed, or drafts other numbers than those asked for.
    """
    (process,) = engines.processes
    settings: list[Setting] = [*lengths_up_to(engines.k), AUTO]
    asked = [functools.partial(_ask, process, setting) for setting in settings]
    level = Level(concurrency=concurrency)
    process.ask(traffic.load(level, seed=0))
    first, *loads = (traffic.load(level, seed, fills=False) for seed in range(1, rounds + 2))
    brief = first.model_copy(update={"requests": first.requests[: max(len(first.requests) // _BRIEF, _FEWEST)]})
    for setting, (answer,) in zip(settings, in_turn(asked, [brief]), strict=True):
        _check_held(setting, answer)
    settled = monotonic() + SETTLES_S
    while monotonic() < settled:
        _ask(process, AUTO, first)
    return TuneRow(concurrency=concurrency, rounds=dict(zip(settings, in_turn(asked, loads, on_round), strict=True)))


def _ask(process: EngineProcess, setting: Setting, load: BaseModel) -> LoadRound:
    held = load.model_copy(update={"draft_length": None if setting == AUTO else setting})
    return LoadRound.model_validate(process.ask(held))


def _check_held(setting: Setting, answer: LoadRound) -> None:
    """Raise `CommandError` unless the engine drafts as many tokens as it should, but for a few texts at their end."""
    if isinstance(setting, int) and round(answer.drafted_length) != setting:
        raise CommandError(
            f"the engine drafts {answer.drafted_length:.1f} tokens instead of {setting}: its engine core must run on "
            "this machine.",
            1,
        )
