"""The sampler that keeps draft logits: what it stores, what it draws, and that its noise is its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from release_under_test import release

pytest.importorskip("triton")

from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.kernels.greedy import best_tokens
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits, sample_with_logits_reference
from vllm_eagle_mrv2.releases import v0_26
from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter

from .stock import ASKED, drafter_on, stock_speculator

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_REQS, STEPS = 8, 3


def draw(
    logits: torch.Tensor, mapping: list[int], seed: int = 0, *, targets: torch.Tensor | None = None, **flags: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens and the draft logits behind them; requests are warm at odd states and greedy at even ones.

    The target has four times as many tokens as there are columns, if these have targets.
    """
    torch.manual_seed(seed)
    columns = logits.shape[1]
    kept = torch.full((MAX_REQS, STEPS, columns if targets is None else 4 * columns), 55.0, device=DEVICE)
    arguments: dict[str, Any] = {"salted": True, "after_temperature": True, "fp64": False} | flags
    sampled = sample_with_logits(
        logits.to(DEVICE),
        torch.tensor(mapping, dtype=torch.int32, device=DEVICE),
        temperature().to(DEVICE),
        torch.arange(MAX_REQS, device=DEVICE) + 1000 * seed,
        torch.arange(len(mapping), device=DEVICE) + 16,
        torch.tensor(1, device=DEVICE),
        kept,
        **arguments,
        offsets=None if targets is None else (targets - torch.arange(columns)).to(DEVICE),
    )
    return best_tokens(sampled).cpu(), kept.cpu()


