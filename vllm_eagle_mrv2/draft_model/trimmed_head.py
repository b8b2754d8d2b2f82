"""Draft vocabulary trimming: keeps only the head's rows of frequent tokens (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens
from vllm_eagle_mrv2.draft_model import fp8
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits
from vllm_eagle_mrv2.errors import EagleMRV2Error


class TrimmedHead:
    """Replaces a draft's whole head by one of C kept rows.

    EAGLE-1 and MTP drafts mostly use the target's own ``lm_head``, which must not change.  Each draft has its own
    ``LogitsProcessor``, however, which receives the head as an argument; this class makes it multiply with the kept
    rows.  The result is still a row over the whole vocabulary, with -inf for the tokens left out.  Every reader of
    draft logits, above all the rejection sampler, thus sees probability zero for these tokens.

    Only when `DraftLogits` itself asks does the result contain just the logits of the kept tokens.

    Args:
        draft_logits: the draft's `DraftLogits`.
        tokens: the tokens to keep.
        device: the draft's device.
        rounds: make the kept rows FP8.
    """

    def __init__(
        self, draft_logits: DraftLogits, tokens: KeptTokens, device: torch.device, *, rounds: bool = False
    ) -> None:
        self._device = device
        self._rounds = rounds
        self.vocab_size: int = draft_logits.processor.org_vocab_size
        self._ids = tokens.within(self.vocab_size)
        self._whole: Any = None
        self.kept: Any = None
        """The head of the kept rows, once the draft has multiplied with it."""
        draft_logits.trim(self)

    @classmethod
    def of(
        cls,
        model: Any,
        draft_logits: DraftLogits | None,
        tokens: KeptTokens,
        device: torch.device,
        *,
        rounds: bool = False,
    ) -> TrimmedHead:
        """Create the trimmed head of a loaded draft.

        Raises:
            EagleMRV2Error: the draft has no ``LogitsProcessor`` of its own.
        """
        if draft_logits is None:
            raise EagleMRV2Error(
                f"draft_vocab needs a draft with one LogitsProcessor of its own, which {type(model).__name__} lacks; "
                "leave it out."
            )
        return cls(draft_logits, tokens, device, rounds=rounds)

    @property
    def size(self) -> int:
        """C, the number of kept tokens."""
        return len(self._ids)

    @functools.cached_property
    def target_ids(self) -> torch.Tensor:
        """[C] int64, the kept tokens in ascending order."""
        return torch.tensor(self._ids, dtype=torch.int64, device=self._device)

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """[C] int64, the token minus the row, for each kept row."""
        return self.target_ids - torch.arange(self.size, device=self._device)

    @torch.inference_mode()
    def renew(self) -> None:
        """Copy the rows again, into the same memory, which captured graphs read."""
        if self.kept is None:
            return
        if self._rounds:
            fp8.renew(self.kept, _trimmed(self._whole, self.target_ids))
        else:
            _copy_rows(self._whole, self.kept, self.target_ids)

    def logits(self, of_kept: torch.Tensor, *, short: bool) -> torch.Tensor:
        """Return logits [n, C] of the kept rows if ``short``, else [n, V] with -inf for all other tokens.

        Args:
            of_kept: [n, >= C], output of the head of the kept rows.
            short: the caller does not need whole rows.
        """
        logits = of_kept[..., : self.size]
        if short:
            return logits
        row = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return row.index_copy_(-1, self.target_ids, logits)

    def tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the tokens of kept rows, int64."""
        return self.target_ids[columns]

    def kept_rows(self, lm_head: Any, embedding_bias: torch.Tensor | None = None) -> Any:
        """Return the head of the kept rows, copied from the whole head on first use.

        Raises:
            EagleMRV2Error: the head has a bias or is quantized, or the draft has several heads.
        """
        if lm_head is not self._whole:
            # First called in the profile run.  Memory allocated during weight loading would be freed with the weights
            # when vLLM sleeps, and a copy made during capture would be repeated by each replay.
            assert not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing())
            if self._whole is not None:
                raise EagleMRV2Error("the draft has several heads; leave draft_vocab out.")
            self.kept = _trimmed(lm_head, self.target_ids)
            if self._rounds:
                fp8.round_weights(self.kept)
            self._whole = lm_head
        if embedding_bias is not None:
            raise EagleMRV2Error("the draft's head has a bias; leave draft_vocab out.")
        return self.kept


def _trimmed(lm_head: Any, tokens: torch.Tensor) -> Any:
    """Create a ``ParallelLMHead`` of the rows of ``tokens`` [C] int64, sharded anew across the tensor-parallel ranks.

    Frequent tokens have low ids in most vocabularies, so with the shards of the whole head the first rank would do
    most of the work.

    Raises:
        EagleMRV2Error: the head is quantized.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    method = getattr(lm_head, "quant_method", None)
    if not isinstance(method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        raise EagleMRV2Error(
            "draft_vocab takes rows out of the draft's head, and this one is quantized "
            f"({type(method).__name__}); leave draft_vocab out."
        )
    weight = lm_head.weight
    with weight.device:
        kept = ParallelLMHead(len(tokens), weight.shape[1], params_dtype=weight.dtype, prefix="draft_vocab")
    _copy_rows(lm_head, kept, tokens)
    return kept


def _copy_rows(lm_head: Any, kept: Any, tokens: torch.Tensor) -> None:
    from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

    shard = lm_head.shard_indices
    ours = (tokens >= shard.org_vocab_start_index) & (tokens < shard.org_vocab_end_index)
    rows = lm_head.weight[torch.where(ours, tokens - shard.org_vocab_start_index, 0)]
    rows = torch.where(ours[:, None], rows, 0)
    if lm_head.tp_size > 1:
        rows = tensor_model_parallel_all_reduce(rows)  # each row comes from one rank and is zero on the others
    kept.weight_loader(kept.weight, rows)
    kept.quant_method.process_weights_after_loading(kept)
