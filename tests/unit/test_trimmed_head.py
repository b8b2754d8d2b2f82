"""The trimmed head against the whole one, with vLLM's own layers, on one tensor-parallel rank and on two."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_eagle_mrv2.draft_vocab import TrimmedHead
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.head import DraftHead
from vllm_eagle_mrv2.ranking import DraftTokens

VOCAB, HIDDEN = 300, 16
LOW_IDS = tuple(range(2, 72))  # 70 tokens, which are all in the first rank's shard of the whole head
CPU = torch.device("cpu")


@contextmanager
def tensor_parallel(rank: int = 0, ranks: int = 1, port: int = 0) -> Iterator[None]:
    """vLLM's groups over gloo, in this process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port or free_port()}", rank, backend="gloo")
        try:
            initialize_model_parallel(ranks, backend="gloo")
            yield
        finally:
            cleanup_dist_env_and_memory()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Model(nn.Module):
    """A model whose logits are made as vLLM's models make them."""

    def __init__(self, lm_head: nn.Module, finish: Callable[[torch.Tensor], torch.Tensor] | None, **how: Any) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        super().__init__()
        self.lm_head = lm_head
        self.logits_processor = LogitsProcessor(VOCAB, **how)
        self._finish = finish

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits if self._finish is None else self._finish(logits)


def whole_head(weight: torch.Tensor) -> Any:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=weight.dtype)
    head.weight_loader(head.weight, weight)
    head.quant_method.process_weights_after_loading(head)
    return head


def pair(finish: Callable[[torch.Tensor], torch.Tensor] | None = None, **how: Any) -> tuple[Model, Model]:
    """A draft and the target whose head it uses.  Every row of the head is there twice, so that logits tie."""
    weight = torch.randn(VOCAB // 2, HIDDEN, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, dim=0)
    head = whole_head(weight)
    return Model(head, finish, **how), Model(head, None)


def tokens(*ids: int) -> DraftTokens:
    return DraftTokens(ids, "ranking.json", None)


def states(count: int = 9) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2))


def check_against_the_whole_head(kept: tuple[int, ...], **how: Any) -> None:
    draft, target = pair(**how)
    hidden = states()
    whole, targets = draft.compute_logits(hidden), target.compute_logits(hidden)
    weight = draft.lm_head.weight.clone()
    trimmed = TrimmedHead(draft, target, tokens(*kept), CPU)
    # A row of the whole vocabulary for whoever asks the draft.
    row = draft.compute_logits(hidden)
    assert row.shape == whole.shape
    left_out = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(kept), False)
    torch.testing.assert_close(row[:, list(kept)], whole[:, list(kept)], rtol=1e-5, atol=1e-5)
    assert bool((row[:, left_out] == -torch.inf).all())
    # The kept tokens alone for our argmax; of equals the first.
    assert trimmed.logits(hidden).shape == (len(hidden), len(kept))
    expected = whole.masked_fill(left_out, -torch.inf).argmax(-1)
    assert DraftHead(draft, trimmed).greedy(hidden).tolist() == expected.tolist()
    # vLLM's use_local_argmax_reduction.
    assert draft.logits_processor.get_top_tokens(draft.lm_head, hidden).tolist() == expected.tolist()
    # The target's head and logits are what they were.
    assert torch.equal(target.compute_logits(hidden), targets)
    assert torch.equal(draft.lm_head.weight, weight)
    assert target.lm_head is draft.lm_head


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    with tensor_parallel():
        yield


@pytest.mark.parametrize("how", [{}, {"scale": 0.25}, {"soft_cap": 2.0}, {"scale": 3.0, "soft_cap": 1.5}], ids=str)
@pytest.mark.parametrize("kept", [(0,), (3, 7, 8, 120, 299), LOW_IDS, tuple(range(VOCAB - 1))], ids=len)
@pytest.mark.usefixtures("one_rank")
def test_the_kept_rows_of_the_whole_head(kept: tuple[int, ...], how: dict[str, float]) -> None:
    check_against_the_whole_head(kept, **how)


