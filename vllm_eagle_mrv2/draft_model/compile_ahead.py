"""Compiles kernels in the background while an engine starts.

The first compilation of a draft's kernels takes some seconds of one CPU core.  A starting engine has idle cores, and it
loads weights, compiles models and captures the target's graphs before the draft's.  By then the kernels are usually
ready.  A kernel that is not ready in time is compiled when it is launched, as usual.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, Lookup, SlotTable
from vllm_eagle_mrv2.batch.queue import BatchQueue
from vllm_eagle_mrv2.kernels.decode_inputs import prepare_decode_inputs
from vllm_eagle_mrv2.kernels.few_rows_product import MAX_ROWS, few_rows_by_temperature, few_rows_keys, takes
from vllm_eagle_mrv2.kernels.greedy import argmax_keys
from vllm_eagle_mrv2.kernels.launching import compiles_alone
from vllm_eagle_mrv2.kernels.lookup import look_up_drafts
from vllm_eagle_mrv2.kernels.prefill_inputs import prepare_prefill_inputs
from vllm_eagle_mrv2.kernels.sample_with_logits import FEW_ROWS, sample_with_target_noise
from vllm_eagle_mrv2.kernels.single_token_attention import SingleTokenAttention
from vllm_eagle_mrv2.kernels.step_update import update_after_step

THREAD = "eagle_mrv2_compile"
_SWITCH_S = 5e-4
_META = torch.device("meta")
# One thread, because the engine's own startup has priority.
_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD)


def submit(device: torch.device, call: Callable[[], object]) -> Future[None] | None:
    """Compile the kernels that a call launches, in the background.

    Args:
        device: the device that runs the kernels; nothing is submitted unless it is an NVIDIA GPU.
        call: launches kernels on tensors that only provide dtype, shape and strides; it must not allocate or copy
            tensors on the device.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None

    def compiled() -> None:
        try:
            torch.cuda.set_device(device)  # the current device is per thread
            with switching_promptly(), torch.inference_mode(), compiles_alone():
                call()
        except Exception:
            # The launch itself will raise the error.
            logging.getLogger(__name__).debug("not compiled ahead", exc_info=True)

    return _thread.submit(compiled)


@contextlib.contextmanager
def switching_promptly() -> Iterator[None]:
    """Make Python switch threads every half millisecond instead of every five.

    A compilation releases and reacquires the GIL hundreds of times, and would otherwise wait for a whole switch
    interval of the starting engine each time.  Next to a thread that is always busy, the kernels of a 1B draft took
    18 s to compile at the default interval and take 4.5 s at this one; the other thread lost 0.5 s instead of 2 s.
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
    read_rows: bool,
) -> None:
    """Launch the attention kernels of draft decodes and of draft prefills with one token per request.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        width: size of a head.
        block_size: tokens per block of the KV cache.
        dtype: of queries, keys and values.
        device: the draft's device.
        writes: whether draft decodes write the cache; draft prefills never do.
        rotates: whether the kernels apply RoPE.
        read_rows: also launch the variant for the rows that are read of a draft prefill.
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
    if read_rows:
        kernel(*given, **angles, index=own[2])
    kernel(*given, **turned)


def between_passes(
    buffers: DraftBuffers,
    drafts: Callable[[], list[torch.Tensor]],
    max_model_len: int,
    sample_offset: int,
    lookup: Lookup | None = None,
) -> None:
    """Launch the kernels between the model passes of a draft with one KV cache group and no stored logits.

    Args:
        buffers: the draft's buffers.
        drafts: launches the kernels that draft from hidden states; returns drafts in each form of `how_drafted`.
        max_model_len: as for `prepare_decode_inputs`.
        sample_offset: as for `prepare_decode_inputs`.
        lookup: as for `update_after_step`.
    """
    integers = torch.empty(1, 1, dtype=torch.int64, device=_META)
    slot_table = SlotTable(integers.to(torch.int32), integers[0], 16)
    prepare_prefill_inputs(buffers, BatchQueue(_META, filters=False), 1, sample_offset=sample_offset)
    feedback = torch.empty(buffers.hidden_states.shape, dtype=buffers.hidden_states.dtype, device=_META)
    for drafted in drafts():
        rows = len(drafted)
        for table in (None, slot_table):  # a dummy run has no slot table
            prepare_decode_inputs(buffers, drafted, feedback, rows, max_model_len, table, sample_offset=sample_offset)
            update_after_step(buffers, drafted, feedback, rows, 2, max_model_len, table, lookup)
    if lookup is not None:
        look_up_drafts(buffers, lookup, 1)


def argmax(head: torch.Tensor, offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """Launch the argmax kernels over a head's rows.

    Args:
        head: [N, H], the head's weights.
        offsets: as in `DraftHead`.
    """
    forms = [argmax_keys(torch.empty(1, len(head), dtype=head.dtype, device=_META), offsets)]
    if offsets is None and takes(2, head):
        forms.append(few_rows_keys(torch.empty(2, head.shape[1], dtype=head.dtype, device=_META), head))
    return forms


def sampling(buffers: DraftBuffers, head: torch.Tensor, offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """Launch the sampling kernels of vLLM 0.20 drafts.

    Args:
        buffers: the draft's buffers.
        head: [N, H], the head's weights.
        offsets: as in `DraftHead`.
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
