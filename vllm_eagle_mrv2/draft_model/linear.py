"""Multiplies few rows with the draft's weights in Triton kernels.

A draft decode has one row per request.  At batch size 1 every linear layer of the draft is therefore a vector-matrix
product, and reading the weights is all of its work; for a wide head this holds for up to 32 requests.  A custom op
chooses the kernel by the number of rows: a compiled model contains the op whatever the batch, and a captured graph
contains the kernel for its own batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from vllm_eagle_mrv2.config.options import OPTIONS_KEY
from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.draft_model.last_row import row_read
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits, FewRows
from vllm_eagle_mrv2.kernels import few_rows_product as few_rows
from vllm_eagle_mrv2.kernels.device import is_measured
from vllm_eagle_mrv2.kernels.row_product import gated_row_product, row_product
from vllm_eagle_mrv2.releases.surface import class_path

_library = torch.library.Library("vllm_eagle_mrv2", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias, bool behind_attention=False) -> Tensor")
_library.define("gated_linear(Tensor x, Tensor weight, bool behind_attention=False) -> Tensor")

_MODELS = "vllm.model_executor.models"
_ATTENTION = f"{_MODELS}.llama.LlamaAttention"
_GATED = frozenset({f"{_MODELS}.llama.LlamaMLP", f"{_MODELS}.qwen2.Qwen2MLP"})
"""Modules that apply ``act_fn`` between ``gate_up_proj`` and ``down_proj``, and do nothing else."""


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, behind_attention: bool = False
) -> torch.Tensor:
    if _is_one_row(x):
        return row_product(x.reshape(-1), weight, bias).view(*x.shape[:-1], -1)
    if behind_attention and _is_read_by_one_row(x):
        return row_product(x, weight, bias, row_read())
    if bias is None and _are_few(x, weight):
        return few_rows.few_rows_product(x, weight)
    return F.linear(x, weight, bias)


def _gated_linear(x: torch.Tensor, weight: torch.Tensor, behind_attention: bool = False) -> torch.Tensor:
    if _is_one_row(x):
        return gated_row_product(x.reshape(-1), weight).view(*x.shape[:-1], -1)
    if behind_attention and _is_read_by_one_row(x):
        return gated_row_product(x, weight, row_read())
    product = _linear(x, weight, None)
    gated = _half_of(product)
    torch.ops._C.silu_and_mul(gated, product)
    return gated


def _is_one_row(x: torch.Tensor) -> bool:
    return bool(x.numel() == x.shape[-1])


def _is_read_by_one_row(x: torch.Tensor) -> bool:
    return row_read() is not None and x.dim() == 2 and x.stride(1) == 1


def _half_of(product: torch.Tensor) -> torch.Tensor:
    return product.new_empty(*product.shape[:-1], product.shape[-1] // 2)


def _are_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and few_rows.takes(len(x), weight)


def _empty_result(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, behind_attention: bool = False
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _empty_gated_result(x: torch.Tensor, weight: torch.Tensor, behind_attention: bool = False) -> torch.Tensor:
    return _half_of(_empty_result(x, weight))


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_eagle_mrv2::linear", _empty_result, lib=_library)
_library.impl("gated_linear", _gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_eagle_mrv2::gated_linear", _empty_gated_result, lib=_library)


def named_in_caches(vllm_config: Any) -> bool:
    """Whether vLLM caches compiled models of this configuration separately from those of the stock method.

    A cached model that contains this package's op must not be found by an engine without the plugin, nor the other way
    round.  vLLM's cache key includes ``additional_config``, to which a patch adds this package's key.
    """
    return isinstance(vllm_config.additional_config, dict) and OPTIONS_KEY in vllm_config.additional_config


class Installed(NamedTuple):
    """Result of `install`."""

    layers: int = 0  # number of layers that use the kernels
    one_row: bool = False  # whether all layers after the draft's only attention do; see `last_row`
    head: bool = False  # whether the head does
    quantized: tuple[str, ...] = ()  # quantization methods, one name per quantized layer


@torch.inference_mode()
def install(
    draft: torch.nn.Module, target: torch.nn.Module, logits: DraftLogits | None = None, few: FewRows | None = None
) -> Installed:
    """Make a draft's unquantized layers use the kernels; layers shared with the target stay unchanged.

    Args:
        draft: the loaded draft model.
        target: the target model.
        logits: the draft's `DraftLogits`; its ``LogitsProcessor`` then uses the kernels with any head it is given.
            None leaves the head out.
        few: fused head kernel for at most 32 rows, to be compiled ahead; None means matmul.
    """
    shared = {id(module) for module in target.modules()}
    own = [module for module in draft.modules() if id(module) not in shared]
    layers = [module for module in own if _is_linear(module)]
    gated = [module for module in own if _is_gated(module)]
    gates = {id(mlp.gate_up_proj) for mlp in gated}
    behind = _behind_attention(own, gated)
    for layer in layers:
        apply = _apply_gated if id(layer) in gates else _apply
        _multiply(layer, functools.partial(apply, behind_attention=id(layer) in behind))
    for mlp in gated:
        mlp.act_fn = torch.nn.Identity()
    kinds = {
        (
            layer.weight.shape,
            layer.weight.dtype,
            getattr(layer, "bias", None) is None,
            id(layer) in gates,
            id(layer) in behind,
        ): layer
        for layer in layers
    }
    for layer in kinds.values():
        _compile_ahead(layer, gated=id(layer) in gates, behind_attention=id(layer) in behind)
    head: Any = getattr(draft, "lm_head", None)  # most likely the head that the processor is given
    takes_head = logits is not None and _is_linear(head)
    if logits is not None:
        if takes_head:
            _compile_ahead(head, few if head.tp_size == 1 else None)
        _give_view_of_head(logits, few)
    return Installed(
        len(layers),
        one_row=len(behind) > 0 and behind <= {id(layer) for layer in layers},
        head=takes_head,
        quantized=tuple(type(module.quant_method).__name__ for module in own if _is_quantized(module)),
    )


def _is_linear(layer: Any) -> bool:
    """Whether a layer is only a product with unquantized weights, computed by PyTorch on an NVIDIA GPU."""
    from vllm import envs
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method = getattr(layer, "quant_method", None)
    # An embedding qualifies too, because it may be a model's head; a lookup uses another method.
    if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        return False
    # From 0.30 on each layer can have its own GEMM backend.
    product = getattr(method, "_gemm_impl", None) or dispatch_unquantized_gemm()
    weight = layer.weight
    return (
        product is default_unquantized_gemm
        and not envs.VLLM_BATCH_INVARIANT
        and _runs_kernels(weight)
        and weight.dim() == 2
        and weight.stride(1) == 1
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


def _is_quantized(layer: Any) -> bool:
    """Whether a layer multiplies with quantized weights, on an NVIDIA GPU."""
    from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

    method, weight = getattr(layer, "quant_method", None), next(layer.parameters(), None)
    plain = not isinstance(method, LinearMethodBase) or isinstance(method, UnquantizedLinearMethod)
    return not plain and weight is not None and _runs_kernels(weight)


def _behind_attention(modules: list[Any], gated: list[Any]) -> set[int]:
    """Return the ids of the layers after the only attention of a Llama-like draft; none if it has several."""
    attentions = [module for module in modules if class_path(type(module)) == _ATTENTION]
    if not sum(hasattr(module, "impl") for module in modules) == len(attentions) == len(gated) == 1:
        return set()
    return {id(attentions[0].o_proj), id(gated[0].gate_up_proj), id(gated[0].down_proj)}


def _is_gated(module: Any) -> bool:
    """Whether a module's activation can be fused into the product before it."""
    return (
        class_path(type(module)) in _GATED
        and type(module.act_fn).__name__ == "SiluAndMul"
        and _is_linear(module.gate_up_proj)
        and getattr(module.gate_up_proj, "bias", None) is None
        and hasattr(torch.ops._C, "silu_and_mul")
    )


