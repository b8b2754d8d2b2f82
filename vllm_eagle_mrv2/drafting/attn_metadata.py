"""Upper bound on the sequence lengths that the draft's attention metadata is built for."""

from __future__ import annotations

import torch


def draft_max_seq_len(
    seq_lens_cpu_upper_bound: torch.Tensor, num_reqs: int, num_draft_tokens: int, max_model_len: int
) -> int:
    """Return the longest sequence that drafting for this batch can reach (#43991).

    With ``max_model_len`` as the bound, some kernels read block tables past their valid entries and others split their
    work for a context that does not exist.

    Args:
        seq_lens_cpu_upper_bound: [>= num_reqs] int32 on the CPU; an upper bound, because the number of rejected tokens
            is known only on the device.
        num_reqs: live requests, at least one.
        num_draft_tokens: K of this batch.
        max_model_len: the model's limit.
    """
    longest = int(seq_lens_cpu_upper_bound[:num_reqs].max())
    return min(longest + num_draft_tokens, max_model_len)
