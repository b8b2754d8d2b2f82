"""Where Triton's interpreter stops and the hardware would go on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt


def complete_the_interpreter() -> None:
    """Give Triton's interpreter what vLLM's kernels need of it, as soon as its modules are imported.

    * ``argmax`` of a row of nothing but NaN is some index.  vLLM profiles with attention left out, on logits that come
      from uninitialized memory; NumPy's ``nanargmax`` raises there.
    * libdevice's ``log1p``, which the rejection sampler calls; the interpreter has no libdevice.
    """
    wrapt.register_post_import_hook(_let_argmax_see_nan, "triton.runtime.interpreter")
    wrapt.register_post_import_hook(_add_log1p, "triton.language.extra.libdevice")


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
