"""Multiplies with the draft's weights: few rows in Triton kernels, and FP8 weights with any number of rows.

A draft decode has one row per request.  At batch size 1 every linear layer of the draft is therefore a vector-matrix
product, and reading the weights is all of its work; for a wide head this holds for up to 32 requests.  A custom op
chooses the kernel by the number of rows: a compiled model contains the op whatever the batch, and a captured graph
contains the kernel for its own batch.

More rows, or narrow and long FP8 weights, are left to vLLM's product of FP8 matrices, for which the rows are rounded as
well; products that widen the weights, be it Triton's or Marlin's, take longer for these.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from vllm_eagle_mrv2.classes import class_path
from vllm_eagle_mrv2.config.options import OPTIONS_KEY
from vllm_eagle_mrv2.draft_model import compile_ahead, fp8
from vllm_eagle_mrv2.draft_model.logits_processor import DraftLogits, FewRows
from vllm_eagle_mrv2.draft_model.rows_read import RowsRead, rows_read
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels import few_rows_product as few_rows
from vllm_eagle_mrv2.kernels.device import is_measured
from vllm_eagle_mrv2.kernels.fp8 import dequantized
from vllm_eagle_mrv2.kernels.row_product import gated_row_product, row_product

_library = torch.library.Library("vllm_eagle_mrv2", "DEF")
_FURTHER = "Tensor? scale=None, Tensor? index=None, Tensor? count=None"
_library.define(f"linear(Tensor x, Tensor weight, Tensor? bias, {_FURTHER}) -> Tensor")
_library.define(f"gated_linear(Tensor x, Tensor weight, {_FURTHER}) -> Tensor")
_library.define(f"qkv_linear(Tensor x, Tensor weight, Tensor? bias, SymInt queries, {_FURTHER}) -> Tensor")

_ROWS_READ = "rows_read"  # attribute of the layers that multiply only these for all or some of their outputs
_WORTH_SPLITTING = 15_000_000_000
"""Multiplications that cost more than a second product for picked rows: about 45 us on an H100."""
_HALF = (torch.bfloat16, torch.float16)
_MODELS = "vllm.model_executor.models"
_ATTENTION = f"{_MODELS}.llama.LlamaAttention"
_GATED = frozenset({f"{_MODELS}.llama.LlamaMLP", f"{_MODELS}.qwen2.Qwen2MLP"})
"""Modules that apply ``act_fn`` between ``gate_up_proj`` and ``down_proj``, and do nothing else."""


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · weightᵀ + bias, [..., N].

    Args:
        x: [..., K].
        weight: [N, K], of the dtype of ``x``, or e4m3 with ``scale``.
        bias: [N], or None.
        scale: [N] float32: the weights of a row are ``weight`` times its scale.
        index: with ``count``, of a `RowsRead` over [n, K]; the other rows of the result are undefined.
        count: likewise.
    """
    rows = rows_read(index, count)
    if rows is not None and not len(rows):
        return x.new_empty(*x.shape[:-1], len(weight))
    if rows is None or _is_one_row(x):
        return _product(x, weight, bias, scale)
    if len(rows) == 1 and _takes_row(x, scale):
        return row_product(x, weight, bias, rows, scale)
    return _spread(_product(x.index_select(0, rows), weight, bias, scale), rows, len(x))


def _gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return silu(a) * b, [..., N / 2], where a and b are the halves of x · weightᵀ; arguments as of `_linear`."""
    rows = rows_read(index, count)
    if rows is not None and not len(rows):
        return x.new_empty(*x.shape[:-1], len(weight) // 2)
    if rows is None or _is_one_row(x):
        return _gated_product(x, weight, scale)
    if len(rows) == 1 and _takes_row(x, scale):
        return gated_row_product(x, weight, rows, scale)
    return _spread(_gated_product(x.index_select(0, rows), weight, scale), rows, len(x))


def _qkv_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    queries: int,
    scale: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x · weightᵀ + bias, [n, N], whose first outputs are queries, undefined in rows that are not read.

    Keys and values are those of all rows.

    Args:
        x: [n, K].
        weight: as for `_linear`.
        bias: likewise.
        queries: number of outputs that are queries.
        scale: likewise.
        index: likewise.
        count: likewise.
    """
    rows = rows_read(index, count)
    if rows is None or (len(x) - len(rows)) * queries * x.shape[1] < _WORTH_SPLITTING:
        return _product(x, weight, bias, scale)

    def multiply(x: torch.Tensor, outputs: slice) -> torch.Tensor:
        return _product(x, weight[outputs], *(None if each is None else each[outputs] for each in (bias, scale)))

    product = x.new_empty(len(x), len(weight))
    product[:, queries:] = multiply(x, slice(queries, None))
    if len(rows):
        product[:, :queries].index_copy_(0, rows, multiply(x.index_select(0, rows), slice(queries)))
    return product


