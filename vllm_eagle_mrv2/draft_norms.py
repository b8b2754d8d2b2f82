"""Lets the kernels of a draft decode overlap across its norms.

Where a norm adds a residual it lies between two products: with a kernel of ours in its place the one behind it comes to
the chip, and reads weights, before the norm has ended; see `kernels.launching.pdl`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_eagle_mrv2 import compile_ahead
from vllm_eagle_mrv2.kernels.add_rms_norm import MAX_WIDTH, add_rms_norm
from vllm_eagle_mrv2.surface import class_path

_RMS_NORM = "vllm.model_executor.layers.layernorm.RMSNorm"
_library = torch.library.Library("vllm_eagle_mrv2", "FRAGMENT")
_library.define("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    normed, total = add_rms_norm(x.reshape(-1, width), residual.reshape(-1, width), weight, eps)
    return normed.view(x.shape), total.view(x.shape)


_library.impl("add_rms_norm", _add_rms_norm, "CompositeExplicitAutograd")
torch.library.register_fake(
    "vllm_eagle_mrv2::add_rms_norm", lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape))
)


def install(modules: list[torch.nn.Module]) -> None:
    """Have those of vLLM's RMS norms among the modules that are no more than that add their residuals by our kernel.

    A norm without a residual stays as it is: those stand where a decode begins, with an embedding before them.
    """
    norms: list[Any] = [module for module in modules if _is_plain(module)]
    for norm in norms:
        norm._forward_method = functools.partial(_forward, norm, norm._forward_method)
    for weight, eps in {norm.weight.shape: (norm.weight, norm.variance_epsilon) for norm in norms}.values():
        row = torch.empty(1, len(weight), dtype=weight.dtype, device="meta")
        compile_ahead.submit(weight.device, functools.partial(add_rms_norm, row, row, weight.data, eps))


def _is_plain(norm: Any) -> bool:
    return (
        class_path(type(norm)) == _RMS_NORM
        and norm.variance_size_override is None
        and isinstance(norm.weight, torch.nn.Parameter)  # else it has none
        and norm.weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and len(norm.weight) <= MAX_WIDTH
    )


def _forward(norm: Any, stock: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    if residual is None or residual.dtype != x.dtype:
        return stock(x, residual)
    return torch.ops.vllm_eagle_mrv2.add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
