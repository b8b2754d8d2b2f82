"""The measurement of one live engine with each number of draft tokens, in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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


def measure(
    engines: Engines,
    concurrency: int,
    traffic: Traffic,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> TuneRow:
    """Measure a live engine with every setting, in turn, once the engine's own choice has settled.

    The engine is filled once; a setting takes over the requests in flight from the one before it.

    Raises:
        CommandError: the engine failed, or drafts other numbers than those asked for.
    """
    (process,) = engines.processes
    settings: list[Setting] = [*lengths_up_to(engines.k), AUTO]
    asked = [functools.partial(_ask, process, setting) for setting in settings]
    level = Level(concurrency=concurrency)
    process.ask(traffic.load(level, seed=0))
    first, *loads = (traffic.load(level, seed, fills=False) for seed in range(1, rounds + 2))
    settled = monotonic() + SETTLES_S
    while monotonic() < settled:
        _ask(process, AUTO, first)
    taken = dict(zip(settings, in_turn(asked, loads, on_round), strict=True))
    _check_held(taken)
    return TuneRow(concurrency=concurrency, rounds=taken)


def _ask(process: EngineProcess, setting: Setting, load: BaseModel) -> LoadRound:
    held = load.model_copy(update={"draft_length": None if setting == AUTO else setting})
    return LoadRound.model_validate(process.ask(held))


def _check_held(taken: Mapping[Setting, Sequence[LoadRound]]) -> None:
    """Raise `CommandError` unless the engine drafted what it should, but for a few texts at their end."""
    for setting, rounds in taken.items():
        drafted = sum(one.seconds * one.drafted_length for one in rounds) / (sum(one.seconds for one in rounds) or 1.0)
        if isinstance(setting, int) and round(drafted) != setting:
            raise CommandError(
                f"the engine drafts {drafted:.1f} tokens instead of {setting}: its engine core must run on this "
                "machine.",
                1,
            )
