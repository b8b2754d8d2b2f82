"""Batches whose attention FlashAttention splits, of an engine that captures larger batches than vLLM's own choice.

FlashAttention divides the keys of a request into parts, for thread blocks of their own.  A FULL graph must provide for
up to 32, with room for as many partial results of each token and head.  vLLM's metadata builders do so for every batch
of up to the largest captured size.  The attention of batches with prefills runs outside of the graphs, however, where
FlashAttention itself decides how many parts it needs.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm_eagle_mrv2.config.method import settings_of


def split_decodes_alone(runner: Any) -> None:
    """Have FlashAttention split what it splits with vLLM's own sizes and, beyond these, batches of decodes alone.

    Args:
        runner: with its graph manager, its speculator, and the metadata builders of both.
    """
    settings = settings_of(runner.speculator)
    if settings is None or not settings.vllm_largest:
        return
    mode = runner.cudagraph_manager.cudagraph_mode
    if mode.mixed_mode() == type(mode).FULL:
        return
    for group in chain.from_iterable([*runner.attn_groups, *runner.speculator.attn_groups]):
        for builder in group.metadata_builders:
            if getattr(builder, "max_cudagraph_size", None):  # FlashAttention's
                _bound(builder, settings.vllm_largest, decode_query_len=1 + runner.speculator.num_speculative_steps)


def _bound(builder: Any, vllm_largest: int, decode_query_len: int) -> None:
    build, captured = builder.build, builder.max_cudagraph_size

    def bounded_build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        decodes = common_attn_metadata.max_query_len <= decode_query_len
        builder.max_cudagraph_size = captured if decodes else vllm_largest
        return build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    builder.build = bounded_build
