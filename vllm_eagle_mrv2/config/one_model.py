"""Splits a speculators checkpoint that is given as the only model and names its own target.

vLLM splits such a checkpoint while it makes its configuration.  This is too late for ``eagle_mrv2`` and, below 0.24,
ignores the user's speculative configuration.  Splitting it beforehand with vLLM's own function gives an ordinary pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_eagle_mrv2.config.checkpoints import Reader, is_stored
from vllm_eagle_mrv2.errors import EagleMRV2Error


def split(engine_args: Any, asked: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """The speculative configuration with the checkpoint as draft, if the model is a speculators checkpoint.

    Args:
        engine_args: vLLM's ``EngineArgs``; its model becomes the target that the checkpoint names.
        asked: the user's speculative configuration; ``num_speculative_tokens`` defaults to the checkpoint's.
        reader: reads configurations with the options that vLLM was given.

    Raises:
        EagleMRV2Error: vLLM cannot split the checkpoint, or another draft is given as well.
    """
    checkpoint = engine_args.model
    if Path(checkpoint).is_file() or is_stored(checkpoint):  # GGUF, or read later
        return dict(asked)
    try:
        if "speculators_config" not in reader.config(checkpoint, engine_args.revision):
            return dict(asked)
    except EagleMRV2Error:  # vLLM reports it for the target, or reads the target in another way
        return dict(asked)
    if not _is_same(asked.get("model"), asked.get("revision"), checkpoint):
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


def _is_same(draft: str | None, revision: str | None, checkpoint: str) -> bool:
    """Whether the draft is not given, or is the checkpoint, whose name vLLM replaces by its folder when offline."""
    if not draft or draft == checkpoint:
        return True
    from huggingface_hub import snapshot_download  # vLLM's; the commands that need no vLLM import this module

    try:
        return snapshot_download(draft, revision=revision, local_files_only=True) == checkpoint
    except (OSError, ValueError):  # it is no name, or is not there
        return False
