#!/usr/bin/env python3
"""Times this package's kernels on this GPU against PyTorch's for the same work, as JSON lines.

Attention is compared with FlashAttention 3 as vLLM calls it, including its scheduling kernel; without vLLM it is
skipped.

    python3 benchmarks/kernel_times.py row_product argmax_keys

Each line is one kernel at one shape: microseconds of this package's kernel and of PyTorch's and, for kernels that read
weights, the time to read them at ``--bandwidth`` GB/s.  Calls run in a captured graph, each after a small kernel, as in
a draft step.  Each call uses other data until more than the L2 cache has been read.  The result is the median of nine
replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from vllm_eagle_mrv2.draft_model import linear  # noqa: F401, defines the op
from vllm_eagle_mrv2.kernels.few_rows_product import MAX_ROWS, few_rows_by_temperature, few_rows_keys, few_rows_product
from vllm_eagle_mrv2.kernels.filter_logits import filter_logits
from vllm_eagle_mrv2.kernels.fp8 import quantized
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.row_product import gated_row_product, row_product
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits, sample_with_target_noise
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention

# (outputs, inputs) of a draft's products, for an EAGLE head of a 1B target and of an 8B target.
PRODUCTS = {
    "1b fc": (2048, 4096),
    "1b qkv": (3072, 2048),
    "1b o": (2048, 2048),
    "1b gate_up": (16384, 2048),
    "1b down": (2048, 8192),
    "1b head": (128256, 2048),
    "1b head of 32k": (32768, 2048),
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head of 32k": (32000, 4096),
}
BATCHES = {
    f"{n} x {length}": [length] * n
    for n, length in ((1, 200), (1, 4000), (1, 32_000), (8, 200), (8, 4000), (32, 200), (32, 4000), (64, 200))
}
BATCHES |= {f"{n} x 200 and 1 x 32000": [200] * n + [32_000] for n in (7, 31)}
BATCHES |= {f"{n} x 128 to 1280": [128 + 37 * i % n * 1152 // (n - 1) for i in range(n)] for n in (8, 32, 64, 128)}
"""Name of a batch -> lengths of its requests, for attention."""
PASSED_BY = 300e6  # bytes between two calls on the same data, several times an L2 cache
REPLAYS = 9

Work = Callable[[], Any]
Cases = Iterator[tuple[str, list[Work], list[Work], int]]
"""(name, calls of this package's kernel, calls of PyTorch's, bytes of the weights)."""


def microseconds(calls: list[Work], scratch: torch.Tensor) -> float:
    """Microseconds of one call, including the small kernel before it."""
    for call in calls[:2]:
        call()  # compiles, and lets libraries select their kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            scratch.add_(1)
            call()
    times: list[float] = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:]) * 1e3 / len(calls)


def copies_of(*shape: int) -> list[torch.Tensor]:
    """bfloat16 tensors of a shape, as many as exceed the L2 cache."""
    size = torch.Size(shape).numel() * 2
    count = max(2, int(PASSED_BY // size) + 1)
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(min(count, 100))]


def row_products() -> Cases:
    """Products of a single row with each of a draft's weights."""
    for name, (outputs, width) in PRODUCTS.items():
        row, weights = torch.randn(width, device="cuda", dtype=torch.bfloat16), copies_of(outputs, width)
        yield (
            name,
            [partial(row_product, row, weight) for weight in weights],
            [partial(F.linear, row[None], weight) for weight in weights],
            outputs * width * 2,
        )


def gated_products() -> Cases:
    """Gated products of a single row, against `row_product` followed by PyTorch's activation."""

    def apart(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gate, up = row_product(row, weight).chunk(2)
        return F.silu(gate) * up

    for name in ("1b gate_up", "8b gate_up"):
        outputs, width = PRODUCTS[name]
        row, weights = torch.randn(width, device="cuda", dtype=torch.bfloat16), copies_of(outputs, width)
        yield (
            name,
            [partial(gated_row_product, row, weight) for weight in weights],
            [partial(apart, row, weight) for weight in weights],
            outputs * width * 2,
        )


def fp8_products(num_rows: int) -> Cases:
    """Products with FP8 weights, by the kernel that a draft uses, against PyTorch's with the whole weights."""
    for name, (outputs, width) in PRODUCTS.items():
        rows, weights = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16), copies_of(outputs, width)
        op = torch.ops.vllm_eagle_mrv2.linear
        yield (
            f"{num_rows} rows, {name}",
            [partial(op, rows, values, None, False, scale) for values, scale in map(quantized, weights)],
            [partial(F.linear, rows, weight) for weight in weights],
            outputs * width,
        )