def temperature() -> torch.Tensor:
    return torch.tensor([0.0, 0.7] * (MAX_REQS // 2))


@pytest.mark.parametrize("vocab", [7, 4096, 5000])
@pytest.mark.parametrize("mapping", [[1], [3, 0, 5], [2, 1, -1, -1], [*range(MAX_REQS), -1]])
@pytest.mark.parametrize("after_temperature", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored(vocab: int, mapping: list[int], after_temperature: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = torch.randn(len(mapping), vocab).to(dtype)
    sampled, kept = draw(logits, mapping, after_temperature=after_temperature)
    expected = torch.full_like(kept, 55.0)
    probabilities = sample_with_logits_reference(
        logits, torch.tensor(mapping), temperature(), torch.tensor(1), expected, after_temperature=after_temperature
    )
    torch.testing.assert_close(kept, expected, rtol=1e-6, atol=1e-6)
    assert bool((probabilities[torch.arange(len(mapping)), sampled] > 0).all())


@pytest.mark.parametrize("mapping", [[1, 3, 5], [0, 2, 4]], ids=["sampled", "greedy"])
@pytest.mark.parametrize("fp64", [False, True])
def test_nan_never_wins(mapping: list[int], fp64: bool) -> None:
    """Nor does a lane beyond the vocabulary beside it: nine blocks make sixteen lanes, the last block is short.

    Red on a GPU alone, where a comparison with NaN lets any lane win; the interpreter forgives it.
    """
    vocab = 2 * 4096 + 5
    logits = torch.randn(3, vocab)
    logits[0] = torch.nan
    logits[1, 4096:] = torch.nan
    logits[2, :] = -torch.inf
    logits[2, 8] = 0.0
    sampled, _ = draw(logits, mapping, fp64=fp64)
    assert sampled[0] == 0
    assert 0 <= sampled[1] < 4096
    assert sampled[2] == 8


@pytest.mark.parametrize("fp64", [False, True])
def test_what_is_drawn(fp64: bool) -> None:
    """Many draws against the probabilities: chi-square with 5 degrees of freedom."""
    rows, probabilities = (
        (20_000 if DEVICE == "cuda" else 250),
        torch.tensor([0.45, 0.3, 0.15, 0.06, 0.02, 0.02], dtype=torch.float64),
    )
    sampled = sample_with_logits(
        probabilities.log().float().expand(rows, -1).contiguous().to(DEVICE),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        torch.ones(1, device=DEVICE),
        torch.tensor([42], device=DEVICE),
        torch.arange(rows, device=DEVICE),
        torch.tensor(0, device=DEVICE),
        None,
        salted=True,
        after_temperature=True,
        fp64=fp64,
    )
    counts = torch.bincount(best_tokens(sampled).cpu(), minlength=6).double()
    expected = probabilities * rows
    assert float(((counts - expected) ** 2 / expected).sum()) < 25.7  # p = 1e-4


@pytest.mark.parametrize("salted", [True, False])
def test_every_draft_step_has_random_numbers_of_its_own(salted: bool) -> None:
    """A position that is drafted again is at an earlier step; only drafts with the target's numbers keep them."""
    rows, logits = 32, torch.zeros(32, 500, device=DEVICE)

    def drawn(step: int) -> torch.Tensor:
        sampled = sample_with_logits(
            logits,
            torch.zeros(rows, dtype=torch.int32, device=DEVICE),
            torch.ones(1, device=DEVICE),
            torch.tensor([42], device=DEVICE),
            torch.arange(rows, device=DEVICE),
            torch.tensor(step, device=DEVICE),
            None,
            salted=salted,
            after_temperature=True,
            fp64=False,
        )
        return best_tokens(sampled)

    of_steps = [drawn(step) for step in (0, 1, 2, 2)]
    assert torch.equal(of_steps[2], of_steps[3])
    for step in (0, 1):
        same = int((of_steps[step] == of_steps[step + 1]).sum())
        assert same < 3 if salted else same == rows


@pytest.mark.parametrize(
    ("method", "changes"), [("block", Version("0.28") <= release < Version("0.33")), ("standard", False)]
)
def test_the_releases_own_sampler_gets_other_seeds_at_each_step(method: str, changes: bool) -> None:
    stock = stock_speculator(draft_logits=torch.zeros(MAX_REQS, STEPS, 7), seeds=torch.arange(MAX_REQS))
    stock.speculative_config.rejection_sample_method = method
    adapter = drafter_on(stock).adapter
    seeds = []
    for step in (0, 1, 2):
        adapter.buffers.draft_step.fill_(step)
        seeds.append(adapter.noise_seeds().tolist())
    assert seeds[0] == [*range(MAX_REQS)]
    assert (len({*map(tuple, seeds)}) == 3) is changes


def test_greedy_requests_take_the_first_of_the_largest() -> None:
    logits = torch.zeros(2, 5000)
    logits[:, [4200, 4300, 30]] = 1.0
    assert draw(logits, [0, 2])[0].tolist() == [30, 30]
    assert draw(logits, [0, -1])[0].tolist() == [30, 30]


@pytest.mark.parametrize("vocab", [7, 600, 5000])
@pytest.mark.parametrize("fp64", [False, True])
def test_columns_of_a_draft_vocabulary(vocab: int, fp64: bool) -> None:
    """The same drafts as of a row of the target's vocabulary that has -inf for all other tokens."""
    torch.manual_seed(vocab)
    targets = 2 * vocab + torch.randperm(2 * vocab)[:vocab]
    logits = torch.randn(9, vocab).round(decimals=1).bfloat16()  # many are equal
    logits[7, ::2] = torch.nan
    nothing = [5, 8]  # to choose from, sampled and greedily
    logits[nothing] = -torch.inf
    rows = torch.full((9, 4 * vocab), -torch.inf, dtype=torch.bfloat16).index_copy_(1, targets, logits)
    arguments = (
        torch.tensor([*range(MAX_REQS), -1], dtype=torch.int32, device=DEVICE),
        temperature().to(DEVICE),
        torch.arange(MAX_REQS, device=DEVICE),
        torch.arange(9, device=DEVICE) + 16,
        torch.tensor(1, device=DEVICE),
        None,
    )
    flags: dict[str, Any] = {"salted": False, "after_temperature": True, "fp64": fp64}
    offsets = (targets - torch.arange(vocab)).to(DEVICE)
    mapped = best_tokens(sample_with_logits(logits.to(DEVICE), *arguments, **flags, offsets=offsets))
    whole = best_tokens(sample_with_logits(rows.to(DEVICE), *arguments, **flags))
    whole[nothing] = targets.min().to(DEVICE)  # a token of the draft's all the same
    assert mapped.tolist() == whole.tolist()


@pytest.mark.parametrize("after_temperature", [True, False])
@pytest.mark.parametrize(("vocab", "rows"), [(7, 1), (600, 9), (5000, 9)])
def test_columns_of_a_draft_vocabulary_are_stored(vocab: int, rows: int, after_temperature: bool) -> None:
    """As rows of the target's vocabulary are: with -inf for all other tokens, whatever was there."""
    torch.manual_seed(vocab)
    targets = 2 * vocab + torch.randperm(2 * vocab)[:vocab]
    logits = torch.randn(rows, vocab)
    whole = torch.full((rows, 4 * vocab), -torch.inf).index_copy_(1, targets, logits)
    mapping = [5] if rows == 1 else [*reversed(range(MAX_REQS)), -1]
    drafts, stored = draw(logits, mapping, targets=targets, after_temperature=after_temperature, fp64=True)
    expected, as_rows = draw(whole, mapping, after_temperature=after_temperature, fp64=True)
    assert drafts.tolist() == expected.tolist()
    assert torch.equal(stored, as_rows)
    assert bool(stored.isinf().any())


def test_salted_noise_is_another() -> None:
    """The same (seed, position) draw other tokens; without the salt the same."""
    logits = torch.zeros(8, 4000)
    states = [1, 3, 5, 7, 1, 3, 5, 7]
    salted, plain, again = (draw(logits, states, salted=flag)[0] for flag in (True, False, False))
    assert plain.tolist() == again.tolist()
    assert int((salted == plain).sum()) == 0


@pytest.mark.parametrize("fp64", [False, True])
def test_the_noise_without_salt_is_that_of_the_installed_release(fp64: bool) -> None:
    """vLLM 0.20 accepts a draft that is the token which the target samples: both must use the same numbers there."""
    gumbel = pytest.importorskip("vllm.v1.worker.gpu.sample.gumbel")
    import inspect

    parameters = inspect.signature(gumbel.gumbel_sample).parameters
    if "is_drafting" in parameters:
        pytest.skip("from 0.29 on vLLM's own sampler salts the drafts' noise, and ours is not used")
    if not fp64 and "use_fp64" in parameters:
        pytest.skip("in float32 the releases' formulas differ, and nothing depends on them")
    logits = torch.randn(6, 3000, device=DEVICE)
    mapping = torch.tensor([1, 3, 5, 7, 0, 2], dtype=torch.int32, device=DEVICE)
    seeds, positions = torch.arange(MAX_REQS, device=DEVICE), torch.arange(6, device=DEVICE) + 30
    heat = temperature().to(DEVICE)
    extra = {"use_fp64": True} if "use_fp64" in parameters else {}
    stock = gumbel.gumbel_sample(logits, mapping, heat, seeds, positions, apply_temperature=True, **extra)
    step = torch.tensor(0, device=DEVICE)
    ours = sample_with_logits(
        logits, mapping, heat, seeds, positions - 1, step, None, salted=False, after_temperature=True, fp64=True
    )
    assert best_tokens(ours).tolist() == stock.tolist()


class SharesNumbers(ReleaseAdapter):
    """Of a release whose sampler does."""

    release = v0_26.RELEASE
    samples_apart = False


def test_drafts_share_no_random_number_with_the_target() -> None:
    """On releases below 0.29."""
    stock = stock_speculator(
        device=DEVICE,
        model=SimpleNamespace(compute_logits=lambda hidden_states: hidden_states),
        draft_logits=torch.zeros(MAX_REQS, STEPS, 4000, device=DEVICE),
        idx_mapping=torch.tensor([1, 3, 5, 7, 1, 3, 5, 7], dtype=torch.int32, device=DEVICE),
        temperature=temperature().to(DEVICE),
        seeds=torch.arange(MAX_REQS, device=DEVICE),
    )
    adapter = SharesNumbers(stock, Options(), ASKED)
    buffers = adapter.buffers
    buffers.sample_positions.copy_(torch.arange(8) + 16)
    buffers.draft_step.fill_(1)
    logits = torch.zeros(8, 4000, device=DEVICE)
    sampled = best_tokens(adapter.sample(logits)).cpu()
    with_target = draw(logits.cpu(), buffers.idx_mapping.tolist(), salted=False)[0]  # after the last known token
    assert int((sampled == with_target).sum()) == 0
