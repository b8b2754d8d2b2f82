"""How batches reach the GPU, captured graphs included: through pinned memory that it reads by itself."""

from __future__ import annotations

import operator
import struct
import time

import torch

from vllm_eagle_mrv2.batch.buffers import DraftBatch
from vllm_eagle_mrv2.errors import EagleMRV2Error

_TENSORS = {
    "idx_mapping": None,  # of either width
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
"""Of a `DraftBatch`, with the dtypes that the kernel reads; the addresses of a slot, in this order."""
_FILTERS = 2  # the last of them, where drafts honour top-k and top-p
_WIDTHS = {torch.int32: 1, torch.int64: 2}  # of an idx_mapping, in int32
FIELDS = 16
"""int64 of a slot: number of requests, width of an index, addresses, 0; a power of two, to be fetched at once."""
NUM_REQS, INDEX_WIDTH = 0, 1
"""Where in a slot these are."""
_SLOT = struct.Struct(f"={FIELDS}q")
_EMPTY = (0,) * FIELDS
_PATIENCE_S = 300  # longer than the ranks of an engine wait for each other while one of them compiles


def place_of(name: str) -> int:
    """Where in a slot the address of one of a batch's tensors is."""
    return INDEX_WIDTH + 1 + list(_TENSORS).index(name)


class BatchQueue:
    """Where the host leaves each batch for the draft phase that is its own.

    A graph holds addresses, and some of a batch's tensors are new every iteration.  So the host writes a batch's
    addresses into the next of ``depth`` slots before it launches the graph, and each replay takes the next slot: one
    launch brings the inputs and drafts, with no copy by the host and no new graph parameters.  vLLM hands over its own
    request states so (UVA); here there is room for the batches that the host is ahead by.  Phases without a graph take
    theirs in the same way.

    Attributes:
        slots: [depth, FIELDS] int64 in pinned host memory; all zero, a batch of no requests.
        slot: [FIELDS] int64 on the device: the slot that the present phase has taken.
        taken: [] int64 on the device: slots that phases have taken.
        seen: [] int64 in pinned host memory: the same number, for the host.
    """

    def __init__(self, device: torch.device, *, filters: bool, depth: int = 64) -> None:
        """Make an empty queue.

        Args:
            device: of the draft.
            filters: whether drafts honour top-k and top-p.
            depth: batches that may wait.
        """
        pinned = device.type == "cuda"
        self.slots = torch.zeros(depth, FIELDS, dtype=torch.int64, pin_memory=pinned)
        self.seen = torch.zeros((), dtype=torch.int64, pin_memory=pinned)
        self.slot = torch.zeros(FIELDS, dtype=torch.int64, device=device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)
        names = list(_TENSORS) if filters else list(_TENSORS)[:-_FILTERS]
        self._tensors = operator.attrgetter(*names)
        self._types = [_TENSORS[name] for name in names[1:]]
        self._unused = (0,) * (FIELDS - 2 - len(names))
        self._written = 0
        self._depth = depth
        # Views of the same memory: an element of a tensor costs the host a microsecond.
        self._bytes = self.slots.numpy().data.cast("B")
        self._seen = self.seen.view(1).numpy()

    def put(self, batch: DraftBatch) -> None:
        """Leave a batch for the next phase; waits where all slots are of batches that the GPU has yet to take.

        The batch's tensors must live until that phase is launched, on the stream that they are used on.  A dummy batch
        names slots of live requests that it must leave alone, and counts as one without any.

        Raises:
            EagleMRV2Error: a tensor is missing, or not of the type that the kernel reads; the GPU takes no batches.
        """
        depth = self._depth
        if self._written - int(self._seen[0]) >= depth:
            self._wait()
        fields = _EMPTY if batch.dummy_run else self._fields(batch)
        _SLOT.pack_into(self._bytes, self._written % depth * _SLOT.size, *fields)
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
        """Forget all batches, those too that passes took which had none (warm-up before a capture)."""
        if self.taken.is_cuda:
            torch.cuda.synchronize(self.taken.device)
        self.taken.zero_()
        self.seen.zero_()
        self.slots.zero_()
        self._written = 0