def _runs_kernels(weight: torch.Tensor) -> bool:
    return weight.is_cuda and torch.version.hip is None and is_measured(weight.device)


def _apply(
    layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, *, behind_attention: bool = False
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.vllm_eagle_mrv2.linear(x, layer.weight, bias, behind_attention)
    return product


def _apply_gated(
    layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, *, behind_attention: bool = False
) -> torch.Tensor:
    product: torch.Tensor = torch.ops.vllm_eagle_mrv2.gated_linear(x, layer.weight, behind_attention)
    return product


def _multiply(layer: Any, apply: Callable[..., torch.Tensor]) -> None:
    # A copy keeps its class, which vLLM checks when it replaces weights.
    layer.quant_method = copy.copy(layer.quant_method)
    layer.quant_method.apply = apply


def _compile_ahead(
    layer: Any, few: FewRows | None = None, *, gated: bool = False, behind_attention: bool = False
) -> None:
    """Compile a layer's kernels now, rather than during capture or at the first request of an eager draft."""
    weight, bias = layer.weight.data, getattr(layer, "bias", None)
    several = few_rows.variants(weight) if bias is None else []
    lone = functools.partial(gated_row_product, weight=weight)
    if not gated:
        lone = functools.partial(row_product, weight=weight, bias=bias)

    def launches() -> None:
        for num_rows in (1, *several):
            rows = torch.empty(num_rows, weight.shape[1], dtype=weight.dtype, device="meta")
            if num_rows == 1:
                lone(rows[0])
                if behind_attention:
                    lone(rows, index=torch.empty(1, dtype=torch.int64, device="meta"))
            elif few is not None:
                few(rows, weight)
            else:
                _linear(rows, weight, bias)

    compile_ahead.submit(weight.device, launches)


def _give_view_of_head(logits: DraftLogits, few: FewRows | None) -> None:
    """Make a processor use a view of its head, usually the target's, that multiplies with the kernels."""
    processor, stock = logits.processor, logits.multiply
    seen: tuple[Any, Any] = (None, None)  # the last head and its view
    plain = processor.scale == 1.0 and processor.soft_cap is None and not processor.logits_as_input

    def multiply(lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if lm_head is not seen[0]:
            view = lm_head
            if _is_linear(lm_head):
                view = copy.copy(lm_head)  # shares the dictionary of parameters, so new weights are seen
                _multiply(view, _apply)
                _compile_ahead(view, few if lm_head.tp_size == 1 else None)
            seen = (lm_head, view)
        view = seen[1]
        if logits.few and plain and view is not lm_head and not (args or kwargs) and lm_head.tp_size == 1:
            weight = view.weight[: processor.org_vocab_size]
            as_given = getattr(processor, "head_dtype", None) in (None, hidden_states.dtype)  # exists from 0.27 on
            if as_given and _are_few(hidden_states, weight):
                return logits.few(hidden_states, weight)
        return stock(view, hidden_states, *args, **kwargs)

    logits.multiply = multiply
