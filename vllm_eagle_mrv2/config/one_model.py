"""A speculators checkpoint given as the only model, which names its own target.

vLLM takes such a checkpoint apart while it makes its configuration, too late for us and, below 0.24, without a look at
the user's speculative configuration.  Taken apart beforehand, by vLLM's own function, it is an ordinary pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.errors import EagleMRV2Error


def split(engine_args: Any, asked: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """The speculative configuration with the checkpoint as draft, where it is one of these.

    Args:
        engine_args: vLLM's ``EngineArgs``; its target becomes the one that the checkpoint names.
        asked: the user's speculative configuration; ``num_speculative_tokens`` of the checkpoint fills a gap.
        reader: how configurations are read.

    Raises:
        EagleMRV2Error: vLLM cannot take the checkpoint apart, or another draft is given as well.
    """
    checkpoint = engine_args.model
    try:
        if "speculators_config" not in reader.config(checkpoint, engine_args.revision):
            return dict(asked)
    except EagleMRV2Error:  # vLLM will say it of the target, or reads the target otherwise
        return dict(asked)
    if asked.get("model") not in (None, "", checkpoint):
        raise EagleMRV2Error(
            f"{checkpoint} is a draft that names its own target, and {asked['model']} is given as the draft; give the "
            "target as the model, or leave model out of the speculative configuration."
        )
    from vllm.transformers_utils.config import maybe_override_with_speculators

    try:
        target, tokenizer, found = maybe_override_with_speculators(
            model=checkpoint,
            tokenizer=engine_args.tokenizer,
            trust_remote_code=reader.trust_remote_code,
            revision=engine_args.revision,
            hf_token=reader.hf_token,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise EagleMRV2Error(
            f"vLLM cannot take target and draft from {checkpoint} ({str(error).rstrip('.')}); give the target as the "
            f"model, and {checkpoint} as model of the speculative configuration."
        ) from error
    engine_args.model, engine_args.tokenizer = target, tokenizer
    tokens = found.get("num_speculative_tokens") if found else None
    filled = {} if tokens is None else {"num_speculative_tokens": tokens}
    return {**filled, **{key: value for key, value in asked.items() if value is not None}, "model": checkpoint}
