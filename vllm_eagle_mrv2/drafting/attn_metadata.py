"""Lengths that the draft's attention metadata is built for."""

from __future__ import annotations

import torch


def draft_max_seq_len(
    seq_lens_cpu_upper_bound: torch.Tensor, num_reqs: int, num_draft_tokens: int, max_model_len: int
) -> int:
    """The longest sequence that the draft of this batch can meet (#43991).

    Bounding attention by ``max_model_len`` instead makes some kernels walk block tables past their valid entries and
    others split their work for a context that is not there.

    Args:
        seq_lens_cpu_upper_bound: [>= num_reqs] int32 on the CPU; an upper bound, as rejected tokens are known on the
            device only.
        num_reqs: live requests, at least one.
        num_draft_tokens: K of this batch.
        max_model_len: the model's limit.
    """
    longest = int(seq_lens_cpu_upper_bound[:num_reqs].max())
    return min(longest + num_draft_tokens, max_model_len)
