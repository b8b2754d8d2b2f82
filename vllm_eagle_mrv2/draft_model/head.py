"""The draft's head: drafts from hidden states, over the draft's own vocabulary."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits, FewRows
from vllm_eagle_mrv2.draft_model.trimmed_head import TrimmedHead
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels import few_rows_product as few_rows
from vllm_eagle_mrv2.kernels.greedy import argmax_keys

_MODELS = "vllm.model_executor.models"
# Modules of models with a ``compute_logits`` that scatters the logits of a reduced vocabulary and does nothing else.
_SCATTERING = frozenset({f"{_MODELS}.llama_eagle3", f"{_MODELS}.qwen3_eagle3", f"{_MODELS}.deepseek_eagle3"})


class DraftHead:
    """The head of a loaded draft model.

    An EAGLE-3 head has its own vocabulary (32,000 rows, for example), and its model scatters the logits into a row of
    the target's vocabulary filled with -inf.  The argmax does not need that row: it runs over the head's own rows and
    maps the best one to the target's token.  Nor does it need the logits of other tensor-parallel ranks: the ranks
    exchange their best tokens.

    Args:
        model: the loaded draft model.
        draft_logits: the draft's `DraftLogits`; None means that whole logits are computed.
        trimmed: the trimmed head that replaces one with the target's vocabulary, if the user asked for it.
    """

    def __init__(self, model: Any, draft_logits: DraftLogits | None = None, trimmed: TrimmedHead | None = None) -> None:
        self._model = model
        self._draft_logits = draft_logits
        self._trimmed = trimmed
        mapped = getattr(model, "draft_id_to_target_id", None) is not None
        self._scatters = mapped and type(model).compute_logits.__module__ in _SCATTERING and trimmed is None
        """Whether the model scatters the logits of a draft vocabulary into a row of the target's."""
        # Bound here: what reads stored logits may get its own ``compute_logits`` later.
        self._compute: Callable[[torch.Tensor], Any] = model.compute_logits
        """Computes logits over the head's own rows from hidden states [n, H]."""
        if self._scatters:
            self._compute = functools.partial(model.logits_processor, model.lm_head)
        self._row_is_token = trimmed is None and not self._scatters
        self._untried = draft_logits is not None

    @property
    def offsets(self) -> torch.Tensor | None:
        """[C] int64, the target's token minus the row, for each row of the head; None where a row is the token.

        Read from the model at every access, because weights may be replaced in place.
        """
        if self._trimmed is not None:
            return self._trimmed.offsets
        return self._model.draft_id_to_target_id.data if self._scatters else None

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, C], one column for each row of the head, for hidden states [n, H].

        Raises:
            EagleMRV2Error: as for `logits_by_temperature`.
        """
        with self._short_logits(hidden_states):
            logits: torch.Tensor = self._compute(hidden_states)
        return logits

    def logits_by_temperature(
        self, hidden_states: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits, and the best tokens of greedy rows where `few_rows_by_temperature` computes them.

        Where it does, the logits of greedy rows are undefined; elsewhere the second result is None.

        Args:
            hidden_states: [n, H].
            idx_mapping: as for `few_rows_by_temperature`.
            temperature: as for `few_rows_by_temperature`.

        Raises:
            EagleMRV2Error: the head is trimmed, and the draft model changes its logits afterwards.
        """
        few = functools.partial(few_rows.few_rows_by_temperature, idx_mapping=idx_mapping, temperature=temperature)
        with self._short_logits(hidden_states, few):
            found = self._compute(hidden_states)
        return found if isinstance(found, tuple) else (found, None)

    def keys(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return keys [n, m] int64 of `argmax_keys` for hidden states [n, H]; the greatest key gives the argmax.

        Among equal logits the first token wins.

        Raises:
            EagleMRV2Error: as for `logits_by_temperature`.
        """
        with self._short_logits(hidden_states, few_rows.few_rows_keys, apart=True):
            logits: torch.Tensor = self._compute(hidden_states)
        if logits.dtype == torch.int64:
            return logits
        if self._draft_logits is None or not self._draft_logits.sharded:
            return argmax_keys(logits, self.offsets)

        from vllm.distributed import tensor_model_parallel_all_gather

        first, count = self._draft_logits.shard(logits, self._num_rows)
        keys = argmax_keys(logits, self.offsets, first_row=first, num_columns=count)
        # Some of vLLM's communicators reject integers; an all-gather copies bits, whatever their dtype.
        gathered: torch.Tensor = tensor_model_parallel_all_gather(keys.view(torch.float32))
        return gathered.view(torch.int64)

    @contextlib.contextmanager
    def _short_logits(
        self, hidden_states: torch.Tensor, few: FewRows | None = None, *, apart: bool = False
    ) -> Iterator[None]:
        """Context in which the draft computes logits [n, C], one column for each row of the head; see `offsets`.

        If ``apart``, with local argmax, each rank computes its own vocabulary shard.  In a head in which each row is
        the token, the result may instead be what ``few`` returns for at most 32 rows and the head's weights.
        """
        if self._untried:
            self._look_at_draft(hidden_states)
        logits = self._draft_logits
        if logits is None:
            yield
            return
        logits.short, logits.apart, logits.sharded = True, apart, False
        logits.few = few if self._row_is_token else None
        try:
            yield
        finally:
            logits.short, logits.apart, logits.few = False, False, None

    def _look_at_draft(self, hidden_states: torch.Tensor) -> None:
        """Use whole logits if the draft model changes what its ``LogitsProcessor`` returns; in the profile run."""
        self._untried = False
        assert self._draft_logits is not None
        if self._draft_logits.returned_unchanged(self._compute, hidden_states):
            return
        if self._trimmed is not None:
            raise EagleMRV2Error(
                f"{type(self._model).__name__} changes the logits of its head, which a trimmed one does not allow; "
                "leave draft_vocab out, or disable two_stage_argmax, so that it gets rows of the whole vocabulary."
            )
        self._draft_logits = None

    @property
    def _num_rows(self) -> int:
        """Number of rows of the whole head."""
        if self.offsets is not None:
            return len(self.offsets)
        assert self._draft_logits is not None
        rows: int = self._draft_logits.processor.org_vocab_size
        return rows
