"""The draft's head, trimmed and not, against the whole one, with vLLM's own layers, on one and two ranks."""

from __future__ import annotations

import importlib
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

pytest.importorskip("triton")
pytest.importorskip("vllm")

from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens
from vllm_eagle_mrv2.draft_model import head as head_module
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits
from vllm_eagle_mrv2.draft_model.trimmed_head import TrimmedHead
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_by_temperature, few_rows_product
from vllm_eagle_mrv2.kernels.greedy import best_tokens
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise
from vllm_eagle_mrv2.releases import adapter as adapter_module

from .stock import ASKED, drafter_on, stock_speculator

VOCAB, HIDDEN = 300, 16
LOW_IDS = tuple(range(2, 72))  # 70 tokens, which are all in the first rank's shard of the whole head
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are on the CPU, for the interpreter")


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

    lm_head: Any
    logits_processor: Any

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


def tokens(*ids: int) -> KeptTokens:
    return KeptTokens(ids, "ranking.json", None)


def trim(draft: Model, target: Model, *ids: int) -> tuple[TrimmedHead, DraftHead]:
    draft_logits = DraftLogits.of(draft, target, local=True)
    trimmed = TrimmedHead.of(draft, draft_logits, tokens(*ids), CPU)
    return trimmed, DraftHead(draft, draft_logits, trimmed)


def states(count: int = 9) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2))


def check_against_the_whole_head(kept: tuple[int, ...], **how: Any) -> None:
    draft, target = pair(**how)
    hidden = states()
    whole, targets = draft.compute_logits(hidden), target.compute_logits(hidden)
    weight = draft.lm_head.weight.clone()
    _, head = trim(draft, target, *kept)
    # A row of the whole vocabulary for whoever asks the draft.
    row = draft.compute_logits(hidden)
    assert row.shape == whole.shape
    left_out = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, torch.tensor(kept), False)
    torch.testing.assert_close(row[:, list(kept)], whole[:, list(kept)], rtol=1e-5, atol=1e-5)
    assert bool((row[:, left_out] == -torch.inf).all())
    # The kept tokens alone for our argmax; of equals the first.
    expected = whole.masked_fill(left_out, -torch.inf).argmax(-1)
    assert best_tokens(head.keys(hidden)).tolist() == expected.tolist()
    check_logits(head, row)
    # vLLM's use_local_argmax_reduction.
    assert draft.logits_processor.get_top_tokens(draft.lm_head, hidden).tolist() == expected.tolist()
    # The target's head and logits are what they were.
    assert torch.equal(target.compute_logits(hidden), targets)
    assert torch.equal(draft.lm_head.weight, weight)
    assert target.lm_head is draft.lm_head


@pytest.mark.parametrize("how", [{}, {"scale": 0.25}, {"soft_cap": 2.0}, {"scale": 3.0, "soft_cap": 1.5}], ids=str)
@pytest.mark.parametrize("kept", [(0,), (3, 7, 8, 120, 299), LOW_IDS, tuple(range(VOCAB - 1))], ids=len)
@pytest.mark.usefixtures("one_rank")
def test_the_kept_rows_of_the_whole_head(kept: tuple[int, ...], how: dict[str, float]) -> None:
    check_against_the_whole_head(kept, **how)


@pytest.mark.usefixtures("one_rank")
def test_weights_that_are_replaced_in_place() -> None:
    draft, target = pair()
    trimmed, _ = trim(draft, target, 4, 70, 251)
    trimmed.renew()  # nothing is copied yet
    draft.compute_logits(states())
    memory = trimmed.kept.weight.data_ptr()
    whole = torch.randn(VOCAB, HIDDEN)
    draft.lm_head.weight_loader(draft.lm_head.weight, whole)
    trimmed.renew()
    assert trimmed.kept.weight.data_ptr() == memory
    torch.testing.assert_close(
        draft.compute_logits(states())[:, [4, 70, 251]], (states() @ whole.T)[:, [4, 70, 251]], rtol=1e-5, atol=1e-5
    )


def check_logits(head: DraftHead, row: torch.Tensor) -> None:
    """A head's own columns, of all ranks, against the row of the target's vocabulary."""
    by_temperature, best = head.logits_by_temperature(states(), torch.zeros(9, dtype=torch.int32), torch.ones(1))
    assert best is None
    for logits in (by_temperature, head.logits(states())):
        columns = torch.arange(logits.shape[1])
        targets = columns if head.offsets is None else columns + head.offsets
        torch.testing.assert_close(logits, row[:, targets], rtol=1e-5, atol=1e-5)


