"""Detects batches in which no request can use drafts: each is in a prefill chunk, or ends with its first token.

From 0.33 on the scheduler tells the runner (#48244); the runner's own request states allow it on every release.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def keep_longest_lengths(req_states: Any, sampler: Any) -> None:
    """Add ``max_seq_len``, the final length of each request, to the runner's states, as 0.23 and later have it."""
    if sampler is None or hasattr(req_states, "max_seq_len"):
        return
    longest = req_states.max_seq_len = np.zeros(req_states.max_num_reqs, dtype=np.int32)
    original = sampler.add_request

    def add_request(req_idx: int, prompt_len: int, sampling_params: Any) -> Any:
        longest[req_idx] = prompt_len + sampling_params.max_tokens
        return original(req_idx, prompt_len, sampling_params)

    sampler.add_request = add_request


def drafts_unused(input_batch: Any, req_states: Any) -> bool:
    """Whether the drafts of a batch that verifies no drafts are certain to go unused.

    The scheduler drops the drafts of every prefill chunk but the last.  The last chunk yields a token, and the request
    ends if that token reaches ``max_tokens``.
    """
    live = input_batch.num_reqs
    rows = input_batch.idx_mapping_np[:live]
    prefill_lens = req_states.prefill_len.np[rows]
    chunk = input_batch.seq_lens_cpu_upper_bound[:live].numpy() < prefill_lens
    return bool((chunk | (prefill_lens + 1 >= req_states.max_seq_len[rows])).all())
