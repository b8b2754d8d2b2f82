"""What comes out of a draft's head before it is made a row of the target's vocabulary on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

FewRows = Callable[[torch.Tensor, torch.Tensor], Any]
"""Of rows [n, H] and weights [N, H]."""


class Trimmed(Protocol):
    """A head of some rows that takes the place of a draft's whole head."""

    def kept_rows(self, lm_head: Any, embedding_bias: torch.Tensor | None = None) -> Any:
        """The head of the kept rows."""

    def logits(self, of_kept: torch.Tensor, *, short: bool) -> torch.Tensor:
        """Those of the kept rows, or a row over the whole vocabulary."""

    def tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """The tokens of kept rows."""


class DraftLogits:
    """The one ``LogitsProcessor`` that a draft has of its own, asked for no more than an argmax needs.

    vLLM's models compute logits by handing their head to a ``LogitsProcessor``, which multiplies and then gathers the
    shards of the tensor-parallel ranks.  Here it can be kept from gathering, can multiply in another way, and can be
    given a trimmed head.  Nothing else of this package replaces its methods.

    Args:
        processor: the draft's alone.
        local: leave each rank its shard.
    """

    def __init__(self, processor: Any, *, local: bool) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.processor = processor
        self.short = False
        """Whether logits are being computed for us, so that they need not be whole."""
        self.few: FewRows | None = None
        """What may take the place of a product of few rows with the head's weights, in what is being computed."""
        self.multiply: Callable[..., Any] = processor.forward
        """What makes logits of a head and hidden states: stock's own, or what stands for it."""
        self.trimmed: Trimmed | None = None
        processor.forward = self._forward
        self._stock_top_tokens = processor.get_top_tokens  # for vLLM's use_local_argmax_reduction
        processor.get_top_tokens = self._top_tokens
        self._untouched: bool | None = None
        self._rank: int = get_tensor_model_parallel_rank()
        self._ranks: int = get_tensor_model_parallel_world_size()
        self._sharded = False
        self.local = local and self._ranks > 1
        """Whether each rank can keep its shard."""
        if self.local:
            self._gather = processor._gather_logits
            processor._gather_logits = self._keep_shard

    @classmethod
    def of(cls, model: Any, target: Any, *, local: bool) -> DraftLogits | None:
        """Those of a draft; None where it has no ``LogitsProcessor``, several, or the target's.

        Args:
            model: the draft, loaded.
            target: the target model, whose logits stay whole.
            local: leave each tensor-parallel rank its shard.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        own, targets = ([m for m in each.modules() if isinstance(m, LogitsProcessor)] for each in (model, target))
        if len(own) != 1 or any(own[0] is each for each in targets):
            return None
        return cls(own[0], local=local)

    def untouched(self, compute: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor) -> bool:
        """Whether the draft hands on what its processor returns; found out once, in the profile run.

        Args:
            compute: the draft's ``compute_logits``, or what stands for it.
            hidden_states: [n, H] for a trial.
        """
        if self._untouched is None:
            returned: list[torch.Tensor] = []
            hook = self.processor.register_forward_hook(lambda processor, inputs, logits: returned.append(logits))
            try:
                logits = compute(hidden_states)
            finally:
                hook.remove()
            self._untouched = len(returned) == 1 and logits is returned[0]
        return self._untouched

    def __call__(
        self,
        compute: Callable[[torch.Tensor], torch.Tensor],
        hidden_states: torch.Tensor,
        few: FewRows | None = None,
    ) -> Any:
        """[n, W] what the processor makes of hidden states [n, H] when nothing is gathered or filled up.

        With ``few`` it may also be what that makes of the hidden states and the head's weights, if there are few rows.
        """
        self.short, self.few, self._sharded = True, few, False
        try:
            return compute(hidden_states)
        finally:
            self.short, self.few = False, None

    def shard(self, logits: torch.Tensor, num_rows: int) -> tuple[int, int] | None:
        """First row of the head and number of rows that the columns stand for; None if they stand for all of them.

        Args:
            logits: [n, W], the result of the last call.
            num_rows: rows of the whole head, without padding.
        """
        if not self._sharded:
            return None
        width = logits.shape[-1]
        first = self._rank * width
        return first, min(max(num_rows - first, 0), width)

    def _forward(self, lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.trimmed is None:
            return self.multiply(lm_head, hidden_states, *args, **kwargs)
        of_kept = self.multiply(self.trimmed.kept_rows(lm_head, *args, **kwargs), hidden_states)
        return self.trimmed.logits(of_kept, short=self.short)

    def _top_tokens(self, lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.trimmed is None:
            best: torch.Tensor = self._stock_top_tokens(lm_head, hidden_states, *args, **kwargs)
            return best
        kept = self.trimmed.kept_rows(lm_head, *args, **kwargs)
        return self.trimmed.tokens(self._stock_top_tokens(kept, hidden_states))

    def _keep_shard(self, logits: torch.Tensor) -> torch.Tensor:
        if self.short:
            self._sharded = True
            return logits
        gathered: torch.Tensor = self._gather(logits)
        return gathered
