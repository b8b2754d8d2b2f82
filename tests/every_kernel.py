"""Calls every kernel in every variant; with ``compile``, compiles them instead for GPUs that this machine may lack.

The CPU tests run kernels in Triton's interpreter, which takes much that its compiler refuses: unit/test_compile.py has
them compiled for what the wrappers pass.  gpu/test_sanitizer.py has them run under compute-sanitizer.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from unit.test_kernels import DEVICE, decoding, poisoned, target_batch

from vllm_eagle_mrv2.batch.buffers import Lookup, SlotTable
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.kernels import few_rows_product as of_few_rows
from vllm_eagle_mrv2.kernels import fp8
from vllm_eagle_mrv2.kernels import row_product as of_one_row
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_by_temperature, few_rows_keys, few_rows_product
from vllm_eagle_mrv2.kernels.filter_logits import filter_logits
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.lookup import look_up_drafts, store_found_logits
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.row_product import gated_row_product, row_product
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_logits, sample_with_target_noise
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention
from vllm_eagle_mrv2.kernels.step_update import update_after_step

CAPABILITIES = (80, 90)  # A100; H100 and H200: variants with every two of a kernel's choices together
FURTHER = (86, 89, 100, 120)  # A10 and 3090; L4, L40 and 4090; B200; RTX PRO 6000 and 5090: one variant of every kernel
_compiled: defaultdict[str, set[Any]] = defaultdict(set)  # pairs of choices, by kernel
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
_HAS_FP8 = 89


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **kwargs: Any) -> None:
    """In the place of ``JITFunction.run``."""
    given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(self.params):
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        of = (
            _POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"
        )
        signature[parameter.name] = of
        if of[0] == "*" or (of == "i32" and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[number,] = [["tt.divisibility", 16]]  # as at run time: what is aligned can be copied ahead
    choices = [*enumerate(signature.values()), *constants.items(), ("num_warps", num_warps)]
    pairs, compiled = set(itertools.combinations(choices, 2)), _compiled[self.fn.__name__]
    if pairs <= compiled:
        return
    shared = set()
    for capability in (*CAPABILITIES, *(() if compiled else FURTHER)):
        if capability < _HAS_FP8 and "*fp8e4nv" in signature.values():
            continue
        made = triton.compile(
            ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": num_warps},
        )
        assert "cubin" in made.asm
        shared.add(made.metadata.shared)
    compiled |= pairs
    print(self.fn.__name__, f"shared={min(shared)}", *(f"{name}={of}" for name, of in constants.items()), flush=True)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """What a GPU without instructions for FP8 reads."""
    return values.view(torch.uint8)


def call_every_kernel() -> None:
    """One launch of each variant, on small inputs."""
    one_row: Any = of_one_row
    few_rows: Any = of_few_rows
    for offset in (0, 1):
        for batch in (target_batch([4, 4]), target_batch([4, 4], dummy_run=True)):
            queue = BatchQueue(torch.device(DEVICE), filters=True)
            queue.put(batch)
            prepare_prefill_inputs(poisoned(8, 64), queue, 3, sample_offset=offset)
    mapping = torch.tensor([5, -1, 2], dtype=torch.int32, device=DEVICE)
    states = torch.full((8,), 0.5, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(3, 5000, device=DEVICE).to(dtype)
        offsets = torch.arange(5000, device=DEVICE)
        for form in ("tokens", "pairs", "keys", "mapped keys"):
            buffers, drafted, feedback = decoding(3, 1, hidden_dtype=dtype, form=form.removeprefix("mapped "))
            if "keys" in form:
                drafted = argmax_keys(logits, offsets if form == "mapped keys" else None)
            for offset in (0, 1):
                buffers.last_token_indices.zero_()
                buffers.live_reqs.fill_(2)
                prepare_decode_inputs(buffers, drafted, feedback, 3, 4096, sample_offset=offset)
            buffers.query_start_loc.copy_(torch.arange(9))
            buffers.idx_mapping.zero_()
            blocks = torch.arange(8 * 256, dtype=torch.int32, device=DEVICE).view(8, 256)
            texts = torch.ones(8, 3000, dtype=torch.int32, device=DEVICE)
            lookup = Lookup.of(texts, torch.full((8,), 3000, dtype=torch.int32, device=DEVICE), 3)
            look_up_drafts(buffers, lookup, 3)
            found = replace(lookup, draft_logits=torch.zeros(8, 3, 5000, dtype=dtype, device=DEVICE))
            store_found_logits(buffers, found, 3)
            update_after_step(buffers, drafted, feedback, 3, 3, 4096, lookup=lookup)
            for slot_table in (None, SlotTable(blocks, torch.zeros(8, dtype=torch.int64, device=DEVICE), 16)):
                prepare_decode_inputs(buffers, drafted, feedback, 3, 4096, slot_table)
                buffers.draft_step.fill_(1)
                update_after_step(buffers, drafted, feedback, 3, 3, 4096, slot_table)
        for outputs, width in ((3, 96), (5, 3000), (5, 5000), (5, 9000), (5, 17000)):
            weight = torch.randn(outputs, width, device=DEVICE).to(dtype)
            for bias in (None, weight[:, 0].contiguous()):
                row_product(weight[0], weight, bias)
            gated_row_product(weight[0], weight)
            row_product(weight, weight, index=mapping[2:].long())
            gated_row_product(weight, weight, index=mapping[2:].long())
            values, scale = fp8.quantized(weight)
            for one_row.as_read in (fp8.as_read, _as_bytes):
                row_product(weight[0], values, scale=scale)
                gated_row_product(weight, values, mapping[2:].long(), scale)
        if dtype != torch.float32:
            for rows in (2, 17):
                few, head = (torch.randn(n, 200, device=DEVICE).to(dtype) for n in (rows, 70))
                few_rows_product(few, head)
                for few_rows.as_read in (fp8.as_read, _as_bytes):
                    few_rows_product(few.repeat(3, 1), *fp8.quantized(head))
                few_rows_keys(few, head)
                of_rows = mapping.repeat(6)[:rows]
                few_logits, best = few_rows_by_temperature(few, head, of_rows, states)
                positions, step = torch.arange(rows, device=DEVICE), torch.tensor(1, device=DEVICE)
                sample_with_target_noise(few_logits, None, of_rows, states, states.long(), positions, step, best)
            for width in (64, 128, 256):
                cache = torch.randn(4, 2, 512, 2, width, device=DEVICE).to(dtype)
                query, table = cache[0, 0, :2, :, :].repeat(1, 3, 1), torch.arange(4, dtype=torch.int32, device=DEVICE)
                lengths = torch.tensor([1024, 0], dtype=torch.int32, device=DEVICE)
                attention = SingleTokenAttention(6, 2, width, torch.device(DEVICE))
                slots = torch.tensor([table[1] * 512 + 511, -1], device=DEVICE)
                angles = {"positions": lengths.long(), "cos_sin": cache.view(-1, width)}
                for own, turned in itertools.product(((), (query[:, :2], query[:, :2], slots)), ({}, angles)):
                    out = torch.empty_like(query)
                    attention(query, cache[:, 0], cache[:, 1], table.view(2, 2), lengths, 0.1, out, *own, **turned)
                index = torch.arange(2, device=DEVICE)
                attention(query, cache[:, 0], cache[:, 1], table.view(2, 2), lengths, 0.1, out, **angles, index=index)
        filter_logits(logits, mapping, states, torch.full_like(states, 50).int(), states)
        kept, of_targets = (torch.zeros(8, 3, width, device=DEVICE) for width in (5000, 9999))
        for (stored, mapped), flag, times in itertools.product(
            ((kept, None), (of_targets, offsets), (None, None), (None, offsets)), (True, False), (1, 3)
        ):
            sample_with_logits(
                logits.repeat(times, 1),
                mapping.repeat(times),
                states,
                states.long(),
                torch.arange(3 * times, device=DEVICE),
                torch.tensor(1, device=DEVICE),
                stored,
                salted=flag,
                after_temperature=flag,
                fp64=flag,
                offsets=mapped,
            )


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        JITFunction.run = compile_instead
    call_every_kernel()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("every kernel done")
