"""Where Triton's interpreter stops and the hardware would go on, and where it does the same work again and again."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import wrapt


def complete_the_interpreter() -> None:
    """Give Triton's interpreter what vLLM's kernels need of it, as soon as its modules are imported.

    * ``argmax`` of a row of nothing but NaN is some index.  vLLM profiles with attention left out, on logits that come
      from uninitialized memory; NumPy's ``nanargmax`` raises there.
    * libdevice's ``log1p``, which the rejection sampler calls; the interpreter has no libdevice.

    And it is spared what took most of its time: to patch ``triton.language`` for each launch and each call within a
    kernel (nothing is compiled in this process, so that the patches stay), to compute where integers overflow without
    a look at the result, and to make a table of all data types for each conversion and a shape for each value.
    """
    wrapt.register_post_import_hook(_spare_waste, "triton.runtime.interpreter")
    wrapt.register_post_import_hook(_let_argmax_see_nan, "triton.runtime.interpreter")
    wrapt.register_post_import_hook(_add_log1p, "triton.language.extra.libdevice")


def _spare_waste(interpreter: ModuleType) -> None:
    core = interpreter.tl.core
    interpreter._LangPatchScope.restore = lambda self: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    stock = interpreter._get_np_dtype
    of_scalar = functools.cache(stock)
    interpreter._get_np_dtype = lambda dtype: (stock if dtype.scalar.is_ptr() else of_scalar)(dtype.scalar)

    @functools.cache
    def numel_and_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = numel_and_shape(type.shape if type.is_block() else ())

    core.tensor.__init__ = init


def _let_argmax_see_nan(interpreter: ModuleType) -> None:
    import numpy as np

    stock = interpreter.ReduceOps.min_max

    def min_max(self: Any, tensor: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        if idx_reduce_op is None:
            return stock(self, tensor, val_reduce_op)
        least = -np.inf if idx_reduce_op is np.nanargmax else np.inf

        def index(data: Any, **kwargs: Any) -> Any:
            is_float = np.issubdtype(data.dtype, np.floating)
            return idx_reduce_op(np.where(np.isnan(data), least, data) if is_float else data, **kwargs)

        return stock(self, tensor, val_reduce_op, index)

    interpreter.ReduceOps.min_max = min_max


def _add_log1p(libdevice: ModuleType) -> None:
    import numpy as np

    def log1p(x: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        with np.errstate(all="ignore"):  # lanes whose result is thrown away may hold anything
            result = np.log1p(x.handle.data)
        return tl.core.tensor(TensorHandle(result, x.handle.dtype), x.type)

    libdevice.log1p = log1p
