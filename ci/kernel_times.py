#!/usr/bin/env python3
"""How long our kernels take on this GPU, beside what PyTorch has for the same work, as JSON lines.

    python3 ci/kernel_times.py row_product argmax_keys

Each line is one kernel at one shape: microseconds of ours and of PyTorch's, and for what reads weights the time that
reading them takes at ``--bandwidth`` GB/s.  Calls run in a captured graph, each behind a small kernel, as in a draft
step, and each on other data until more than the L2 cache has gone by; the median of nine replays counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_product
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.row_product import row_product

# Outputs and inputs of a draft's products: an EAGLE head of a 1B target, and of an 8B one.
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
PASSED_BY = 300e6  # bytes of data between two calls on the same, several times an L2 cache
REPLAYS = 9

Work = Callable[[], Any]


def microseconds(calls: list[Work], scratch: torch.Tensor) -> float:
    """Of one call, with the small kernel before it."""
    for call in calls[:2]:
        call()  # compiles, and lets libraries choose
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
    """Tensors of bfloat16, as many as it takes to go past the cache."""
    size = torch.Size(shape).numel() * 2
    count = max(2, int(PASSED_BY // size) + 1)
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(min(count, 100))]


def row_products() -> Iterator[tuple[str, list[Work], list[Work], int]]:
    """Name, calls of ours, calls of PyTorch's, bytes of the weights."""
    for name, (outputs, width) in PRODUCTS.items():
        row, weights = torch.randn(width, device="cuda", dtype=torch.bfloat16), copies_of(outputs, width)
        yield (
            name,
            [partial(row_product, row, weight) for weight in weights],
            [partial(F.linear, row[None], weight) for weight in weights],
            outputs * width * 2,
        )


def few_rows_products() -> Iterator[tuple[str, list[Work], list[Work], int]]:
    """The same for a few rows with a wide head."""
    for outputs, width in ((128_256, 2048), (128_256, 4096), (32_000, 4096)):
        weights = copies_of(outputs, width)
        for num_rows in (2, 8, 16, 32):
            rows = torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)
            yield (
                f"{num_rows} rows, {outputs} x {width}",
                [partial(few_rows_product, rows, weight) for weight in weights],
                [partial(F.linear, rows, weight) for weight in weights],
                outputs * width * 2,
            )


def argmaxes() -> Iterator[tuple[str, list[Work], list[Work], int]]:
    """The same for greedy drafts; logits come from the cache, so that bytes say nothing."""
    for rows in (1, 8, 32):
        for width in (32_000, 128_256):
            logits = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
            yield f"{rows} x {width}", [partial(argmax_keys, logits)] * 20, [partial(logits.argmax, dim=-1)] * 20, 0


KERNELS = {"row_product": row_products, "few_rows_product": few_rows_products, "argmax_keys": argmaxes}


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
