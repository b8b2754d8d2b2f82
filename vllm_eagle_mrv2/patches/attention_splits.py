"""Batches whose attention FlashAttention splits, of an engine that captures larger batches than vLLM's own choice.

FlashAttention can divide the keys of a request among up to 32 thread blocks.  A FULL graph must provide for that, with
room for 32 partial results of each token and head, and a kernel that adds them up.  The metadata builders of vLLM so
provide for every batch of up to the largest captured size.  Batches with prefills need none of it: their attention runs
outside of the graphs, and they have blocks enough.
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
