"""Compiles every kernel for NVIDIA GPUs, on a machine that may have none; run by unit/test_compile.py.

The CPU tests run kernels in Triton's interpreter, which takes much that its compiler refuses.  Here the wrappers are
called as those tests call them, and in the place of a launch the kernel is compiled for what it was given.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
from test_kernels import decoding, poisoned, target_batch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.filter_logits import filter_logits
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits
from vllm_eagle_mrv2.kernels.step_update import update_after_step

CAPABILITIES = (80, 90)  # A100; H100 and H200
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **kwargs: Any) -> None:
    """In the place of ``JITFunction.run``."""
    given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    signature, constants = {}, {}
    for parameter in self.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    for capability in CAPABILITIES:
        compiled = triton.compile(
            ASTSource(fn=self, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps},
        )
        assert "cubin" in compiled.asm
    print(self.fn.__name__, *constants.values(), flush=True)


def main() -> None:
    JITFunction.run = compile_instead
    for offset in (0, 1):
        for pad in (True, False):
            prepare_prefill_inputs(
                poisoned(8, 64),
                target_batch([4, 4]),
                sample_offset=offset,
                pad_last_token_indices=pad,
                pad_idx_mapping=pad,
            )
    for dtype in (torch.bfloat16, torch.float32):
        buffers, tokens, feedback = decoding(3, 1, hidden_dtype=dtype)
        logits, states = torch.zeros(3, 5000, dtype=dtype), torch.zeros(8)
        for drafted in (tokens, argmax_keys(logits), argmax_keys(logits, torch.arange(5000))):
            for offset in (0, 1):
                prepare_decode_inputs(buffers, drafted, feedback, 3, 4096, sample_offset=offset)
            update_after_step(buffers, drafted, feedback, 3, 3, 4096)
        filter_logits(logits, torch.zeros(3, dtype=torch.int32), states, states.int(), states)
        for kept in (torch.zeros(8, 3, 5000), None):
            for flag in (True, False):
                sample_with_logits(
                    logits,
                    torch.zeros(3, dtype=torch.int32),
                    states,
                    states.long(),
                    torch.zeros(3, dtype=torch.int64),
                    torch.tensor(1),
                    kept,
                    salted=flag,
                    after_temperature=flag,
                    fp64=flag,
                )


if __name__ == "__main__":
    main()
