"""The sizes of batches that have CUDA graphs.

vLLM chooses sizes of up to 512 tokens, enough for decodes.  Larger batches, those with prefills for the most part, are
then launched kernel by kernel, and the GPU waits for the host.  An engine with ``eagle_mrv2`` captures these, too,
unless the user says which sizes are captured.
"""

from __future__ import annotations

_MOST, _APART = 2048, 16  # a batch of more tokens keeps the GPU busy by itself


def largest(max_num_batched_tokens: int) -> int:
    """Tokens of the largest batch that a graph makes faster."""
    return min(_MOST, max_num_batched_tokens) // _APART * _APART


def beyond(captured: int, max_num_batched_tokens: int) -> range:
    """Sizes to capture beyond a captured size, up to the largest that pays; all in tokens."""
    return range(captured // _APART * _APART + _APART, largest(max_num_batched_tokens) + 1, _APART)
