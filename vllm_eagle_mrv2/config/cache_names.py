"""Keeps the compiled models of an engine apart from those of others in vLLM's caches."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.config.options import OPTIONS_KEY


def name_in_caches(config: Any) -> None:
    """Give vLLM's caches of compiled models an entry of their own for this engine.

    Without it the caches would not always tell this engine from one with the stock method, which lacks this package's
    operators, from one with another version of them, from one with another draft for the same target, or from one with
    other draft backends.
    """
    if isinstance(config.additional_config, dict):
        speculative = config.speculative_config
        backends = [str(getattr(speculative, f"{kind}_backend", None)) for kind in ("attention", "moe")]
        hashes = [speculative.draft_model_config.compute_hash(), *backends, __version__]
        draft = {f"{OPTIONS_KEY}_draft": ", ".join(hashes)}
        config.additional_config = {OPTIONS_KEY: {}, **config.additional_config, **draft}
