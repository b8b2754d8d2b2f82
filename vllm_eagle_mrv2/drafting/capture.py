"""CUDA-graph managers of the draft.

The classes here are mixed into the ``CudaGraphManager`` of the vLLM release at hand, which owns the graphs, their
descriptors, dispatch and replay: vLLM finds and drops the managers of a speculator by that base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class CapturedAttentionState(NamedTuple):
    """Dummy inputs of one warm-up or capture pass."""

    num_reqs: int
    num_tokens: int
    attn_metadata: Any
    slot_mappings: Any
    num_tokens_across_dp: Any


Pass = Callable[[Any], None]
"""A pass with its inputs in place, given the graph mode."""


class Forward(Protocol):
    """A pass of the draft loop, to be captured."""

    def __call__(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        **kwargs: Any,
    ) -> None: ...


class FreshInputsCapture:
    """Captures every graph against inputs made for that very pass.

    Builders keep persistent buffers behind the metadata that they return.  Metadata from an earlier build describes
    another batch by the time of a capture, and kernels captured on it read out of bounds (#44253, #48261).  So each
    warm-up and each capture asks for its own.
    """

    def capture_fresh(
        self,
        forward: Forward,
        make_inputs: Callable[[Any], CapturedAttentionState],
        label: str,
        arguments: Callable[[Any], dict[str, Any]] = lambda descriptor: {},
    ) -> None:
        """Warm up and capture every descriptor of this manager.

        Args:
            forward: the pass to capture.
            make_inputs: descriptor -> dummy inputs, made outside the graph.
            label: text of the progress bar.
            arguments: descriptor -> further keyword arguments of the pass.
        """

        def make_pass(descriptor: Any) -> Pass:
            inputs = make_inputs(descriptor)
            further = arguments(descriptor)
            return lambda mode: forward(*inputs, mode, **further)

        # The release's own capture loop: PIECEWISE before FULL, warm-up before capture, the target's memory pool.
        super().capture(self.pass_factory(make_pass), label)  # type: ignore[misc]

    def pass_factory(self, make_pass: Callable[[Any], Pass]) -> Callable[..., Any]:
        """What this release's capture loop takes; it asks for a warm-up pass, and then for one to capture."""
        return lambda descriptor, warmup=False: make_pass(descriptor)


class PrefillCapture(FreshInputsCapture):
    """Draft prefill: FULL and PIECEWISE graphs, as the target has them."""


class DecodeCapture(FreshInputsCapture):
    """Draft decode: one token a request, FULL_DECODE_ONLY or NONE."""


def decode_mode(target_mode: Any, *, full_decode_only: bool) -> Any:
    """The graph mode of draft decodes, given the target's.

    PIECEWISE graphs pad a batch without its attention metadata, which then holds stale entries for the padding, so
    draft decodes run in FULL graphs or in none (#39773).

    Args:
        target_mode: vLLM's ``CUDAGraphMode`` of the target.
        full_decode_only: off only where that behaviour is disabled.
    """
    if not full_decode_only:
        return target_mode
    modes = type(target_mode)
    return modes.FULL_DECODE_ONLY if target_mode.decode_mode() == modes.FULL else modes.NONE
