"""What the draft uses of vLLM's CUDA graph types, which every release has under this form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class GraphMode(Protocol):
    """A member of vLLM's ``CUDAGraphMode``; NONE is false."""

    @property
    def name(self) -> str:
        """NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE."""

    def decode_mode(self) -> GraphMode:
        """The mode of uniform batches of decodes."""


class Descriptor(Protocol):
    """vLLM's descriptor of a batch that a graph serves, or that runs without one."""

    @property
    def cg_mode(self) -> GraphMode:
        """How the batch runs."""

    @property
    def num_tokens(self) -> int:
        """Tokens, with padding."""

    @property
    def num_reqs(self) -> int | None:
        """Requests, with padding; None if any number fits."""

    @property
    def uniform_token_count(self) -> int | None:
        """Tokens of every request; None if they differ."""


class GraphManager(Protocol):
    """vLLM's ``CudaGraphManager``, as far as a replay needs it."""

    graphs: Mapping[Any, Any]

    def run_fullgraph(self, desc: Any) -> Any:
        """Replay the FULL graph of a descriptor."""
