"""What is compiled while an engine starts is what its graphs then launch, and is not launched."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.kernels.launching import compiles_alone, launch

pytestmark = pytest.mark.any_release

pytest.importorskip("triton")

# Runs with Triton's compiler in place of its interpreter; prints the kernels that compiling ahead missed.
SCRIPT = """
import functools
import inspect
import sys
import torch
from triton.runtime.jit import JITFunction
from test_kernels import poisoned, target_batch
from vllm_eagle_mrv2.draft_model import compile_ahead
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.batch.buffers import Lookup, SlotTable
from vllm_eagle_mrv2.draft_model.head import DraftHead
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.few_rows_product import few_rows_by_temperature, few_rows_keys
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.launching import compiles_alone
from vllm_eagle_mrv2.kernels.lookup import look_up_drafts
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.sample_with_logits import sample_with_target_noise
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention
from vllm_eagle_mrv2.kernels.step_update import update_after_step

compiled, launched = set(), set()

def seen(value):
    if isinstance(value, torch.Tensor):
        return value.dtype
    return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)

def run(self, *args, grid, warmup, num_warps=4, **kwargs):
    given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    variant = [self.fn.__name__, num_warps]
    for parameter in self.params:
        value = given[parameter.name]
        constant = parameter.is_constexpr or value is None
        variant.append(value if constant else type(value) if parameter.do_not_specialize else seen(value))
    (compiled if warmup else launched).add(tuple(variant))

JITFunction.run = run
mapped, sampled, looks_up = (bool(int(argument)) for argument in sys.argv[1:])
cpu, dtype, width, tokens = torch.device("cpu"), torch.bfloat16, 256, 32_064
buffers = poisoned(8, 64, hidden_size=width, hidden_dtype=dtype)
head = torch.empty(tokens, width, dtype=dtype)
offsets = torch.zeros(tokens, dtype=torch.int64) if mapped else None
table = SlotTable(torch.zeros(8, 48, dtype=torch.int32), torch.zeros(8, dtype=torch.int64), 16)
drafts = functools.partial(compile_ahead.sampling, buffers) if sampled else compile_ahead.argmax
lookup = Lookup.of(torch.zeros(8, 4096, dtype=torch.int32), torch.zeros(8, dtype=torch.int32), 3) if looks_up else None
with compiles_alone():
    compile_ahead.between_passes(buffers, functools.partial(drafts, head, offsets), 4096, 1, lookup)
    for rotates in (True, False):
        compile_ahead.attention(8, 2, 64, 16, dtype, cpu, writes=True, rotates=rotates, read_rows=rotates)
assert not launched, launched

queue = BatchQueue(cpu, filters=False)
prepare_prefill_inputs(buffers, queue, 8, sample_offset=1)
if sampled:
    of_rows = (buffers.idx_mapping, buffers.temperature, buffers.seeds, buffers.sample_positions, buffers.draft_step[0])
    forms = []
    for rows in (1, 8, 9, 16, 33):
        logits, best = torch.empty(rows, tokens, dtype=dtype), None
        if 1 < rows < 33 and not mapped:
            logits, best = few_rows_by_temperature(torch.empty(rows, width, dtype=dtype), head, *of_rows[:2])
        forms.append(sample_with_target_noise(logits, offsets, *of_rows, best))
else:
    forms = [argmax_keys(torch.empty(rows, tokens, dtype=dtype), offsets) for rows in (1, 2, 8)]
    forms += [] if mapped else [few_rows_keys(torch.empty(rows, width, dtype=dtype), head) for rows in (2, 8)]
for drafted in forms:
    feedback = torch.empty(64, width, dtype=dtype)
    for slots in (table, None):
        prepare_decode_inputs(buffers, drafted, feedback, len(drafted), 4096, slots, sample_offset=1)
        update_after_step(buffers, drafted, feedback[: len(drafted)], len(drafted), 3, 4096, slots, lookup)
if lookup is not None:
    look_up_drafts(buffers, lookup, 8)
cache = torch.empty(7, 2, 16, 2, 64, dtype=dtype)
query, lengths = torch.empty(5, 8, 64, dtype=dtype), torch.zeros(5, dtype=torch.int32)
attend = SingleTokenAttention(8, 2, 64, cpu)
row = torch.empty(5, 12 * 64, dtype=dtype)  # of a projection, of which values are a view
for own in ((), (query[:, :2].clone(), row[:, 640:].unflatten(1, (2, 64)), torch.zeros(5, dtype=torch.int64))):
    tables = torch.zeros(5, 48, dtype=torch.int32)
    for angles in ({}, {"positions": lengths.long(), "cos_sin": torch.empty(4096, 64, dtype=dtype)}):
        attend(query, *cache.unbind(1), tables, lengths, 0.125, torch.empty_like(query), *own, **angles)
index = torch.zeros(1, dtype=torch.int64)
attend(query, *cache.unbind(1), tables[:1], lengths[:1], 0.125, query, **angles, index=index)
print(sorted({variant[0] for variant in launched - compiled}))
"""


def run_script(script: str, *arguments: str, **environment: str) -> list[str]:
    """The lines that it prints, with Triton's compiler."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | environment | {"TRITON_INTERPRET": "0", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("sampled", [False, True], ids=["argmax", "sampled"])
@pytest.mark.parametrize("mapped", [False, True], ids=["its own tokens", "mapped to the target's"])
@pytest.mark.parametrize("looks_up", [False, True], ids=["drafted", "looked up"])
def test_what_is_launched_has_been_compiled(mapped: bool, sampled: bool, looks_up: bool) -> None:
    assert run_script(SCRIPT, *(str(int(choice)) for choice in (mapped, sampled, looks_up)))[-1] == "[]"


def test_one_thread_compiles_while_others_launch() -> None:
    kernel = {(4,): "launched"}
    with compiles_alone():
        compiled: list[tuple[object, ...]] = []
        launch(SimpleNamespace(warmup=lambda *args, grid: compiled.append((*args, grid))), (4,))("an argument")
        assert compiled == [("an argument", (4,))]
        thread = ThreadPoolExecutor(1)
        by_other: Any = thread.submit(launch, kernel, (4,)).result()
        assert by_other == "launched"
    afterwards: Any = launch(kernel, (4,))
    assert afterwards == "launched"


def test_threads_take_short_turns_while_one_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before, turns = sys.getswitchinterval(), []
    submitted = compile_ahead.submit(torch.device("cuda", 0), lambda: turns.append(sys.getswitchinterval()))
    assert submitted is not None
    submitted.result(10)
    assert turns == [pytest.approx(5e-4)]
    assert sys.getswitchinterval() == before


def test_nothing_is_compiled_for_a_cpu() -> None:
    assert compile_ahead.submit(torch.device("cpu"), lambda: pytest.fail("called")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it could")
def test_what_cannot_be_compiled_ahead_is_left_to_the_launch() -> None:
    failed = compile_ahead.submit(torch.device("cuda", 0), lambda: None)
    assert failed is not None
    assert failed.result(10) is None
