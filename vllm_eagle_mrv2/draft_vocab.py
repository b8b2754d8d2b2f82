"""Draft vocabulary trimming: of a draft's head only the rows of frequent tokens (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.ranking import DraftTokens


class TrimmedHead:
    """Puts a head of C kept rows in the place of a draft's whole head.

    EAGLE-1 and MTP drafts mostly use the target's own ``lm_head``, which must stay as it is.  But each draft has a
    ``LogitsProcessor`` of its own, which is given the head and multiplies with it; here it multiplies with the kept
    rows.  Its result is a row over the whole vocabulary all the same, with -inf for what is left out, so that whoever
    reads draft logits is right without knowing, the rejection sampler above all: such a token has probability zero.

    Args:
        model: the draft, loaded.
        target: the target model, whose logits stay whole.
        tokens: what to keep.
        device: where the draft is.

    Raises:
        EagleMRV2Error: the draft has no ``LogitsProcessor`` of its own.
    """

    def __init__(self, model: Any, target: Any, tokens: DraftTokens, device: torch.device) -> None:
        self._model = model
        self._tokens = tokens
        self._device = device
        self._processor = _own_processor(model, target)
        self.vocab_size: int = self._processor.org_vocab_size
        tokens.check(self.vocab_size)
        self._whole: Any = None
        self._kept: Any = None
        self._compact = False
        self._handed_out: torch.Tensor | None = None
        self._stock_forward = self._processor.forward
        self._processor.forward = self._forward
        self._stock_top_tokens = self._processor.get_top_tokens  # for vLLM's use_local_argmax_reduction
        self._processor.get_top_tokens = self._top_tokens

    @property
    def size(self) -> int:
        """C, the number of kept tokens."""
        return len(self._tokens.ids)

    @functools.cached_property
    def target_ids(self) -> torch.Tensor:
        """[C] int64, the kept tokens in ascending order."""
        return torch.tensor(self._tokens.ids, dtype=torch.int64, device=self._device)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, C] logits of the kept tokens alone, from hidden states [n, H], through the draft's ``compute_logits``.

        Raises:
            EagleMRV2Error: the draft does something to its logits afterwards.
        """
        self._compact = True
        try:
            logits: torch.Tensor = self._model.compute_logits(hidden_states)
        finally:
            self._compact = False
            handed_out, self._handed_out = self._handed_out, None
        if logits is not handed_out:
            raise EagleMRV2Error(
                f"{type(self._model).__name__} changes the logits of its head, which a trimmed one does not allow; "
                "leave draft_vocab out, or disable two_stage_argmax, so that it gets rows of the whole vocabulary."
            )
        return logits

    @torch.inference_mode()
    def renew(self) -> None:
        """Copy the rows again, into the same memory, which graphs read."""
        if self._kept is not None:
            _copy_rows(self._whole, self._kept, self.target_ids)

    def _forward(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What the draft's ``LogitsProcessor`` does: stock's own work, with the kept rows for ``lm_head``."""
        kept = self._kept_rows(lm_head, embedding_bias)
        logits: torch.Tensor = self._stock_forward(kept, hidden_states)[..., : self.size]
        if self._compact:
            self._handed_out = logits
            return logits
        row = logits.new_full((*logits.shape[:-1], self.vocab_size), float("-inf"))
        return row.index_copy_(-1, self.target_ids, logits)

    def _top_tokens(
        self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        columns: torch.Tensor = self._stock_top_tokens(self._kept_rows(lm_head, embedding_bias), hidden_states)
        return self.target_ids[columns]

    def _kept_rows(self, lm_head: Any, embedding_bias: torch.Tensor | None) -> Any:
        if lm_head is not self._whole:
            # The profile run comes first.  What is made while weights are loaded goes with them when vLLM sleeps; and
            # what is made in a graph is made again by each replay.
            assert not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing())
            if self._whole is not None:
                raise EagleMRV2Error(f"{type(self._model).__name__} has several heads; leave draft_vocab out.")
            self._kept = _trimmed(lm_head, self.target_ids)
            self._whole = lm_head
        if embedding_bias is not None:
            raise EagleMRV2Error(f"the head of {type(self._model).__name__} has a bias; leave draft_vocab out.")
        return self._kept


def _own_processor(model: Any, target: Any) -> Any:
    """The one ``LogitsProcessor`` of a draft.

    Raises:
        EagleMRV2Error: it has none, several, or the target's.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    own, targets = ([m for m in each.modules() if isinstance(m, LogitsProcessor)] for each in (model, target))
    if len(own) != 1 or any(own[0] is each for each in targets):
        raise EagleMRV2Error(
            f"draft_vocab needs a draft with one LogitsProcessor of its own, and {type(model).__name__} has "
            f"{len(own) if len(own) != 1 else 'the one of the target'}; leave it out."
        )
    return own[0]


def _trimmed(lm_head: Any, tokens: torch.Tensor) -> Any:
    """A ``ParallelLMHead`` of the rows of ``tokens`` [C] int64, shared out anew among the tensor-parallel ranks.

    Frequent tokens have low ids in most vocabularies, so in the shards of the whole head the first rank would have
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
        rows = tensor_model_parallel_all_reduce(rows)  # each row is one rank's, zero on the others
    kept.weight_loader(kept.weight, rows)
    kept.quant_method.process_weights_after_loading(kept)
