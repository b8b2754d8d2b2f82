"""FP8 weights for a draft (``draft_quantization``): which layers get them, and how they are made again.

Drafts only decide how fast tokens come, not which, so their weights may be rounded.  The draft's own layers and its own
head are rounded in place.  A head that it shares with the target is copied, and only the copy is rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels.fp8 import quantized

SCALE = "weight_scale"
"""Name of the parameter that holds the scales [N] float32 of a layer's FP8 weights."""
# Routers have few weights, and other code reads those of latent projections, sparse indexers and attention gates.
_LEFT = frozenset(
    {"gate", "router", "shared_expert_gate", "kv_b_proj", "fused_qkv_a_proj", "wk_weights_proj", "linear_gate"}
)
OPTION = "draft_quantization"
_REMEDY = f"leave {OPTION} out"


def round_layers(draft: torch.nn.Module, own: Mapping[str, Any], *, head: bool = True) -> list[Any]:
    """Round the weights of a draft's own linear layers, and of its own head.

    Args:
        draft: the loaded draft model.
        own: its modules by name, without those of the target, which stay as they are.
        head: whether to round a head too; not one whose rows are still to be copied.

    Returns:
        The layers.

    Raises:
        EagleMRV2Error: the draft has weights that are quantized already, or none that can be.
    """
    from vllm.model_executor.layers.linear import LinearBase

    if torch.version.hip is not None:
        raise EagleMRV2Error(f"{OPTION} multiplies on NVIDIA GPUs, and this vLLM is built for AMD's; {_REMEDY}.")
    linear = {name: layer for name, layer in own.items() if isinstance(layer, LinearBase)}
    for name, layer in linear.items():
        if not is_unquantized(layer) or layer.weight.dim() != 2:
            method = type(layer.quant_method).__name__
            raise EagleMRV2Error(f"{OPTION} rounds a draft's weights, and {name} has its own ({method}); {_REMEDY}.")
        if not layer.weight.numel():
            raise EagleMRV2Error(
                f"{OPTION} rounds a draft's weights, and vLLM has packed them for this CPU ({name}); {_REMEDY}."
            )
    layers = [layer for name, layer in linear.items() if name.rpartition(".")[2] not in _LEFT]
    if not layers:
        raise EagleMRV2Error(
            f"{OPTION} rounds a draft's linear layers, and {type(draft).__name__} has none; {_REMEDY}."
        )
    own_head = getattr(draft, "lm_head", None)
    if head and own_head in own.values() and _has_own_rows(own_head, draft):
        layers.append(own_head)
    for layer in layers:
        round_weights(layer)
    return layers


def is_unquantized(layer: Any) -> bool:
    """Whether vLLM multiplies with a layer's weights as they were loaded; an embedding's too, which may be a head."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    return type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _has_own_rows(head: Any, draft: torch.nn.Module) -> bool:
    """Whether the weights of an unquantized head are not those of an embedding too."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    others = [module for module in draft.modules() if module is not head and hasattr(module, "weight")]
    return (
        isinstance(head, ParallelLMHead)
        and is_unquantized(head)
        and all(module.weight is not head.weight for module in others)
    )


def is_rounded(layer: Any) -> bool:
    """Whether `round_weights` has rounded a layer's weights; vLLM's own FP8 layers have scales of the same name."""
    return hasattr(layer, "rounded_from")


@torch.inference_mode()
def round_weights(layer: Any) -> None:
    """Replace the weights of a layer by FP8 values and scales, and those that vLLM loads into it later as well."""
    values, scales = quantized(layer.weight.data)
    layer.rounded_from = layer.weight.dtype
    layer.weight, layer.weight_scale = _parameter(values), _parameter(scales)
    # A copy keeps its class, which vLLM checks.
    layer.quant_method = copy.copy(layer.quant_method)
    layer.quant_method.process_weights_after_loading = round_weights


def rounded_copy(head: Any) -> Any:
    """Return a head with FP8 values of another head's weights.

    Raises:
        EagleMRV2Error: the weights of the head are quantized.
    """
    if not is_unquantized(head):
        method = type(head.quant_method).__name__
        raise EagleMRV2Error(f"{OPTION} rounds the draft's head, and the target's is quantized ({method}); {_REMEDY}.")
    rounded = copy.copy(head)
    rounded._parameters = dict(head._parameters)
    round_weights(rounded)
    return rounded


@torch.inference_mode()
def renew(rounded: Any, head: Any) -> None:
    """Round the weights of a head again, into the memory of its `rounded_copy`, which captured graphs read."""
    values, scales = quantized(head.weight.data)
    rounded.weight.data.copy_(values)
    rounded.weight_scale.data.copy_(scales)


def bytes_taken(layer: Any) -> int:
    """Bytes of a layer's FP8 weights and their scales."""
    return int(layer.weight.nbytes + layer.weight_scale.nbytes)


def bytes_saved(layer: Any) -> int:
    """By how many bytes they are smaller than the weights were."""
    return int(layer.weight.numel() * layer.rounded_from.itemsize) - bytes_taken(layer)


def _parameter(data: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(data, requires_grad=False)
    parameter.weight_loader = _refuse  # type: ignore[attr-defined]
    return parameter


def _refuse(*_: Any, **__: Any) -> None:
    raise EagleMRV2Error(
        f"{OPTION} has rounded the draft's weights, into which none can be loaded directly; update them by vLLM's "
        f"weight transfer to drafts (from 0.26 on), or {_REMEDY}."
    )
