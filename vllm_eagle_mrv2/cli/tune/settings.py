"""The measurement of one live engine with each number of draft tokens, in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common.engine_process import EngineProcess
from vllm_eagle_mrv2.cli.common.engines import Engines, in_turn
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.load.balance import of_one_engine
from vllm_eagle_mrv2.cli.common.load.traffic import SETTLES_S, Traffic
from vllm_eagle_mrv2.cli.common.load.types import Level, LoadRound
from vllm_eagle_mrv2.cli.tune.types import AUTO, Setting, TuneRow
from vllm_eagle_mrv2.config.draft_lengths import lengths_up_to

BEHIND = 0.9
"""A number of draft tokens that makes less than this share of the best in the first round is far behind."""


def measure(
    engines: Engines,
    concurrency: int,
    traffic: Traffic,
    rounds: int,
    on_round: Callable[[int], None] = lambda done: None,
) -> TuneRow:
    """Measure a live engine with every setting, in turn, once the engine's own choice has settled.

    The engine is filled once; a setting takes over the requests in flight from the one before it.  A number that is far
    behind in the first round has no more.

    Raises:
        CommandError: the engine failed, or drafts other numbers than those asked for.
    """
    (process,) = engines.processes.values()
    settings: list[Setting] = [*lengths_up_to(engines.k), AUTO]
    asked = {setting: functools.partial(_ask, process, setting) for setting in settings}
    level = Level(concurrency=concurrency)
    process.ask(traffic.load(level, seed=0))
    settling, *loads = (traffic.load(level, seed, fills=False) for seed in range(1, rounds + 2))
    settled = monotonic() + SETTLES_S  # it learns nothing while a number is held
    while monotonic() < settled:
        _ask(process, AUTO, settling)
    taken = dict(zip(settings, in_turn(list(asked.values()), loads[:1], on_round), strict=True))
    first = TuneRow(concurrency=concurrency, rounds=of_one_engine(taken))
    ahead = [one for one in settings if one == AUTO or first.speeds[one] >= BEHIND * first.speeds[first.best]]
    further = in_turn([asked[one] for one in ahead], loads[1:], lambda done: on_round(1 + done))
    for setting, more in zip(ahead, further, strict=True):
        taken[setting] += more
    _check_held(taken)
    return TuneRow(concurrency=concurrency, rounds=of_one_engine(taken))


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
