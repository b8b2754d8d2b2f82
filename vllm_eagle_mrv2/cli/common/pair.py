"""What the demo runs: a target, heads for it, and held-out prompts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path

from vllm_eagle_mrv2.cli.common.errors import CommandError

PAIR = Path(__file__).resolve().parents[2] / "demo_pair"
"""The packaged pair: a small trained target, an EAGLE and an EAGLE-3 head for it."""
_SMOLLM2 = "vllm_eagle_mrv2_smollm2"


class PairName(str, Enum):
    """Which pair the demo runs."""

    packaged = "packaged"
    smollm2 = "smollm2"


@dataclass(frozen=True)
class Pair:
    """A target and its heads.

    Args:
        target: folder of the target.
        heads: family -> folder of its head.
        prompts: texts that the heads were not trained on.
        chat: whether these are requests, for the target's chat template.
        num_speculative_tokens: K, by default.
    """

    target: Path
    heads: Mapping[str, Path]
    prompts: list[str]
    chat: bool
    num_speculative_tokens: int


def load_pair(name: PairName) -> Pair:
    """A pair; SmolLM2 is made in the user's cache first, if it is not there.

    Raises:
        CommandError: it is not installed, or cannot be made.
    """
    if name is PairName.packaged:
        heads = {family: PAIR / family for family in ("eagle", "eagle3")}
        return Pair(PAIR / "target", heads, load_prompts(), chat=False, num_speculative_tokens=3)
    if importlib.util.find_spec(_SMOLLM2) is None:
        raise CommandError(
            "--pair smollm2 needs the distribution vllm-eagle-mrv2-smollm2, which is not installed: "
            "pip install pairs/smollm2 in a checkout of this project.",
            2,
        )
    from vllm_eagle_mrv2_smollm2 import PairError, prepare

    try:
        made = prepare()
    except PairError as error:
        raise CommandError(str(error), 2) from None
    prompts = alternating(made.prompts)
    return Pair(made.target, {"eagle3": made.head}, prompts, chat=True, num_speculative_tokens=5)


def alternating(prompts: Mapping[str, list[str]]) -> list[str]:
    """The prompts of all kinds: the first of each, then the second of each."""
    return list(chain.from_iterable(zip(*prompts.values(), strict=True)))


def load_prompts() -> list[str]:
    """Texts that the packaged pair was not trained on.

    Raises:
        CommandError: the installed package lacks its demo pair.
    """
    try:
        prompts: list[str] = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"the packaged demo pair is missing ({error}); reinstall vllm-eagle-mrv2.", 2) from None
    return prompts