@pytest.mark.usefixtures("one_rank")
def test_weights_that_are_replaced_in_place() -> None:
    draft, target = pair()
    trimmed = TrimmedHead(draft, target, tokens(4, 70, 251), CPU)
    trimmed.renew()  # nothing is copied yet
    trimmed.logits(states())
    memory = trimmed._kept.weight.data_ptr()
    whole = torch.randn(VOCAB, HIDDEN)
    draft.lm_head.weight_loader(draft.lm_head.weight, whole)
    trimmed.renew()
    assert trimmed._kept.weight.data_ptr() == memory
    torch.testing.assert_close(trimmed.logits(states()), (states() @ whole.T)[:, [4, 70, 251]], rtol=1e-5, atol=1e-5)


def run_rank(rank: int, ranks: int, port: int) -> None:
    with tensor_parallel(rank, ranks, port):
        from vllm.distributed import get_tensor_model_parallel_world_size

        assert get_tensor_model_parallel_world_size() == ranks
        for kept in ((3, 7, 8, 120, 299), LOW_IDS):
            check_against_the_whole_head(kept, scale=0.5, soft_cap=2.0)
        # Every rank has work, though all kept rows come from the first.
        draft, target = pair()
        trimmed = TrimmedHead(draft, target, tokens(*LOW_IDS), CPU)
        trimmed.logits(states())
        assert (draft.lm_head.shard_indices.org_vocab_start_index <= LOW_IDS[0]) == (rank == 0)
        assert len(trimmed._kept.weight) == 64
        assert int(trimmed._kept.weight.any(-1).sum()) == (64 if rank == 0 else 6)


def test_two_tensor_parallel_ranks() -> None:
    torch.multiprocessing.spawn(run_rank, (2, free_port()), nprocs=2)


# Refusals


@pytest.mark.usefixtures("one_rank")
def test_a_draft_that_changes_its_logits() -> None:
    draft, target = pair(finish=lambda logits: logits * 2)
    trimmed = TrimmedHead(draft, target, tokens(1, 2), CPU)
    with pytest.raises(EagleMRV2Error, match="Model changes the logits of its head"):
        trimmed.logits(states())
    assert draft.compute_logits(states()).shape == (9, VOCAB)  # rows of the whole vocabulary it may change


@pytest.mark.usefixtures("one_rank")
def test_a_quantized_head() -> None:
    draft, target = pair()
    draft.lm_head.quant_method = SimpleNamespace(apply=draft.lm_head.quant_method.apply)
    TrimmedHead(draft, target, tokens(1, 2), CPU)
    with pytest.raises(EagleMRV2Error, match=r"quantized \(SimpleNamespace\)"):
        draft.compute_logits(states())


@pytest.mark.usefixtures("one_rank")
def test_a_head_with_a_bias_and_a_second_head() -> None:
    draft, target = pair()
    TrimmedHead(draft, target, tokens(1, 2), CPU)
    with pytest.raises(EagleMRV2Error, match="Model has a bias"):
        draft.logits_processor(draft.lm_head, states(), torch.zeros(VOCAB))
    with pytest.raises(EagleMRV2Error, match="several heads"):
        draft.logits_processor(whole_head(torch.zeros(VOCAB, HIDDEN)), states())


@pytest.mark.usefixtures("one_rank")
def test_no_logits_processor_of_its_own() -> None:
    draft, target = pair()
    draft.logits_processor = target.logits_processor
    with pytest.raises(EagleMRV2Error, match="Model has the one of the target"):
        TrimmedHead(draft, target, tokens(1), CPU)
    draft, target = pair()
    draft.second = pair()[0].logits_processor
    with pytest.raises(EagleMRV2Error, match="Model has 2"):
        TrimmedHead(draft, target, tokens(1), CPU)
    draft.logits_processor = draft.second = nn.Identity()
    with pytest.raises(EagleMRV2Error, match="Model has 0"):
        TrimmedHead(draft, target, tokens(1), CPU)


@pytest.mark.usefixtures("one_rank")
def test_tokens_outside_the_vocabulary() -> None:
    with pytest.raises(
        EagleMRV2Error, match=f"a vocabulary with the token {VOCAB}, the draft has a vocabulary of {VOCAB}"
    ):
        TrimmedHead(*pair(), tokens(1, VOCAB), CPU)