def few_rows(ours: Callable[..., Any], torchs: Callable[..., Any]) -> Cases:
    """Products of a few rows with a wide head, by two functions of rows and weights."""
    for outputs, width in ((128_256, 2048), (128_256, 4096), (32_000, 4096)):
        weights = copies_of(outputs, width)
        for num_rows in (2, 8, 16, 32):
            rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
            yield (
                f"{num_rows} rows, {outputs} x {width}",
                [partial(ours, rows, weight) for weight in weights],
                [partial(torchs, rows, weight) for weight in weights],
                outputs * width * 2,
            )


def argmax_of_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PyTorch's product, followed by this package's argmax of each row."""
    return argmax_keys(F.linear(rows, weight))


def sampled() -> Cases:
    """Greedy drafts on vLLM 0.20, which samples them: without stored logits, against PyTorch's product."""
    zeros, temperature = torch.zeros(MAX_ROWS, device="cuda", dtype=torch.int64), torch.zeros(1, device="cuda")

    def drafts(rows: torch.Tensor, weight: torch.Tensor, *, ours: bool) -> torch.Tensor:
        of_rows = (zeros[: len(rows)], temperature)
        logits, best = few_rows_by_temperature(rows, weight, *of_rows) if ours else (F.linear(rows, weight), None)
        return sample_with_target_noise(logits, None, *of_rows, zeros, zeros[: len(rows)], zeros[0], best)

    return few_rows(partial(drafts, ours=True), partial(drafts, ours=False))


def filtered_drafts(*, fp64: bool) -> Cases:
    """Sampled drafts with top-p, filtered, drawn and stored, against sorting and PyTorch's random numbers.

    Both begin with a copy of the logits, which are in the L2 cache.
    """
    for num_rows, width in product((1, 8, 64), (32_000, 128_256)):
        master = torch.randn(num_rows, width, device="cuda") * 3
        rows = (master, torch.empty_like(master), torch.zeros(num_rows, 1, width, device="cuda"))
        states = torch.arange(num_rows, device="cuda")
        temperature, top_p = (torch.full((num_rows,), value, device="cuda") for value in (0.7, 0.9))
        top_k = torch.full_like(states, width, dtype=torch.int32)
        ours = partial(filter_and_draw, *rows, states, temperature, top_k, top_p, fp64=fp64)
        yield f"{num_rows} x {width}", [ours] * 20, [partial(sort_and_draw, *rows)] * 20, 0


def filter_and_draw(
    master: torch.Tensor,
    logits: torch.Tensor,
    stored: torch.Tensor,
    states: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    fp64: bool,
) -> torch.Tensor:
    """Draw one token of each row [n, V] of ``master`` by this package's kernels, in the form of `how_drafted`."""
    filter_logits(logits.copy_(master), states, temperature, top_k, top_p)
    return sample_with_logits(
        logits,
        states,
        temperature,
        states,
        states,
        states[0],
        stored,
        salted=True,
        after_temperature=True,
        fp64=fp64,
    )


