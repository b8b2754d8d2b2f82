"""The product of a few rows with a wide weight matrix, such as a draft's head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_eagle_mrv2.kernels.greedy import key_of, order_of
from vllm_eagle_mrv2.kernels.launching import launch
from vllm_eagle_mrv2.kernels.shared_memory import stages

# On an H200 3 to 5 % faster than PyTorch for 32,000 and for 128,256 outputs; slower at 64 rows, equal below 30,000.
MAX_ROWS = 32
MIN_OUTPUTS = 32_000
_OUTPUTS, _BLOCK, _STAGES, _WARPS = 64, 128, 4, 4
_LEAST_ROWS = 16  # of a matrix instruction


# Batch sizes vary: a variant per value would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    rows_ptr,
    rows_stride,
    weight_ptr,
    weight_stride,
    out_ptr,
    out_stride,
    num_rows,
    num_outputs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    KEYS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside, live = (output < num_outputs)[:, None], (row < num_rows)[:, None]
    weights = weight_ptr + output[:, None].to(tl.int64) * weight_stride + column[None, :]
    inputs = rows_ptr + row[:, None] * rows_stride + column[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
        held = (start + column < WIDTH)[None, :]
        weight = tl.load(weights + start, mask=inside & held, other=0.0, eviction_policy="evict_first")
        values = tl.load(inputs + start, mask=live & held, other=0.0)
        total = tl.dot(weight, values.trans(), total)
    if KEYS:
        logits = total.to(rows_ptr.dtype.element_ty).to(tl.float32)  # rounded as they would be stored
        orders = tl.where(inside, order_of(logits), -0x7FFFFFFF)
        best = tl.max(orders, axis=0)
        token = tl.min(tl.where(inside & (orders == best[None, :]), output[:, None], 0x7FFFFFFF), axis=0)
        keys = key_of(best, token.to(tl.int64))
        tl.store(out_ptr + row * out_stride + tl.program_id(0), keys, mask=row < num_rows)
    else:
        out = out_ptr + row[None, :] * out_stride + output[:, None]
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside & (row < num_rows)[None, :])


def takes(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether `few_rows_product` is for so many rows and such weights [N, K]."""
    return 1 < num_rows <= MAX_ROWS and weight.shape[0] >= MIN_OUTPUTS and weight.dtype != torch.float32


def variants(weight: torch.Tensor) -> list[int]:
    """Numbers of rows for each of which a kernel of its own is compiled."""
    return [rows for rows in (_LEAST_ROWS, MAX_ROWS) if takes(rows, weight)]


def few_rows_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``torch.nn.functional.linear`` of up to 32 rows, summed in float32.

    Each program multiplies all rows with some outputs' weights, so that every weight is read once, by one program.

    Args:
        rows: [n, K] of bfloat16 or float16, each contiguous.
        weight: [N, K] of the same dtype, rows contiguous.

    Returns:
        [n, N] of the same dtype.
    """
    out = torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device)
    _launch(rows, weight, out, keys=False)
    return out


def few_rows_keys(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``argmax_keys(few_rows_product(rows, weight))``, without the logits in between.

    Args:
        rows: as of `few_rows_product`.
        weight: likewise; its rows are the tokens.

    Returns:
        [n, blocks] int64, the best of each block of tokens.
    """
    out = torch.empty(len(rows), triton.cdiv(len(weight), _OUTPUTS), dtype=torch.int64, device=rows.device)
    _launch(rows, weight, out, keys=True)
    return out


def _launch(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, keys: bool) -> None:
    num_rows, width = rows.shape
    num_outputs = weight.shape[0]
    padded = max(_LEAST_ROWS, triton.next_power_of_2(num_rows))
    launch(_few_rows_kernel, (triton.cdiv(num_outputs, _OUTPUTS),))(
        rows,
        rows.stride(0),
        weight,
        weight.stride(0),
        out,
        out.stride(0),
        num_rows,
        num_outputs,
        WIDTH=width,
        ROWS=padded,
        OUTPUTS=_OUTPUTS,
        BLOCK=_BLOCK,
        STAGES=stages(_STAGES, (_OUTPUTS + padded) * _BLOCK * weight.element_size(), weight.device),
        KEYS=keys,
        num_warps=_WARPS,
    )
