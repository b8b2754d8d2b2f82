"""A draft's logits before they are gathered and expanded to the target's vocabulary on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_eagle_mrv2.draft_model.trimmed_head import TrimmedHead

FewRows = Callable[..., Any]
"""Fused head kernel, called with rows [n, H], weights [N, H], and ``scale`` [N] of FP8 weights or None."""


class DraftLogits:
    """Makes a draft's own ``LogitsProcessor`` compute only what an argmax needs.

    vLLM's models compute logits by passing their head to a ``LogitsProcessor``, which multiplies and then gathers the
    vocabulary shards of the tensor-parallel ranks.  This class can skip the gather, replace the product and use a
    trimmed head.  Nothing else in this package replaces methods of the processor.

    Args:
        processor: the draft's, not shared with the target.
        local: each rank keeps its vocabulary shard.
    """

    def __init__(self, processor: Any, *, local: bool) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.processor = processor
        self.short = False
        """Whether logits are being computed for this package, which does not need whole rows."""
        self.apart = False
        """Whether it does not need those of the other ranks either."""
        self.few: FewRows | None = None
        """Fused head kernel for at most 32 rows in the current call; None means matmul."""
        self.sharded = False
        """Whether the logits of the latest call are a shard."""
        self._multiply: Callable[..., Any] = processor.forward
        self._trimmed: TrimmedHead | None = None
        self._stock_top_tokens = processor.get_top_tokens  # for vLLM's use_local_argmax_reduction
        self._rank: int = get_tensor_model_parallel_rank()
        self._ranks: int = get_tensor_model_parallel_world_size()
        self.local = local and self._ranks > 1
        """Whether each rank keeps its vocabulary shard."""
        if self.local:
            self._gather = processor._gather_logits
            processor._gather_logits = self._keep_shard

    @classmethod
    def of(cls, model: Any, target: Any, *, local: bool) -> DraftLogits | None:
        """Return the `DraftLogits` of a draft; None if it has no ``LogitsProcessor``, several, or the target's.

        Args:
            model: the loaded draft model.
            target: the target model; its logits stay whole.
            local: each tensor-parallel rank keeps its vocabulary shard.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        own, targets = ([m for m in each.modules() if isinstance(m, LogitsProcessor)] for each in (model, target))
        if len(own) != 1 or any(own[0] is each for each in targets):
            return None
        return cls(own[0], local=local)

    @property
    def multiply(self) -> Callable[..., Any]:
        """Computes logits from a head and hidden states: the stock method or its replacement."""
        return self._multiply

    @multiply.setter
    def multiply(self, multiply: Callable[..., Any]) -> None:
        self._multiply = multiply
        if self._trimmed is None:
            self.processor.forward = multiply

    def trim(self, trimmed: TrimmedHead) -> None:
        """Compute the logits of a trimmed head from now on."""
        self._trimmed = trimmed
        self.processor.forward, self.processor.get_top_tokens = self._forward_trimmed, self._top_tokens

    def returned_unchanged(self, compute: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor) -> bool:
        """Whether the draft returns its processor's result unchanged.

        Args:
            compute: the draft's ``compute_logits`` or its replacement.
            hidden_states: [n, H], for a trial call.
        """
        returned: list[torch.Tensor] = []
        hook = self.processor.register_forward_hook(lambda processor, inputs, logits: returned.append(logits))
        try:
            logits = compute(hidden_states)
        finally:
            hook.remove()
        return len(returned) == 1 and logits is returned[0]

    def shard(self, logits: torch.Tensor, num_rows: int) -> tuple[int, int]:
        """Return the first row of the head and the number of rows that the columns of a shard cover.

        Args:
            logits: [n, W], the result of the latest call.
            num_rows: number of rows of the whole head, without padding.
        """
        width = logits.shape[-1]
        first = self._rank * width
        return first, min(max(num_rows - first, 0), width)

    def _forward_trimmed(self, lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        assert self._trimmed is not None
        of_kept = self._multiply(self._trimmed.kept_rows(lm_head, *args, **kwargs), hidden_states)
        return self._trimmed.logits(of_kept, short=self.short)

    def _top_tokens(self, lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self._trimmed is not None
        kept = self._trimmed.kept_rows(lm_head, *args, **kwargs)
        return self._trimmed.tokens(self._stock_top_tokens(kept, hidden_states))

    def _keep_shard(self, logits: torch.Tensor) -> torch.Tensor:
        if self.apart:
            self.sharded = True
            return logits
        gathered: torch.Tensor = self._gather(logits)
        return gathered