def sort_and_draw(master: torch.Tensor, logits: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Do the same with PyTorch, at temperature 0.7 with top-p 0.9."""
    values, order = logits.copy_(master).div_(0.7).sort(dim=-1, descending=True)
    shares = values.softmax(-1)
    out = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, shares.cumsum(-1) - shares >= 0.9)
    stored[:, 0] = logits.masked_fill_(out, float("-inf"))
    return logits.softmax(-1).div_(torch.empty_like(logits).exponential_()).argmax(-1)


def argmaxes() -> Cases:
    """Argmax of greedy drafts; the logits are in the L2 cache, so the bytes are given as 0."""
    for rows in (1, 8, 32):
        for width in (32_000, 128_256):
            logits = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            yield f"{rows} x {width}", [partial(argmax_keys, logits)] * 20, [partial(logits.argmax, dim=-1)] * 20, 0


def attentions(*, writes: bool, turns: bool = False) -> Cases:
    """Attention of one token per request, with 32 query heads and 8 KV heads in pages of 16 tokens.

    Args:
        writes: whether the keys and values of the tokens must still be written, for which vLLM has a kernel.
        turns: whether RoPE must still be applied to keys and queries, for which vLLM has another kernel.
    """
    if find_spec("vllm") is None:
        return
    from vllm._custom_ops import reshape_and_cache_flash, rotary_embedding
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    heads, kv_heads, page = 32, 8, 16
    for width, (name, of) in product((64, 128), BATCHES.items()):
        pages = [-(-length // page) for length in of]
        caches = copies_of(sum(pages), 2, page, kv_heads, width)
        free = torch.randperm(sum(pages), device="cuda", dtype=torch.int32)
        table = torch.nn.utils.rnn.pad_sequence(free.split(pages), batch_first=True)
        query = torch.randn(len(of), heads, width, device="cuda", dtype=torch.bfloat16)
        lengths = torch.tensor(of, device="cuda", dtype=torch.int32)
        starts = torch.arange(len(of) + 1, device="cuda", dtype=torch.int32)
        attention = SingleTokenAttention(heads, kv_heads, width, query.device)
        last, one = lengths.long() - 1, torch.ones(1, device="cuda")
        slots = table[torch.arange(len(of), device="cuda"), last // page].long() * page + last % page
        keys_and_values = torch.randn(2, len(of), kv_heads, width, device="cuda", dtype=torch.bfloat16)
        own = (*keys_and_values, slots) if writes else ()
        cos_sin = torch.ones(max(of), width, device="cuda", dtype=torch.bfloat16)
        cos_sin[:, width // 2 :] = 0  # each call rotates them again, in place
        angles = {"positions": last, "cos_sin": cos_sin} if turns else {}
        mine = (query, table, lengths)
        all_of = (*mine, starts, max(of))

        def ours(
            cache: torch.Tensor, attention: Any = attention, of: Any = mine, own: Any = own, angles: Any = angles
        ) -> Any:
            out, scale = torch.empty_like(of[0]), of[0].shape[-1] ** -0.5
            return attention(of[0], *cache.unbind(1), *of[1:], scale, out, *own, **angles)

        def theirs(
            cache: torch.Tensor, of: Any = all_of, own: Any = own, scale: Any = one, angles: Any = angles
        ) -> Any:
            query, table, lengths, starts, longest = of
            if angles:
                rows = (query.flatten(1), own[0].flatten(1))
                rotary_embedding(angles["positions"], *rows, query.shape[-1], angles["cos_sin"], True)
            if own:
                reshape_and_cache_flash(*own[:2], *cache.unbind(1), own[2], "auto", scale, scale)
            schedule = get_scheduler_metadata(
                batch_size=len(query),
                max_seqlen_q=1,
                max_seqlen_k=longest,
                num_heads_q=heads,
                num_heads_kv=kv_heads,
                headdim=query.shape[-1],
                cache_seqlens=lengths,
                qkv_dtype=query.dtype,
                cu_seqlens_q=starts,
                page_size=page,
                causal=True,
                num_splits=32,
            )
            keys, values = cache.unbind(1)
            return flash_attn_varlen_func(
                q=query,
                k=keys,
                v=values,
                out=torch.empty_like(query),
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=longest,
                softmax_scale=query.shape[-1] ** -0.5,
                causal=True,
                block_table=table,
                scheduler_metadata=schedule,
                fa_version=3,
                num_splits=32,
            )

        size = sum(of) * 2 * kv_heads * width * 2
        yield (
            f"{name}, heads of {width}",
            [partial(ours, cache) for cache in caches],
            [partial(theirs, cache) for cache in caches],
            size,
        )


KERNELS: dict[str, Callable[[], Cases]] = {
    "row_product": row_products,
    "gated_row_product": gated_products,
    "one_row_fp8": partial(fp8_products, 1),
    "few_rows_fp8": partial(fp8_products, 8),
    "many_rows_fp8": partial(fp8_products, 512),
    "few_rows_product": partial(few_rows, few_rows_product, F.linear),
    "few_rows_keys": partial(few_rows, few_rows_keys, argmax_of_product),
    "few_rows_by_temperature": sampled,
    "argmax_keys": argmaxes,
    "filtered_drafts": partial(filtered_drafts, fp64=False),
    "filtered_drafts_fp64": partial(filtered_drafts, fp64=True),
    "single_token_attention": partial(attentions, writes=False),
    "writing_attention": partial(attentions, writes=True),
    "turning_attention": partial(attentions, writes=True, turns=True),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(KERNELS)}; all by default")
    parser.add_argument("--bandwidth", type=float, default=4300.0, help="GB/s; an H200 reaches 4300")
    options = parser.parse_args()
    scratch = torch.zeros(2048, device="cuda")
    empty = microseconds([lambda: None] * 20, scratch)
    print(
        json.dumps(
            {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "small_kernel_us": round(empty, 2)}
        )
    )
    for kernel in options.kernels or KERNELS:
        for name, ours, torchs, size in KERNELS[kernel]():
            line = {"kernel": kernel, "case": name}
            for side, calls in (("ours_us", ours), ("torch_us", torchs)):
                line[side] = round(microseconds(calls, scratch) - empty, 2)
            if size:
                line["floor_us"] = round(size / options.bandwidth / 1e3, 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
