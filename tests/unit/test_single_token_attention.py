"""Attention of one token a request against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from vllm_eagle_mrv2.kernels import single_token_attention
from vllm_eagle_mrv2.kernels.single_token_attention import (
    SingleTokenAttention,
    rotated_reference,
    single_token_attention_reference,
)

pytestmark = [pytest.mark.any_release, pytest.mark.slow]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies bfloat16 matrices as if they were integers.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
LENGTHS = [1, 2, 63, 64, 65, 128, 255, 256, 257, 300, 512, 513, 700]


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few in the interpreter, which runs one program after the other; enough for every split of the lengths here."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(single_token_attention, "multiprocessors", lambda device: 8)


def paged(
    lengths: list[int], kv_heads: int, width: int, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache [blocks, 2, block size, kv_heads, width], its block table and the lengths."""
    pages = [-(-length // block_size) for length in lengths]
    blocks = sum(pages) + 3
    # Keys and values of a layer lie in one tensor.
    cache = torch.randn(blocks, 2, block_size, kv_heads, width, generator=generator).to(DEVICE, DTYPE)
    used = torch.randperm(blocks, generator=generator)[: sum(pages)].to(DEVICE, torch.int32)
    table = torch.nn.utils.rnn.pad_sequence(used.split(pages), batch_first=True)
    return cache, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def attend(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    width: int,
    block_size: int,
    times: int = 1,
    writes: bool = False,
    rotates: bool = False,
) -> SingleTokenAttention:
    n = len(lengths)
    generator = torch.Generator().manual_seed(sum(lengths) + heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPE)

    cache, table, seq_lens = paged(lengths, kv_heads, width, block_size, generator)
    # Heads lie behind each other in a projection's row.
    query = random(n, (heads + 2 * kv_heads) * width)[:, : heads * width].unflatten(-1, (-1, width))
    # Behind the last token lies what nobody may read.
    for request, length in enumerate(lengths):
        if length % block_size:
            cache[table[request, length // block_size].long(), :, length % block_size :] = torch.nan
    attention = SingleTokenAttention(heads, kv_heads, width, DEVICE)
    # RoPE goes by the positions, whatever they have to do with the lengths.
    positions, cos_sin = torch.randint(0, 50, (n,), generator=generator).to(DEVICE), random(50, width)
    angles = {"positions": positions, "cos_sin": cos_sin} if rotates else {}
    turned = rotated_reference(query, **angles) if rotates else query
    complete, own = cache.clone(), []
    if writes:
        position = (seq_lens.long() - 1).clamp(min=0)
        block, offset = table[torch.arange(n, device=DEVICE), position // block_size].long(), position % block_size
        # They lie behind each other in a projection's row; a request without tokens has no slot.
        rows = torch.stack([random(n, (heads + 2 * kv_heads) * width) for _ in range(2)])
        own = [each[:, -kv_heads * width :].unflatten(-1, (-1, width)) for each in rows]
        slots = torch.where(seq_lens > 0, block * block_size + offset, -1)
        stored = [rotated_reference(own[0], **angles), own[1]] if rotates else own
        for request in (seq_lens > 0).nonzero().flatten().tolist():
            for which, each in enumerate(stored):
                complete[block[request], which, offset[request]] = each[request]
                cache[block[request], which, offset[request]] = torch.nan
        own.append(slots)
    expected = single_token_attention_reference(turned, complete[:, 0], complete[:, 1], table, seq_lens, width**-0.5)
    ulp = 0.01 if rotates else 0.0  # a GPU multiplies and adds in one
    for _ in range(times):
        out = torch.full((n, heads, width), torch.nan, device=DEVICE, dtype=DTYPE)
        attention(query, cache[:, 0], cache[:, 1], table, seq_lens, width**-0.5, out, *own, **angles)
        torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
        torch.testing.assert_close(cache, complete, rtol=ulp, atol=ulp, equal_nan=True)
    assert not attention._arrived.any()
    return attention


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


@pytest.mark.parametrize("lengths", [[1], [16], [257], [700], [70, 0, 300]], ids=str)
def test_a_tokens_own_key_and_value_are_written(lengths: list[int]) -> None:
    """And attended to, though the cache did not have them."""
    attend(lengths, 6, 2, 16, 16, times=2, writes=True)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("lengths", [[1], [257], [700], [70, 0, 300]], ids=str)
def test_queries_and_own_keys_are_turned_by_their_positions(lengths: list[int], width: int, writes: bool) -> None:
    attend(lengths, 6, 2, width, 16, times=2, writes=writes, rotates=True)


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("position", "length"), [(0, 3), (255, 258), (700, 700 + 3)])
def test_one_of_a_requests_tokens(position: int, length: int, width: int) -> None:
    """It attends to those up to its own position, whatever the cache has behind it."""
    generator = torch.Generator().manual_seed(position)
    blocks = -(-length // 16)
    cache = torch.randn(2, blocks, 16, 2, width, generator=generator).to(DEVICE, DTYPE)
    cache.flatten(1, 2)[:, position + 1 :] = torch.nan
    query = torch.randn(4, 6, width, generator=generator).to(DEVICE, DTYPE)
    positions = torch.tensor([0, 0, position, 0], device=DEVICE)
    cos_sin = torch.randn(position + 1, width, generator=generator).to(DEVICE, DTYPE)
    table = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[None]
    seq_lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    turned = rotated_reference(query, positions, cos_sin)[2:3]
    expected = single_token_attention_reference(
        turned, cache[0], cache[1], table, seq_lens - length + position + 1, 0.25
    )
    out = torch.full_like(query, 7)
    index = torch.tensor([2], device=DEVICE)
    attention = SingleTokenAttention(6, 2, width, DEVICE)
    for _ in range(2):
        attention(
            query, cache[0], cache[1], table, seq_lens, 0.25, out, positions=positions, cos_sin=cos_sin, index=index
        )
        torch.testing.assert_close(out[2:3].float(), expected, rtol=0.01, atol=0.01)
    assert (out[[0, 1, 3]] == 7).all()
    assert not attention._arrived.any()


@pytest.mark.parametrize("width", [16, 64, 256])
def test_one_token_of_each_request(width: int) -> None:
    """Among other tokens; up to a whole split behind it is not attended to, and padding writes nothing."""
    lengths, rejected = [5, 1, 700, 300, 0], [2, 0, 500, 3, 0]
    generator = torch.Generator().manual_seed(width)
    cache, table, seq_lens = paged(lengths, 2, width, 16, generator)
    cut = torch.tensor(lengths) - torch.tensor(rejected)
    for request, length in enumerate(cut.tolist()):
        for token in range(length, lengths[request]):
            cache[table[request, token // 16].long(), :, token % 16] = torch.nan
    query = torch.randn(9, 6, width, generator=generator).to(DEVICE, DTYPE)
    index = torch.tensor([2, 3, 6, 7, 0], device=DEVICE)
    positions = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    positions[index[:4]] = cut[:4].to(DEVICE) - 1
    cos_sin = torch.randn(700, width, generator=generator).to(DEVICE, DTYPE)
    turned = rotated_reference(query, positions, cos_sin)[index[:4]]
    expected = single_token_attention_reference(
        turned, cache[:, 0], cache[:, 1], table[:4], cut[:4].to(DEVICE, torch.int32), 0.25
    )
    out = torch.full_like(query, 7)
    attention = SingleTokenAttention(6, 2, width, DEVICE)
    for _ in range(2):
        attention(
            query,
            cache[:, 0],
            cache[:, 1],
            table,
            seq_lens,
            0.25,
            out,
            positions=positions,
            cos_sin=cos_sin,
            index=index,
        )
        torch.testing.assert_close(out[index[:4]].float(), expected, rtol=0.01, atol=0.01)
    assert (out[[0, 1, 4, 5, 8]] == 7).all()
    assert not attention._arrived.any()


def test_a_row_without_a_slot_writes_nothing() -> None:
    """As one of a dummy run, whose blocks may be anybody's."""
    attention = SingleTokenAttention(4, 2, 16, DEVICE)
    cache = torch.ones(2, 2, 16, 2, 16, device=DEVICE, dtype=DTYPE)
    row = torch.zeros(1, 4, 16, device=DEVICE, dtype=DTYPE)
    integers = torch.ones(1, 1, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(row)
    own = row[:, :2]
    attention(
        row, cache[:, 0], cache[:, 1], integers, integers[0] * 5, 1.0, out, own, own, torch.tensor([-1], device=DEVICE)
    )
    assert (cache == 1).all()
    torch.testing.assert_close(out, torch.full_like(out, 0.8), rtol=0.01, atol=0.01)


def test_again_with_the_same_scratch_memory() -> None:
    attend([600, 257], 4, 1, 64, 16, times=3)


def _splits(length: int, limit: int, tile: int = 64) -> int:
    tokens = -(-length // max(1, round(length / limit)))
    return max(1, -(-length // max(tile, -(-tokens // tile) * tile)))


@pytest.mark.parametrize("lanes", [2, 128])
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [700],
        [2500],
        [5, 2000, 7, 0, 40],
        [300, 1400],
        [700, 1, 900],
        [1000, 1000, 1000],
        [0, 0, 513],
        [383] * 5,
        [385] * 5,
    ],
    ids=str,
)
def test_programs_go_where_the_tokens_are(lengths: list[int], lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long request among short ones is split as if it were alone."""
    monkeypatch.setattr(single_token_attention, "_LANES", lanes)
    monkeypatch.setattr(single_token_attention, "_PROGRAMS", 16)
    monkeypatch.setattr(single_token_attention, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(torch, "empty", lambda *shape, **where: torch.full(shape, torch.nan, **where))
    attention = attend(lengths, 4, 2, 64, 16, times=2)
    parts = attention._partial.view(2, 8, 2, -1)  # further ones and first ones, of two heads
    further, first = (parts.isfinite().any(-1).sum(1)).tolist()
    limit = -(-max(256, -(-sum(lengths) // 8)) // 64) * 64
    expected = [_splits(length, limit) for length in lengths]
    assert further == [sum(splits - 1 for splits in expected)] * 2
    assert first == [sum(splits > 1 for splits in expected)] * 2
    assert sum(expected) <= len(lengths) + 7


def test_one_variant_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another would be compiled in the middle of serving, or for each size of a graph."""
    launched = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **constants: launched.append((grid, constants))

    monkeypatch.setattr(single_token_attention, "_single_token_attention_kernel", Kernel())
    monkeypatch.setattr(single_token_attention, "multiprocessors", lambda device: 132)
    attention = SingleTokenAttention(32, 8, 64, DEVICE)
    cache, some = torch.empty(1, 16, 8, 64, device=DEVICE), torch.empty(40, 32, 64, device=DEVICE)
    for n in (1, 2, 5, 40):
        attention(some[:n], cache, cache, some[:n, 0], some[:n, 0, 0], 1.0, some[:n])
    assert [programs for (_, programs), _ in launched] == [33, 34, 37, 72]
    assert all(constants == launched[0][1] for _, constants in launched)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize(("n", "length"), [(1, 32_000), (8, 4000), (64, 300), (256, 40)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("writes", "rotates"), [(False, False), (True, False), (True, True)])
def test_a_draft_of_a_served_model(n: int, length: int, width: int, writes: bool, rotates: bool) -> None:
    attend([max(1, length - i) for i in range(n)], 32, 8, width, 16, times=2, writes=writes, rotates=rotates)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("n", [2, 40, 300])
@pytest.mark.parametrize("width", [64, 128])
def test_long_requests_among_short_ones(n: int, width: int) -> None:
    attend([20_000 if i % 130 == 1 else (i * 37) % 400 for i in range(n)], 32, 8, width, 16, times=2)
