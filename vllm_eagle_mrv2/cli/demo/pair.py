"""The packaged demo pair: a small trained target, an EAGLE and an EAGLE-3 head for it, and held-out prompts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from vllm_eagle_mrv2.cli.errors import CommandError

PAIR = Path(__file__).resolve().parents[2] / "demo_pair"


def load_prompts() -> list[str]:
    """Texts that the pair was not trained on.

    Raises:
        CommandError: the installed package lacks its demo pair.
    """
    try:
        prompts: list[str] = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"the packaged demo pair is missing ({error}); reinstall vllm-eagle-mrv2.", 2) from None
    return prompts


def require_vllm() -> None:
    """Raise `CommandError` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise CommandError("vLLM is not installed here: install a release that this package supports.", 2)
