"""Has kernels compiled in the background while an engine starts.

Compiled for the first time, the kernels of a draft take some seconds of a core.  A starting engine has others idle, and
loads weights, compiles models and captures the target's graphs before the draft's: by then the kernels are there.  What
comes too late is compiled where it is launched, as ever.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, SlotTable
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.few_rows_product import MAX_ROWS, few_rows_by_temperature, few_rows_keys, takes
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.launching import compiles_alone
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.sample_with_logits import FEW_ROWS, sample_with_target_noise
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention
from vllm_eagle_mrv2.kernels.step_update import update_after_step

THREAD = "eagle_mrv2_compile"
_SWITCH_S = 5e-4
_META = torch.device("meta")
# One thread: the engine's own start goes before.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD)


def submit(device: torch.device, call: Callable[[], object]) -> Future[None] | None:
    """Compile what a call launches, some time soon.

    Args:
        device: whose kernels; None is done unless it is an NVIDIA GPU.
        call: passes tensors for their dtype, shape and strides; it must make none on the device, and copy none.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None

    def compiled() -> None:
        try:
            torch.cuda.set_device(device)  # each thread has its own
            with switching_promptly(), torch.inference_mode(), compiles_alone():
                call()
        except Exception:
            # The launch will say so, to whom it concerns.
            logging.getLogger(__name__).debug("not compiled ahead", exc_info=True)

    return _thread.submit(compiled)


@contextlib.contextmanager
def switching_promptly() -> Iterator[None]:
    """Have Python's threads take turns every half millisecond, not every five.

    A compilation leaves the interpreter's lock and wants it back hundreds of times, and would wait for a whole turn of
    the starting engine's each time: beside a thread that never rests the kernels of a 1B draft took 18 s so, and 4.5 s
    this way, in which the other lost 0.5 s in place of 2.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def attention(
    num_heads: int,
    num_kv_heads: int,
    width: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    writes: bool,
    rotates: bool,
    one_row: bool,
) -> None:
    """Launch attention of draft decodes, and of draft prefills of one token a request, over blocks of ``block_size``.

    Args:
        writes: that of draft decodes writes the cache; that of prefills never does.
        rotates: it turns by RoPE.
        one_row: and that of one row of a draft prefill of one request.
    """
    kernel = SingleTokenAttention(num_heads, num_kv_heads, width, device, scratch=_META)
    query = torch.empty(1, num_heads, width, dtype=dtype, device=_META)
    keys, values = torch.empty(2, 16, block_size, num_kv_heads, width, dtype=dtype, device=_META)
    integers = torch.empty(1, 1, dtype=torch.int32, device=_META)
    own = (*torch.empty(2, 1, num_kv_heads, width, dtype=dtype, device=_META), integers[0].to(torch.int64))
    angles = {"positions": own[2], "cos_sin": torch.empty(16, width, dtype=dtype, device=_META)}
    given = (query, keys, values, integers, integers[0], 1.0, query)
    turned = angles if rotates else {}
    if writes:
        kernel(*given, *own, **turned)
    if one_row:
        kernel(*given, **angles, index=own[2])
    kernel(*given, **turned)


def between_passes(
    buffers: DraftBuffers,
    drafts: Callable[[], list[torch.Tensor]],
    max_model_len: int,
    sample_offset: int,
) -> None:
    """Launch what a draft with one group of KV caches, whose logits are not kept, runs beside its model.

    Args:
        buffers: the draft's.
        drafts: launches what drafts out of hidden states, in each of its forms; see `how_drafted`.
        max_model_len: as for `prepare_decode_inputs`.
        sample_offset: likewise.
    """
    integers = torch.empty(1, 1, dtype=torch.int64, device=_META)
    slot_table = SlotTable(integers.to(torch.int32), integers[0], 16)
    prepare_prefill_inputs(buffers, BatchQueue(_META, filters=False), 1, sample_offset=sample_offset)
    feedback = torch.empty(buffers.hidden_states.shape, dtype=buffers.hidden_states.dtype, device=_META)
    for drafted in drafts():
        rows = len(drafted)
        for table in (None, slot_table):  # a dummy run has none
            prepare_decode_inputs(buffers, drafted, feedback, rows, max_model_len, table, sample_offset=sample_offset)
            update_after_step(buffers, drafted, feedback, rows, 2, max_model_len, table)


def argmax(head: torch.Tensor, offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """Launch the argmax over a head's rows.

    Args:
        head: [N, H], its weights.
        offsets: of `DraftHead`.
    """
    forms = [argmax_keys(torch.empty(1, len(head), dtype=head.dtype, device=_META), offsets)]
    if offsets is None and takes(2, head):
        forms.append(few_rows_keys(torch.empty(2, head.shape[1], dtype=head.dtype, device=_META), head))
    return forms


def sampling(buffers: DraftBuffers, head: torch.Tensor, offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """Launch the sampler of vLLM 0.20's drafts.

    Args:
        buffers: the draft's.
        head: [N, H], its weights.
        offsets: of `DraftHead`.
    """
    of_rows = (buffers.idx_mapping, buffers.temperature)
    others = (*of_rows, buffers.seeds, buffers.sample_positions, buffers.draft_step[0])
    forms = []
    for num_rows in (1, 2, FEW_ROWS + 1, MAX_ROWS + 1):
        logits, best = torch.empty(num_rows, len(head), dtype=head.dtype, device=_META), None
        if offsets is None and takes(num_rows, head):
            rows = torch.empty(num_rows, head.shape[1], dtype=head.dtype, device=_META)
            logits, best = few_rows_by_temperature(rows, head, *of_rows)
        forms.append(sample_with_target_noise(logits, offsets, *others, best))
    return forms
