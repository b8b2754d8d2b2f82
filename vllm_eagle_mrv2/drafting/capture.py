"""CUDA graph managers of the draft.

The classes here are mixed into the ``CudaGraphManager`` of the installed vLLM, which owns the graphs, their
descriptors, dispatch and replay.  vLLM finds and drops a speculator's managers by that base class.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_eagle_mrv2.drafting.loop import ForwardInputs
from vllm_eagle_mrv2.drafting.protocols import Descriptor, GraphMode


class CapturedAttentionState(NamedTuple):
    """Dummy attention inputs, built for one warm-up or capture pass."""

    attn_metadata: Any
    slot_mappings: Any  # by layer


class AskedGraphs(NamedTuple):
    """Graph settings as the user gave them; vLLM fits them to the target before the draft's graphs are made."""

    mode: GraphMode | None
    capture_sizes: list[int] | None
    max_capture_size: int | None

    @classmethod
    def of(cls, compilation_config: Any) -> AskedGraphs:
        """The settings of vLLM's ``CompilationConfig``, to be read before a speculator is made."""
        config = compilation_config
        return cls(config.cudagraph_mode, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size)


Pass = Callable[[GraphMode], None]
"""A pass with its inputs bound; called with the CUDA graph mode."""


class FreshInputsCapture:
    """Captures every graph with dummy inputs built for that pass alone.

    Metadata builders return views of persistent buffers.  By the time of a capture, metadata from an earlier build
    describes another batch, and kernels captured with it read out of bounds (#44253, #48261).  Each warm-up and each
    capture therefore builds its own inputs.
    """

    def capture_fresh(
        self,
        forward: Callable[..., None],
        make_inputs: Callable[[Descriptor], ForwardInputs],
        label: str,
        arguments: Callable[[Descriptor], dict[str, Any]] = lambda descriptor: {},
    ) -> None:
        """Warm up and capture every descriptor of this manager.

        Args:
            forward: the pass of the draft loop to capture, called with its inputs.
            make_inputs: descriptor -> dummy inputs, made outside the graph.
            label: progress bar text.
            arguments: descriptor -> keyword arguments of the pass.
        """

        def make_pass(descriptor: Descriptor) -> Pass:
            inputs = make_inputs(descriptor)
            further = arguments(descriptor)
            return lambda mode: forward(inputs._replace(mode=mode), **further)

        # The release's own capture loop: PIECEWISE before FULL, warm-up before capture, the target's memory pool.
        super().capture(self.pass_factory(make_pass), label)  # type: ignore[misc]

    def pass_factory(self, make_pass: Callable[[Descriptor], Pass]) -> Callable[..., Any]:
        """Return the factory that the capture loop calls, once for the warm-up pass and once for the captured one."""
        return lambda descriptor, warmup=False: make_pass(descriptor)


class PrefillCapture(FreshInputsCapture):
    """Draft prefill: FULL and PIECEWISE graphs, in the same modes as the target."""


class DecodeCapture(FreshInputsCapture):
    """Draft decode: one token per request, FULL_DECODE_ONLY or NONE."""

    graphs: dict[Any, Any]
    _capture_descs: dict[Any, list[Any]]

    def specialize(self, lengths: list[int]) -> None:
        """Capture every descriptor once per number of draft tokens; may be called again before another capture."""
        for mode, descriptors in self._capture_descs.items():
            if not any(hasattr(each, "num_draft_tokens") for each in descriptors):
                pairs = itertools.product(descriptors, lengths)
                self._capture_descs[mode] = [_of_length(each, length) for each, length in pairs]

    def of_draft_length(self, descriptor: Any, num_draft_tokens: int) -> Any:
        """Return the descriptor of a captured graph with this many draft tokens; None if there is none.

        Args:
            descriptor: of a FULL graph, as dispatched.
            num_draft_tokens: of the batch.
        """
        if descriptor in self.graphs:
            return descriptor
        special = _of_length(descriptor, num_draft_tokens)
        return special if special in self.graphs else None


def _of_length(descriptor: Any, num_draft_tokens: int) -> Any:
    """Return a descriptor of the same graph that contains the decodes for so many draft tokens."""
    stock_class: Any = type(descriptor)
    return _descriptor_class(stock_class)(**vars(descriptor), num_draft_tokens=num_draft_tokens)


@functools.cache
def _descriptor_class(stock_class: type) -> type:
    return dataclasses.make_dataclass(
        "DraftBatchDescriptor", [("num_draft_tokens", int, 0)], bases=(stock_class,), frozen=True
    )


class CollectsAttentionState:
    """Supports a capture loop that also collects the attention state of each pass; returns None for it."""

    def pass_factory(self, make_pass: Callable[[Descriptor], Pass]) -> Callable[..., tuple[Pass, None]]:
        """Return the factory that the capture loop calls before each pass."""
        return lambda descriptor, warmup=False: (make_pass(descriptor), None)


class GraphManagers(NamedTuple):
    """The classes of a draft's graph managers."""

    prefill: type[PrefillCapture]
    decode: type[DecodeCapture]


def decode_mode(target_mode: GraphMode, *, full_decode_only: bool) -> GraphMode:
    """Return the CUDA graph mode of draft decodes for a given target mode.

    PIECEWISE graphs pad a batch but not its attention metadata, which then holds stale entries for the padded rows.
    Draft decodes therefore run in FULL graphs or eagerly (#39773).

    Args:
        target_mode: vLLM's ``CUDAGraphMode`` of the target.
        full_decode_only: False, where that behaviour is disabled, returns the target's mode unchanged.
    """
    if not full_decode_only:
        return target_mode
    modes: Any = type(target_mode)
    chosen: GraphMode = modes.FULL_DECODE_ONLY if target_mode.decode_mode() == modes.FULL else modes.NONE
    return chosen