class Eagle3(Model):
    """One with a draft vocabulary, whose rows are the target's tokens in another order."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__(lm_head, None)
        targets = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
        self.draft_id_to_target_id = nn.Parameter(targets - torch.arange(VOCAB), requires_grad=False)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(VOCAB) + self.draft_id_to_target_id
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return torch.full_like(logits, -torch.inf).index_copy_(-1, targets, logits)


DRAFTS: dict[str, Callable[[], tuple[Model, Model]]] = {
    "plain": pair,
    "scaled": lambda: pair(scale=0.5, soft_cap=2.0),
    "changed afterwards": lambda: pair(finish=lambda logits: logits * torch.arange(VOCAB)),
    "eagle3": lambda: (Eagle3(pair()[0].lm_head), pair()[1]),
}


def check_local_argmax(name: str, ranks: int) -> None:
    """The head as it is: what is gathered, and that its best is the argmax of the whole row."""
    hidden = states()
    hidden[0] = 0.0  # every token ties, of all ranks
    for local in (True, False):
        draft, target = DRAFTS[name]()
        expected = draft.compute_logits(hidden).argmax(-1)
        widths: list[int] = []

        def counted(
            logits: torch.Tensor, widths: Any = widths, gather: Any = draft.logits_processor._gather_logits
        ) -> torch.Tensor:
            widths.append(logits.shape[-1])
            gathered: torch.Tensor = gather(logits)
            return gathered

        draft.logits_processor._gather_logits = counted
        head = DraftHead(draft, DraftLogits.of(draft, target, local=local))
        head.keys(hidden)  # the profile run, which finds out
        widths.clear()
        assert best_tokens(head.keys(hidden)).tolist() == expected.tolist()
        gathers = ranks > 1 and not (local and name != "changed afterwards")
        assert bool(widths) is gathers or ranks == 1
        # Whoever asks the draft gets whole rows.
        assert draft.compute_logits(hidden).shape == (9, VOCAB)
        check_logits(head, draft.compute_logits(states()))


@pytest.mark.usefixtures("one_rank")
def test_a_draft_vocabulary_that_is_replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_SCATTERING", frozenset({Eagle3.__module__}))
    draft = Eagle3(pair()[0].lm_head)
    head = DraftHead(draft)
    before = best_tokens(head.keys(states())).tolist()
    assert before == draft.compute_logits(states()).argmax(-1).tolist()
    draft.draft_id_to_target_id.data.copy_(torch.arange(VOCAB).flip(0) - torch.arange(VOCAB))
    after = best_tokens(head.keys(states())).tolist()
    assert after == draft.compute_logits(states()).argmax(-1).tolist() != before


@pytest.mark.usefixtures("one_rank")
def test_logits_that_are_finished_for_storage_are_not_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's ``compute_logits`` may be replaced, once the head is made, for logits that are stored."""
    draft, target = pair()
    expected, head = (
        draft.compute_logits(states()).argmax(-1),
        DraftHead(draft, DraftLogits.of(draft, target, local=False)),
    )
    compute_logits = draft.compute_logits
    monkeypatch.setattr(draft, "compute_logits", lambda hidden: compute_logits(hidden).half().neg())
    assert best_tokens(head.keys(states())).tolist() == expected.tolist()
    assert head._draft_logits is not None, "as where the draft changes its own logits"


