"""Which numbers of draft tokens an engine chooses from at run time (``draft_length: auto``)."""

from __future__ import annotations

from typing import Any

from vllm_eagle_mrv2.config.method import settings_of

LENGTHS = (0, 1, 2, 3, 5, 7)
"""Each of them has CUDA graphs of its own, so there are few; the maximum is always one of them."""


def lengths_to_choose_from(vllm_config: Any) -> tuple[int, ...]:
    """Return the numbers of draft tokens to choose from, ascending; none if the number is not chosen at run time."""
    if not asks_for_choice(vllm_config) or why_not_chosen(vllm_config) is not None:
        return ()
    return lengths_up_to(vllm_config.speculative_config.num_speculative_tokens)


def lengths_up_to(most: int) -> tuple[int, ...]:
    """Return the numbers of draft tokens that an engine with a maximum chooses from, ascending."""
    return (*(length for length in LENGTHS if length < most), most)


def asks_for_choice(vllm_config: Any) -> bool:
    """Whether the engine's options ask for ``draft_length: auto``."""
    settings = settings_of(vllm_config.speculative_config)
    return settings is not None and settings.options.draft_length == "auto"


def why_not_chosen(vllm_config: Any) -> str | None:
    """Return what keeps the number of draft tokens from being chosen at run time, with the remedy; None if nothing."""
    draft = vllm_config.speculative_config
    if getattr(draft, "num_speculative_tokens_per_batch_size", None):
        return "num_speculative_tokens_per_batch_size is given and decides; leave it out"
    if getattr(draft, "enable_adaptive_verification", False):
        return "enable_adaptive_verification chooses how many drafts are verified; leave it out"
    parallel, target = vllm_config.parallel_config, vllm_config.model_config
    # Without experts each rank is an engine of its own, and its core says so: it sets the size to 1.
    if parallel.data_parallel_size > 1 and target.is_moe:
        return "data-parallel ranks of one model wait for each other in every pass; use draft_length: constant"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline stages work on several batches at a time; use draft_length: constant"
    if parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        return "with external_launcher each rank would choose a number of its own; use draft_length: constant"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "ranks split the tokens of a prefill (prefill_context_parallel_size); use draft_length: constant"
    if vllm_config.kv_transfer_config is not None:
        return "blocks are kept for one number where a KV connector fills them; use draft_length: constant"
    if target.is_hybrid:
        # Below 0.32 gated delta nets lose their state where no drafts are verified; Mamba's graphs take K + 1 tokens.
        return "recurrent layers of the target need one number in all batches; use draft_length: constant"
    return None
