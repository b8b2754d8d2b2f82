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


def measure(
    engines: Engines,
    concurrency: int,
    traffic: Traffic,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> TuneRow:
    """Measure a live engine with every setting, in turn, once the engine's own choice has settled.

    In every round the engine is filled anew.  So all settings begin with the same requests in flight, at the same
    tokens of them, and serve the same ones.

    Raises:
        CommandError: the engine failed, or drafts other numbers than those asked for.
    """
    (process,) = engines.processes
    settings: list[Setting] = [*lengths_up_to(engines.k), AUTO]
    asked = [functools.partial(_ask, process, setting) for setting in settings]
    first, *loads = (traffic.load(Level(concurrency=concurrency), seed) for seed in range(rounds + 1))
    settled = monotonic() + SETTLES_S
    while monotonic() < settled:
        _ask(process, AUTO, first)
    return TuneRow(concurrency=concurrency, rounds=dict(zip(settings, in_turn(asked, loads, on_round), strict=True)))


def _ask(process: EngineProcess, setting: Setting, load: BaseModel) -> LoadRound:
    held = load.model_copy(update={"draft_length": None if setting == AUTO else setting})
    answer = LoadRound.model_validate(process.ask(held))
    if isinstance(setting, int) and round(answer.drafted_length) != setting:  # a few texts have fewer at their end
        raise CommandError(
            f"the engine drafts {answer.drafted_length:.1f} tokens instead of {setting}: its engine core must run on "
            "this machine.",
            1,
        )
    return answer
