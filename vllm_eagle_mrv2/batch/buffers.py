"""Data of the draft loop: the batch to draft for, and buffers that live as long as the engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DraftBuffers:
    """Persistent device tensors of the draft; captured graphs hold their addresses.

    In shapes, R is ``max_num_reqs``, T ``max_num_tokens``, H the hidden size and K the number of draft tokens.
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
    sample_positions: torch.Tensor  # [R] int64: positions that key the sampler's random numbers
    draft_tokens: torch.Tensor  # [R, K] int64
    draft_step: torch.Tensor  # [R] int64: step of the next sampling call, the same in every row
    num_rejected: torch.Tensor  # [R] int32: tokens rejected by the batch's last verification
    live_reqs: torch.Tensor  # [] int32: number of requests of the batch, without padding
    top_k: torch.Tensor  # [R] int32, by request state; the vocabulary size or more means no limit
    top_p: torch.Tensor  # [R] float32, by request state; 1 means no limit

    @functools.cached_property
    def max_num_reqs(self) -> int:
        """R, the maximum number of requests in a batch."""
        return int(self.seq_lens.shape[0])


@dataclass(frozen=True)
class SlotTable:
    """Block table and slots of draft decodes, for a draft with one KV cache group."""

    blocks: torch.Tensor  # [R, max blocks per request] int32, by request state
    slots: torch.Tensor  # [>= R] int64, by batch row; -1 for rows without a token
    block_size: int  # in tokens


@dataclass(frozen=True)
class Lookup:
    """The texts of requests, prompt and output, and the drafts that are found in them."""

    tokens: torch.Tensor  # [R, max_model_len] int32, by request state
    lengths: torch.Tensor  # [R] int32, by request state: tokens of the text
    found: torch.Tensor  # [R, K] int64, by batch row: the drafts, -1 where there are none
    best: torch.Tensor  # [R] int64, zeros between launches
    arrived: torch.Tensor  # [R] int32, zeros between launches
    draft_logits: torch.Tensor | None = None  # [R, K, V] by request state, where the rejection sampler reads them

    @classmethod
    def of(
        cls,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        num_draft_tokens: int,
        draft_logits: torch.Tensor | None = None,
    ) -> Lookup:
        """Make the buffers that belong to these texts."""
        max_num_reqs, device = len(lengths), tokens.device
        return cls(
            tokens,
            lengths,
            found=torch.full((max_num_reqs, num_draft_tokens), -1, dtype=torch.int64, device=device),
            best=torch.zeros(max_num_reqs, dtype=torch.int64, device=device),
            arrived=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
            draft_logits=draft_logits,
        )


@dataclass(frozen=True)
class TargetStates:
    """Hidden states of the target that the draft starts from."""

    last: torch.Tensor  # [>= n, H]: of the last layer
    aux: Sequence[torch.Tensor] = ()  # each [>= n, H]: of selected layers, for an EAGLE-3 head that combines them

    @property
    def used(self) -> Sequence[torch.Tensor]:
        """The hidden states that the draft reads."""
        return self.aux or (self.last,)


@dataclass(slots=True)
class DraftBatch:
    """One batch to draft for, in a form that does not depend on the vLLM release."""

    num_reqs: int
    num_tokens: int  # scheduled tokens
    num_tokens_padded: int  # including the padding added by the target's graph
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

    top_k: torch.Tensor | None = None  # [R] int32 by request state, if drafts honour it
    top_p: torch.Tensor | None = None  # [R] float32 by request state, if drafts honour it
    attn_metadata: Any = None  # the target's, built for this batch
    slot_mappings: Any = None  # the target's, by layer
    mm_inputs: Any = None
    dp_sync: Any = None  # the data-parallel ranks' agreement for the target's pass
    source: Any = None  # the model runner's batch
    dummy_run: bool = False
    skip_attn: bool = False  # a dummy run without attention
    eager: bool = False  # a profiling run, without graphs
    erases: bool = False  # the drafts of this batch become -1
