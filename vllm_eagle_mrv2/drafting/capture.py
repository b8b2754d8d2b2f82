"""CUDA graph managers of the draft.

The classes here are mixed into the ``CudaGraphManager`` of the installed vLLM, which owns the graphs, their
descriptors, dispatch and replay.  vLLM finds and drops a speculator's managers by that base class.
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
"""A pass with its inputs bound; called with the CUDA graph mode."""


class Forward(Protocol):
    """A pass of the draft loop that can be captured."""

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
    """Captures every graph with dummy inputs built for that pass alone.

    Metadata builders return views of persistent buffers.  By the time of a capture, metadata from an earlier build
    describes another batch, and kernels captured with it read out of bounds (#44253, #48261).  Each warm-up and each
    capture therefore builds its own inputs.
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
            label: progress bar text.
            arguments: descriptor -> further keyword arguments of the pass.
        """

        def make_pass(descriptor: Any) -> Pass:
            inputs = make_inputs(descriptor)
            further = arguments(descriptor)
            return lambda mode: forward(*inputs, mode, **further)

        # The release's own capture loop: PIECEWISE before FULL, warm-up before capture, the target's memory pool.
        super().capture(self.pass_factory(make_pass), label)  # type: ignore[misc]

    def pass_factory(self, make_pass: Callable[[Any], Pass]) -> Callable[..., Any]:
        """Return the factory that the capture loop calls, once for the warm-up pass and once for the captured one."""
        return lambda descriptor, warmup=False: make_pass(descriptor)


class PrefillCapture(FreshInputsCapture):
    """Draft prefill: FULL and PIECEWISE graphs, in the same modes as the target."""


class DecodeCapture(FreshInputsCapture):
    """Draft decode: one token per request, FULL_DECODE_ONLY or NONE."""


def decode_mode(target_mode: Any, *, full_decode_only: bool) -> Any:
    """Return the CUDA graph mode of draft decodes for a given target mode.

    PIECEWISE graphs pad a batch but not its attention metadata, which then holds stale entries for the padded rows.
    Draft decodes therefore run in FULL graphs or eagerly (#39773).

    Args:
        target_mode: vLLM's ``CUDAGraphMode`` of the target.
        full_decode_only: False, where that behaviour is disabled, returns the target's mode unchanged.
    """
    if not full_decode_only:
        return target_mode
    modes = type(target_mode)
    return modes.FULL_DECODE_ONLY if target_mode.decode_mode() == modes.FULL else modes.NONE
