"""Queue in pinned memory from which the GPU, captured graphs included, fetches each batch."""

from __future__ import annotations

import operator
import struct
import time

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.errors import EagleMRV2Error

_TENSORS = {
    "idx_mapping": None,  # int32 or int64
    "num_sampled": torch.int32,
    "num_rejected": torch.int32,
    "input_ids": torch.int32,
    "positions": torch.int64,
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "last_sampled": torch.int64,
    "next_prefill_tokens": torch.int32,
    "temperature": torch.float32,
    "seeds": torch.int64,
    "top_k": torch.int32,
    "top_p": torch.float32,
}
"""Tensors of a `DraftBatch` with the dtypes that the kernel reads; an entry holds their addresses in this order."""
_FILTERS = 2  # the last two tensors, present only where drafts honour top-k and top-p
_WIDTHS = {torch.int32: 1, torch.int64: 2}  # of an idx_mapping element, in int32 words
FIELDS = 16
"""int64 fields of an entry: number of requests, index width, addresses, zeros; a power of two for one vector load."""
NUM_REQS, INDEX_WIDTH = 0, 1
"""Field numbers of these two values in an entry."""
_ENTRY = struct.Struct(f"={FIELDS}q")
_EMPTY = (0,) * FIELDS
_PATIENCE_S = 300  # longer than the ranks of an engine wait for each other while one of them compiles


def place_of(name: str) -> int:
    """Return the field number that holds the address of one of a batch's tensors."""
    return INDEX_WIDTH + 1 + list(_TENSORS).index(name)


class BatchQueue:
    """Ring buffer in which the CPU leaves each batch for its draft phase.

    A CUDA graph holds fixed addresses, but some of a batch's tensors are new in every iteration.  The CPU therefore
    writes the addresses of a batch's tensors into the next of ``depth`` entries before it launches the graph, and each
    replay takes the next entry.  A single launch fetches the inputs and drafts, without a copy by the CPU and without
    new graph parameters.  vLLM passes its own request states in the same way (UVA); this queue also has room for the
    batches that the CPU is ahead by.  Draft phases without a graph take their batches from it too.

    Attributes:
        entries: [depth, FIELDS] int64 in pinned host memory; an all-zero entry is a batch without requests.
        entry: [FIELDS] int64 on the device: the entry taken by the current phase.
        taken: [] int64 on the device: number of entries taken.
        seen: [] int64 in pinned host memory: the same number, for the CPU to read.
    """

    def __init__(self, device: torch.device, *, filters: bool, depth: int = 64) -> None:
        """Create an empty queue.

        Args:
            device: the draft's device.
            filters: whether drafts honour top-k and top-p.
            depth: maximum number of waiting batches.
        """
        pinned = device.type == "cuda"
        self.entries = torch.zeros(depth, FIELDS, dtype=torch.int64, pin_memory=pinned)
        self.seen = torch.zeros((), dtype=torch.int64, pin_memory=pinned)
        self.entry = torch.zeros(FIELDS, dtype=torch.int64, device=device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        names = list(_TENSORS) if filters else list(_TENSORS)[:-_FILTERS]
        self._tensors = operator.attrgetter(*names)
        self._types = [_TENSORS[name] for name in names[1:]]
        self._unused = (0,) * (FIELDS - 2 - len(names))
        self._written = 0
        self._depth = depth
        # NumPy views of the same memory: accessing an element of a tensor takes the CPU a microsecond.
        self._bytes = self.entries.numpy().data.cast("B")
        self._seen = self.seen.view(1).numpy()

    def put(self, batch: DraftBatch) -> None:
        """Queue a batch for the next draft phase; waits while all entries hold batches that the GPU has not taken yet.

        The batch's tensors must stay alive until that phase is launched, on the stream that uses them.  A dummy batch
        refers to states of live requests, which it must not change, so it is queued as a batch without requests.

        Raises:
            EagleMRV2Error: a tensor is missing or not of the dtype that the kernel reads, or the GPU takes no batches.
        """
        depth = self._depth
        if self._written - int(self._seen[0]) >= depth:
            self._wait()
        fields = _EMPTY if batch.dummy_run else self._fields(batch)
        _ENTRY.pack_into(self._bytes, self._written % depth * _ENTRY.size, *fields)
        self._written += 1

    def _wait(self) -> None:
        given_up = time.monotonic() + _PATIENCE_S
        while self._written - int(self._seen[0]) >= self._depth:
            if time.monotonic() > given_up:
                raise EagleMRV2Error(
                    f"the GPU has taken none of {self._depth} waiting draft batches for {_PATIENCE_S} s; look for its "
                    "errors in the kernel log (dmesg, Xid), and restart the engine."
                )
            time.sleep(1e-5)

    def _fields(self, batch: DraftBatch) -> tuple[int, ...]:
        tensors = self._tensors(batch)
        try:
            width = _WIDTHS[tensors[0].dtype]
            if [tensor.dtype for tensor in tensors[1:]] == self._types:
                return (batch.num_reqs, width, *[tensor.data_ptr() for tensor in tensors], *self._unused)
        except (AttributeError, KeyError):
            pass
        found = {name: getattr(tensor, "dtype", None) for name, tensor in zip(_TENSORS, tensors, strict=False)}
        wrong = [
            f"{name} {dtype}"
            for name, dtype in found.items()
            if dtype not in (_WIDTHS if name == "idx_mapping" else (_TENSORS[name],))
        ]
        raise EagleMRV2Error(
            f"the draft cannot read a batch with {', '.join(wrong)}; go back to vLLM's own method and report it."
        )

    def clear(self) -> None:
        """Reset the queue, including the count of entries that warm-up passes before a capture took without a batch."""
        if self.taken.is_cuda:
            torch.cuda.synchronize(self.taken.device)
        self.taken.zero_()
        self.seen.zero_()
        self.entries.zero_()
        self._written = 0
