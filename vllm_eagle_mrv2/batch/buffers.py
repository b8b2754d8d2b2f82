"""The data of the draft loop: what comes in with a batch, and the buffers that live as long as the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DraftBuffers:
    """Persistent device tensors of the draft; captured graphs hold their addresses.

    ``max_num_reqs`` is R, ``max_num_tokens`` T, hidden size H, K the number of draft tokens.
    """

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int64
    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    idx_mapping: torch.Tensor  # [R] int32 or int64: batch row -> request state, -1 for padded rows
    temperature: torch.Tensor  # [R] float32, by request state
    seeds: torch.Tensor  # [R] int64, by request state
    hidden_states: torch.Tensor  # [T, H] model dtype
    last_token_indices: torch.Tensor  # [R] int64: row of each request's last accepted token
    sample_positions: torch.Tensor  # [R] int64: what keys the sampler's random numbers
    draft_tokens: torch.Tensor  # [R, K] int64
    draft_step: torch.Tensor  # [R] int64: the step that the next sampling call is for, the same in every row
    num_rejected: torch.Tensor  # [R] int32: of the batch's last verification
    live_reqs: torch.Tensor  # [] int32: requests of the batch, without padding
    top_k: torch.Tensor  # [R] int32, by request state; the vocabulary or more is no limit
    top_p: torch.Tensor  # [R] float32, by request state; 1 is no limit

    @property
    def max_num_reqs(self) -> int:
        """R, the most requests that a batch can hold."""
        return int(self.seq_lens.shape[0])


@dataclass(frozen=True)
class SlotTable:
    """Where draft decodes put their keys and values, in a draft with one group of KV caches."""

    blocks: torch.Tensor  # [R, most blocks of a request] int32, by request state
    slots: torch.Tensor  # [>= R] int64, by batch row; -1 for rows without a token
    block_size: int  # tokens


@dataclass(frozen=True)
class TargetStates:
    """What the target left behind for its draft to start from."""

    last: torch.Tensor  # [>= n, H]: hidden states of its last layer
    aux: Sequence[torch.Tensor] = ()  # each [>= n, H]: of some of its layers, for an EAGLE-3 head that combines them

    @property
    def used(self) -> Sequence[torch.Tensor]:
        """Those that the draft reads."""
        return self.aux or (self.last,)

    def rows(self, num_tokens: int) -> TargetStates:
        """The first rows."""
        return TargetStates(self.last[:num_tokens], [each[:num_tokens] for each in self.aux])


@dataclass(slots=True)
class DraftBatch:
    """One batch to draft for; from here on no line knows which vLLM it runs on."""

    num_reqs: int
    num_tokens: int  # scheduled tokens
    num_tokens_padded: int  # with the padding that the target's graph added
    num_draft_tokens: int  # K for this batch

    input_ids: torch.Tensor  # [num_tokens_padded] int32
    positions: torch.Tensor  # [num_tokens_padded] int64
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32, rejected tokens included
    seq_lens_cpu_upper_bound: torch.Tensor  # [num_reqs] int32 on the CPU
    idx_mapping: torch.Tensor  # [num_reqs]: batch row -> request state
    target_states: TargetStates  # of num_tokens_padded tokens
    num_sampled: torch.Tensor  # [num_reqs]
    num_rejected: torch.Tensor  # [num_reqs]
    last_sampled: torch.Tensor  # [R] by request state
    next_prefill_tokens: torch.Tensor  # [R] or [lookahead, R] by request state
    temperature: torch.Tensor  # [R] by request state
    seeds: torch.Tensor  # [R] by request state

    top_k: torch.Tensor | None = None  # [R] int32 by request state, where drafts are to honour it
    top_p: torch.Tensor | None = None  # [R] float32, likewise
    attn_metadata: Any = None  # the target's, of this very batch
    slot_mappings: Any = None  # the target's, by layer
    mm_inputs: Any = None
    dp_sync: Any = None  # what the data-parallel ranks agreed on for the target
    source: Any = None  # the runner's own batch
    dummy_run: bool = False
    skip_attn: bool = False  # a dummy run without attention
    eager: bool = False  # a profiling run, no graphs