def _spread(product: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return [num_rows, N], of which only the given rows, those of the product, are defined."""
    return product.new_empty(num_rows, product.shape[1]).index_copy_(0, rows, product)


def _takes_row(x: torch.Tensor, scale: torch.Tensor | None) -> bool:
    return x.stride(-1) == 1 and (scale is None or x.is_cuda)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    if scale is not None and not x.is_cuda:
        return F.linear(x, dequantized(weight, scale, x.dtype), bias)
    if _is_one_row(x):
        return row_product(x.reshape(-1), weight, bias, scale=scale).view(*x.shape[:-1], -1)
    if scale is not None:
        return _several_rows(x.reshape(-1, x.shape[-1]), weight, bias, scale).view(*x.shape[:-1], -1)
    if bias is None and _are_few(x, weight):
        return few_rows.few_rows_product(x, weight)
    return F.linear(x, weight, bias)


def _gated_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if _is_one_row(x):
        return gated_row_product(x.reshape(-1), weight, scale=scale).view(*x.shape[:-1], -1)
    product = _product(x, weight, None, scale)
    gated = _half_of(product)
    torch.ops._C.silu_and_mul(gated, product)
    return gated


def _several_rows(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor
) -> torch.Tensor:
    """Product of rows [n, K] with FP8 weights [N, K]."""
    if bias is None and len(rows) <= few_rows.MAX_ROWS and rows.stride(1) == 1 and _widens(weight, rows.dtype):
        return few_rows.few_rows_product(rows, weight, scale)
    if _multiplies_fp8(weight, rows.dtype):
        from vllm import _custom_ops

        values, scales = _custom_ops.scaled_fp8_quant(rows.contiguous(), use_per_token_if_dynamic=True)
        product: torch.Tensor = _custom_ops.cutlass_scaled_mm(
            values, weight.t(), scales, scale[:, None], rows.dtype, bias
        )
        return product
    return F.linear(rows, dequantized(weight, scale, rows.dtype), bias)


def _widens(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a few rows of a dtype are multiplied with widened FP8 weights."""
    return dtype in _HALF and (few_rows.leads_with_fp8(weight) or not _multiplies_fp8(weight, dtype))


def _multiplies_fp8(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether vLLM's product of FP8 matrices takes rows of a dtype and FP8 weights."""
    return dtype in _HALF and not any(size % 16 for size in weight.shape) and _has_fp8_product(weight.device)


@functools.cache
def _has_fp8_product(device: torch.device) -> bool:
    from vllm import _custom_ops

    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return bool(_custom_ops.cutlass_scaled_mm_supports_fp8(10 * major + minor))


def _is_one_row(x: torch.Tensor) -> bool:
    return bool(x.numel() == x.shape[-1])


def _half_of(product: torch.Tensor) -> torch.Tensor:
    return product.new_empty(*product.shape[:-1], product.shape[-1] // 2)


def _are_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and few_rows.takes(len(x), weight)


def _empty_result(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _empty_gated_result(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return _half_of(_empty_result(x, weight))


_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_eagle_mrv2::linear", _empty_result, lib=_library)
_library.impl("gated_linear", _gated_linear, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_eagle_mrv2::gated_linear", _empty_gated_result, lib=_library)
_library.impl("qkv_linear", _qkv_linear, "CompositeExplicitAutograd")
torch.library.register_fake("vllm_eagle_mrv2::qkv_linear", _empty_result, lib=_library)


def named_in_caches(vllm_config: Any) -> bool:
    """Whether vLLM caches compiled models of this configuration separately from those of the stock method.

    A cached model that contains this package's op must not be found by an engine without the plugin, nor the other way
    round.  vLLM's cache key includes ``additional_config``, to which a patch adds this package's key.
    """
    return isinstance(vllm_config.additional_config, dict) and OPTIONS_KEY in vllm_config.additional_config


class Installed(NamedTuple):
    """Result of `install`."""

    layers: int = 0  # number of layers that use the kernels
    of_read_rows: int = 0  # weights that multiply only the rows that are read; see `rows_read`
    head: bool = False  # whether the head does
    quantized: tuple[str, ...] = ()  # quantization methods, one name per quantized layer
    rounded: tuple[Any, ...] = ()  # layers whose weights became FP8
    view_of_head: HeadView | None = None  # what the draft multiplies with in place of its head


class HeadView:
    """A view of the draft's head, usually the target's, that multiplies with the kernels.

    Args:
        logits: the draft's `DraftLogits`, whose product this replaces.
        few: fused head kernel for at most 32 rows; None means matmul.
        rounds: whether to multiply with an FP8 copy of the head's weights.
    """

    def __init__(self, logits: DraftLogits, few: FewRows | None, *, rounds: bool) -> None:
        self.copied = False
        """Whether the view has its own weights, which are FP8."""
        self.head: Any = None
        self.view: Any = None
        self._logits, self._few, self._rounds = logits, few, rounds
        self._multiply = logits.multiply
        processor = logits.processor
        self._plain = processor.scale == 1.0 and processor.soft_cap is None and not processor.logits_as_input
        logits.multiply = self._product

    def renew(self) -> None:
        """Copy weights that were replaced again, into the same memory."""
        if self.copied:
            fp8.renew(self.view, self.head)

    def _product(self, lm_head: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if lm_head is not self.head:
            self.head, self.view = lm_head, self._view_of(lm_head, hidden_states.dtype)
        view, logits, processor = self.view, self._logits, self._logits.processor
        if logits.few and self._plain and view is not lm_head and not (args or kwargs) and lm_head.tp_size == 1:
            weight, scale = view.weight[: processor.org_vocab_size], getattr(view, fp8.SCALE, None)
            widens = scale is None or (hidden_states.is_cuda and _widens(weight, hidden_states.dtype))
            if widens and _keeps_dtype(processor, hidden_states.dtype) and _are_few(hidden_states, weight):
                return logits.few(hidden_states, weight, scale=scale)
        return self._multiply(view, hidden_states, *args, **kwargs)

    def _view_of(self, lm_head: Any, dtype: torch.dtype) -> Any:
        if self._rounds and not _keeps_dtype(self._logits.processor, dtype):
            raise EagleMRV2Error(
                "draft_quantization rounds the draft's head, which head_dtype wants in another dtype than the model; "
                "leave one of them out."
            )
        if fp8.is_rounded(lm_head):
            view = copy.copy(lm_head)
        elif self._rounds:
            if self.copied:
                raise EagleMRV2Error("the draft has several heads; leave draft_quantization out.")
            # In the profile run; a copy made during a capture would be made again by each replay.
            assert not (lm_head.weight.is_cuda and torch.cuda.is_current_stream_capturing())
            view, self.copied = fp8.rounded_copy(lm_head), True
        elif _is_linear(lm_head):
            view = copy.copy(lm_head)  # shares the dictionary of parameters, so new weights are seen
        else:
            return lm_head
        _multiply(view, _apply)
        _compile_ahead(view, self._few if lm_head.tp_size == 1 else None)
        return view


def _keeps_dtype(processor: Any, dtype: torch.dtype) -> bool:
    """Whether logits have the dtype of the hidden states; ``head_dtype`` exists from vLLM 0.26 on."""
    return getattr(processor, "head_dtype", None) in (None, dtype)


@torch.inference_mode()
def install(
    draft: torch.nn.Module,
    target: torch.nn.Module,
    logits: DraftLogits | None = None,
    few: FewRows | None = None,
    read: RowsRead | None = None,
    *,
    rounds: bool = False,
    trims: bool = False,
) -> Installed:
    """Make a draft's unquantized layers use the kernels; layers shared with the target stay unchanged.

    Args:
        draft: the loaded draft model.
        target: the target model.
        logits: the draft's `DraftLogits`; its ``LogitsProcessor`` then uses the kernels with any head it is given.
            None leaves the head out.
        few: fused head kernel for at most 32 rows, to be compiled ahead; None means matmul.
        read: the rows that are read of a pass; None means all of every pass.
        rounds: make the weights FP8.
        trims: rows of the head are going to be copied, which replace it.

    Raises:
        EagleMRV2Error: the weights cannot be made FP8.
    """
    shared = {id(module) for module in target.modules()}
    named = {name: module for name, module in draft.named_modules() if id(module) not in shared}
    own = list(named.values())
    layers = [module for module in own if _is_linear(module)]
    gated = [module for module in own if _is_gated(module)]
    head: Any = getattr(draft, "lm_head", None)  # most likely the head that the processor is given
    takes_head = logits is not None and (rounds or _is_linear(head))
    rounded = fp8.round_layers(draft, named, head=not trims) if rounds else []
    layers += [layer for layer in rounded if layer not in layers]
    gates = {id(mlp.gate_up_proj) for mlp in gated}
    attention = None if read is None else _only_attention(own, gated, layers)
    after = [] if attention is None else [attention.o_proj, gated[0].gate_up_proj, gated[0].down_proj]
    for layer in layers:
        _multiply(layer, _apply_gated if id(layer) in gates else _apply)
    if attention is not None:
        for layer in (attention.qkv_proj, *after):
            setattr(layer, _ROWS_READ, read)
        _multiply(attention.qkv_proj, functools.partial(_apply_qkv, attention.q_size))
    for mlp in gated:
        mlp.act_fn = torch.nn.Identity()
    kinds = {
        (
            layer.weight.shape,
            layer.weight.dtype,
            getattr(layer, "bias", None) is None,
            id(layer) in gates,
            layer in after,
        ): layer
        for layer in layers
    }
    for layer in kinds.values():
        _compile_ahead(layer, gated=id(layer) in gates, picks=layer in after)
    if takes_head and not rounds:
        _compile_ahead(head, few if head.tp_size == 1 else None)
    return Installed(
        len(layers),
        of_read_rows=sum(layer.weight.numel() for layer in after)
        + (0 if attention is None else attention.q_size * attention.qkv_proj.weight.shape[1]),
        head=takes_head,
        quantized=tuple(type(module.quant_method).__name__ for module in own if _is_quantized(module)),
        rounded=tuple(rounded),
        view_of_head=None if logits is None else HeadView(logits, few, rounds=rounds),
    )


def _is_linear(layer: Any) -> bool:
    """Whether a layer is only a product with unquantized weights, computed by PyTorch on an NVIDIA GPU."""
    from vllm import envs
    from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_unquantized_gemm

    if not fp8.is_unquantized(layer):
        return False
    # From 0.30 on each layer can have its own GEMM backend.
    product = getattr(layer.quant_method, "_gemm_impl", None) or dispatch_unquantized_gemm()
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


def _only_attention(modules: list[Any], gated: list[Any], layers: list[Any]) -> Any:
    """Return the only attention of a Llama-like draft if it and the MLP after it use the kernels, else None."""
    attentions = [module for module in modules if class_path(type(module)) == _ATTENTION]
    if not sum(hasattr(module, "impl") for module in modules) == len(attentions) == len(gated) == 1:
        return None
    attention, mlp = attentions[0], gated[0]
    used = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return attention if all(layer in layers for layer in used) else None


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


def _apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.vllm_eagle_mrv2.linear(x, layer.weight, bias, *_further_inputs(layer))
    return product


def _apply_gated(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.vllm_eagle_mrv2.gated_linear(x, layer.weight, *_further_inputs(layer))
    return product


def _apply_qkv(queries: int, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.vllm_eagle_mrv2.qkv_linear(
        x, layer.weight, bias, queries, *_further_inputs(layer)
    )
    return product


def _further_inputs(layer: Any) -> tuple[torch.Tensor | None, ...]:
    """Return a layer's scales and the tensors of its `RowsRead`."""
    read = getattr(layer, _ROWS_READ, None)
    return getattr(layer, fp8.SCALE, None), *((None, None) if read is None else (read.index, read.count))


def _multiply(layer: Any, apply: Callable[..., torch.Tensor]) -> None:
    # A copy keeps its class, which vLLM checks when it replaces weights.
    layer.quant_method = copy.copy(layer.quant_method)
    layer.quant_method.apply = apply


def _compile_ahead(layer: Any, few: FewRows | None = None, *, gated: bool = False, picks: bool = False) -> None:
    """Compile a layer's kernels now, rather than during capture or at the first request of an eager draft.

    With ``picks`` also those that pick one row of several.
    """
    weight, bias, scale = layer.weight.data, getattr(layer, "bias", None), getattr(layer, fp8.SCALE, None)
    dtype = weight.dtype if scale is None else layer.rounded_from
    several = few_rows.variants(weight) if scale is None else [few_rows.LEAST_ROWS, few_rows.MAX_ROWS]
    if bias is not None or (scale is not None and not _widens(weight, dtype)):
        several = []
    lone = functools.partial(gated_row_product, weight=weight, scale=scale)
    if not gated:
        lone = functools.partial(row_product, weight=weight, bias=bias, scale=scale)

    def launches() -> None:
        for num_rows in (1, *several):
            rows = torch.empty(num_rows, weight.shape[1], dtype=dtype, device="meta")
            if num_rows == 1:
                lone(rows[0])
                if picks:
                    lone(rows, index=torch.empty(1, dtype=torch.int64, device="meta"))
            elif few is not None:
                few(rows, weight, scale=scale)
            else:
                few_rows.few_rows_product(rows, weight, scale)

    compile_ahead.submit(weight.device, launches)