@pytest.mark.parametrize("trims", [False, True], ids=["eagle3", "trimmed"])
@pytest.mark.usefixtures("one_rank")
def test_sampled_drafts_are_of_the_heads_own_rows(trims: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filtered by the requests' top-k and top-p, they are what a filtered row of the target's vocabulary is."""
    monkeypatch.setattr(head_module, "_SCATTERING", frozenset({Eagle3.__module__}))
    if trims:
        draft, target = pair()
        _, head = trim(draft, target, 5, 6, 90, 40)
    else:
        draft = Eagle3(pair()[0].lm_head)
        head = DraftHead(draft)
    stock = stock_speculator(draft_logits=torch.zeros(8, 3, VOCAB), model=draft, temperature=torch.full((8,), 0.7))
    adapter = drafter_on(stock).adapter
    adapter.buffers.top_p.fill_(0.5)
    adapter.buffers.top_k.fill_(VOCAB)
    adapter.take_head(head)
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(adapter_module, "sample_with_logits", lambda logits, *rest, **how: drawn.append(logits))
    monkeypatch.setattr(type(adapter), "samples_apart", False)
    adapter.sample(states(8))
    adapter.head = None  # as where two_stage_argmax is disabled
    adapter.sample(states(8))
    own, whole = drawn
    assert head.offsets is not None
    targets = torch.arange(own.shape[1]) + head.offsets
    assert torch.equal(whole, torch.full_like(whole, -torch.inf).index_copy_(-1, targets, own))
    assert bool(own.isinf().any())
    assert own.shape[1] == (4 if trims else VOCAB)


@pytest.mark.parametrize("watermarked", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_who_draws_from_a_draft_vocabulary(watermarked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This package, on releases whose own sampler is exact too; vLLM where it watermarks what it draws."""
    monkeypatch.setattr(head_module, "_SCATTERING", frozenset({Eagle3.__module__}))
    draft = Eagle3(pair()[0].lm_head)
    stock = stock_speculator(draft_logits=torch.zeros(8, 3, VOCAB), model=draft)
    stock.draft_watermarker = "watermarker" if watermarked else None
    adapter = drafter_on(stock).adapter
    adapter.take_head(DraftHead(draft))
    monkeypatch.setattr(type(adapter), "samples_apart", True)
    monkeypatch.setattr(adapter, "_sample_without_head", lambda *given: "vLLM's")
    monkeypatch.setattr(adapter_module, "sample_with_logits", lambda *given, **how: "ours")
    assert adapter.sample(states(8)) == ("vLLM's" if watermarked else "ours")


def adapter_of_0_20(model: Any, head: Any) -> Any:
    """The adapter, with requests of two temperatures; the test is skipped where vLLM lacks what its module imports."""
    try:
        module = importlib.import_module("vllm_eagle_mrv2.releases.v0_20.adapter")
    except ImportError as error:
        pytest.skip(f"the installed vLLM lacks what the adapter of 0.20 imports: {error}")
    stock = stock_speculator(
        model=model,
        idx_mapping=torch.arange(8, dtype=torch.int32) % 4,
        temperature=torch.tensor([0.0, 0.7, 0.0, 1.3] * 2),
        seeds=torch.arange(8),
    )
    adapter = module.Adapter(stock, Options(), ASKED)
    adapter.buffers.sample_positions.copy_(torch.arange(8) + 16)
    adapter.buffers.draft_step.fill_(1)
    adapter.take_head(head)
    return adapter


def drafts_of(row: torch.Tensor, adapter: Any) -> list[int]:
    """What is drafted from rows of the whole vocabulary."""
    of = adapter.buffers
    noise = (of.idx_mapping, of.temperature, of.seeds, of.sample_positions, of.draft_step[0])
    drafts: list[int] = best_tokens(sample_with_target_noise(row, None, *noise)).tolist()
    return drafts


@pytest.mark.parametrize("by_columns", [True, False], ids=["the head's columns", "two_stage_argmax disabled"])
@pytest.mark.usefixtures("one_rank")
def test_what_vllm_0_20_samples_from(by_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts either way, of greedy requests and others; that release has no engine on a CPU."""
    monkeypatch.setattr(head_module, "_SCATTERING", frozenset({Eagle3.__module__}))
    draft, hidden, rows = Eagle3(pair()[0].lm_head), states(8), []
    adapter = adapter_of_0_20(draft, DraftHead(draft) if by_columns else None)
    compute_logits = Eagle3.compute_logits

    def counted(self: Eagle3, hidden_states: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_states))
        return compute_logits(self, hidden_states)

    monkeypatch.setattr(Eagle3, "compute_logits", counted)
    drafted = best_tokens(adapter.sample_unstored(hidden)).tolist()
    assert bool(rows) is not by_columns
    row = compute_logits(draft, hidden)
    assert drafted == drafts_of(row, adapter)
    assert drafted != row.argmax(-1).tolist()


@pytest.mark.usefixtures("one_rank")
def test_vllm_0_20_leaves_greedy_rows_to_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows with a head of the target's vocabulary; what few are, here is a matter of the test."""
    hidden = states(8).half()
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)).half()

    def compute(hidden: torch.Tensor, *of_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return few_rows_by_temperature(hidden, weight, *of_rows)

    adapter = adapter_of_0_20(None, SimpleNamespace(logits_by_temperature=compute, offsets=None))
    drafted = best_tokens(adapter.sample_unstored(hidden)).tolist()
    assert drafted == drafts_of(few_rows_product(hidden, weight), adapter)


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.usefixtures("one_rank")
def test_the_argmax_of_the_whole_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_SCATTERING", frozenset({Eagle3.__module__}))
    check_local_argmax(name, 1)


def check_rank(rank: int, ranks: int) -> None:
    from vllm.distributed import get_tensor_model_parallel_world_size

    assert get_tensor_model_parallel_world_size() == ranks
    for kept in ((3, 7, 8, 120, 299), LOW_IDS):
        check_against_the_whole_head(kept, scale=0.5, soft_cap=2.0)
    head_module._SCATTERING = frozenset({Eagle3.__module__})  # type: ignore[assignment]  # this process is the rank's
    for name in DRAFTS:
        check_local_argmax(name, ranks)
    # Every rank has work, though all kept rows come from the first.
    draft, target = pair()
    trimmed, _ = trim(draft, target, *LOW_IDS)
    draft.compute_logits(states())
    assert (draft.lm_head.shard_indices.org_vocab_start_index <= LOW_IDS[0]) == (rank == 0)
    assert len(trimmed.kept.weight) == 64
    assert int(trimmed.kept.weight.any(-1).sum()) == (64 if rank == 0 else 6)


def run_rank(rank: int, ranks: int, port: int, reports: Path) -> None:
    with tensor_parallel(rank, ranks, port):
        try:
            check_rank(rank, ranks)
        except BaseException:
            # Here: as one rank leaves, the connection of the other breaks, and which is heard of is left to chance.
            (reports / f"rank {rank}").write_text(traceback.format_exc())
            raise


def lost_connection(report: str) -> bool:
    """Whether it was PyTorch's own exchange that failed, as it does when the other process is gone or held up."""
    return "torch/distributed/" in [line for line in report.splitlines() if line.startswith("  File ")][-1]


@pytest.mark.slow
def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    for attempt in range(2):
        reports = tmp_path / str(attempt)
        reports.mkdir()
        try:
            spawn(run_rank, (2, free_port(), reports), nprocs=2)
            return
        except (ProcessExitedException, ProcessRaisedException) as error:
            failed = str(error) if isinstance(error, ProcessExitedException) else "the ranks failed:"
        found = {report.name: report.read_text() for report in sorted(reports.iterdir())}
        if attempt or not found or not all(map(lost_connection, found.values())):
            pytest.fail("\n".join([failed, *(f"{rank}: {report}" for rank, report in found.items())]), pytrace=False)


# Refusals


@pytest.mark.usefixtures("one_rank")
def test_a_draft_that_changes_its_logits() -> None:
    draft, target = pair(finish=lambda logits: logits * 2)
    _, head = trim(draft, target, 1, 2)
    with pytest.raises(EagleMRV2Error, match="Model changes the logits of its head"):
        head.keys(states())
    assert draft.compute_logits(states()).shape == (9, VOCAB)  # rows of the whole vocabulary it may change


@pytest.mark.usefixtures("one_rank")
def test_a_quantized_head() -> None:
    draft, target = pair()
    draft.lm_head.quant_method = SimpleNamespace(apply=draft.lm_head.quant_method.apply)
    trim(draft, target, 1, 2)
    with pytest.raises(EagleMRV2Error, match=r"quantized \(SimpleNamespace\)"):
        draft.compute_logits(states())


@pytest.mark.usefixtures("one_rank")
def test_a_head_with_a_bias_and_a_second_head() -> None:
    draft, target = pair()
    trim(draft, target, 1, 2)
    with pytest.raises(EagleMRV2Error, match="head has a bias"):
        draft.logits_processor(draft.lm_head, states(), torch.zeros(VOCAB))
    with pytest.raises(EagleMRV2Error, match="several heads"):
        draft.logits_processor(whole_head(torch.zeros(VOCAB, HIDDEN)), states())


@pytest.mark.usefixtures("one_rank")
def test_no_logits_processor_of_its_own() -> None:
    def refused(draft: Model, target: Model) -> None:
        assert DraftLogits.of(draft, target, local=True) is None
        with pytest.raises(EagleMRV2Error, match="one LogitsProcessor of its own, which Model lacks"):
            trim(draft, target, 1)

    draft, target = pair()
    draft.logits_processor = target.logits_processor
    refused(draft, target)
    draft, target = pair()
    draft.second = pair()[0].logits_processor
    refused(draft, target)
    draft.logits_processor = draft.second = nn.Identity()
    refused(draft, target)


@pytest.mark.usefixtures("one_rank")
def test_tokens_outside_the_vocabulary() -> None:
    with pytest.raises(
        EagleMRV2Error, match=f"a vocabulary with the token {VOCAB}, the draft has a vocabulary of {VOCAB}"
    ):
        trim(*pair(), 1, VOCAB)
