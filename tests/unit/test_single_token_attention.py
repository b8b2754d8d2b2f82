"""Attention of one token a request against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels import single_token_attention
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention, single_token_attention_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 matrices as if they were integers.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LENGTHS = [1, 2, 63, 64, 65, 128, 255, 256, 257, 300, 512, 513, 700]


def attend(lengths: list[int], heads: int, kv_heads: int, width: int, block_size: int, times: int = 1) -> None:
    n, most = len(lengths), -(-max(*lengths, 1) // block_size)
    generator = torch.Generator().manual_seed(sum(lengths) + heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    blocks = n * most + 3
    # Keys and values of a layer lie in one tensor, and heads behind each other in a projection's row.
    cache = random(blocks, 2, block_size, kv_heads, width)
    table = torch.randperm(blocks, generator=generator)[: n * most].view(n, most).to(DEVICE, torch.int32)
    query = random(n, (heads + 2 * kv_heads) * width)[:, : heads * width].unflatten(-1, (-1, width))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    # Behind the last token lies what nobody may read.
    for request, length in enumerate(lengths):
        if length % block_size:
            cache[table[request, length // block_size].long(), :, length % block_size :] = torch.nan
    attention = SingleTokenAttention(n, heads, kv_heads, width, DEVICE)
    expected = single_token_attention_reference(query, cache[:, 0], cache[:, 1], table, seq_lens, width**-0.5)
    for _ in range(times):
        out = torch.full((n, heads, width), torch.nan, device=DEVICE, dtype=DTYPE)
        attention(query, cache[:, 0], cache[:, 1], table, seq_lens, width**-0.5, out)
        torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
    assert not attention._arrived.any()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_request_alone(length: int) -> None:
    attend([length], 8, 2, 64, 16)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 4, 64), (8, 1, 128), (6, 2, 64), (32, 8, 64), (17, 1, 16)]
)
def test_heads(heads: int, kv_heads: int, width: int) -> None:
    attend([70, 0, 300], heads, kv_heads, width, 32)


@pytest.mark.parametrize("n", [2, 8, 40])
def test_batches_with_padding(n: int) -> None:
    attend([(37 * i) % 150 for i in range(n)] + [0], 4, 2, 16, 16)


def test_again_with_the_same_scratch_memory() -> None:
    attend([600, 257], 4, 1, 64, 16, times=3)


def test_one_variant_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another would be compiled in the middle of serving, or for each size of a graph."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **constants: launched.append((grid[2], constants))

    monkeypatch.setattr(single_token_attention, "_single_token_attention_kernel", Kernel())
    attention = SingleTokenAttention(40, 32, 8, 64, DEVICE)
    cache, some = torch.empty(1, 16, 8, 64, device=DEVICE), torch.empty(40, 32, 64, device=DEVICE)
    for n in (1, 2, 5, 40):
        attention(some[:n], cache, cache, some[:n, 0], some[:n, 0, 0], 1.0, some[:n])
    assert len({splits for splits, _ in launched}) == 4
    assert all(constants == launched[0][1] for _, constants in launched)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize(("n", "length"), [(1, 32_000), (8, 4000), (64, 300), (256, 40)])
@pytest.mark.parametrize("width", [64, 128])
def test_a_draft_of_a_served_model(n: int, length: int, width: int) -> None:
    attend([max(1, length - i) for i in range(n)], 32, 8, width, 16, times=2)
