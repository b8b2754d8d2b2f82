"""Graph managers: the mode of draft decodes, and inputs made anew for every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_eagle_mrv2.cudagraph import (
    CapturedAttentionState,
    DecodeCapture,
    FreshInputsCapture,
    PrefillCapture,
    decode_mode,
)

CUDAGraphMode = pytest.importorskip("vllm.config.compilation").CUDAGraphMode

DECODE_MODES = {
    "NONE": "NONE",
    "PIECEWISE": "NONE",
    "FULL": "FULL_DECODE_ONLY",
    "FULL_DECODE_ONLY": "FULL_DECODE_ONLY",
    "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY",
}


@pytest.mark.parametrize("mode", CUDAGraphMode, ids=lambda mode: mode.name)
def test_draft_decodes_never_run_piecewise(mode: Any) -> None:
    chosen = decode_mode(mode, full_decode_only=True)
    assert chosen == CUDAGraphMode[DECODE_MODES[mode.name]]
    assert not chosen.has_mode(CUDAGraphMode.PIECEWISE)


@pytest.mark.parametrize("mode", CUDAGraphMode, ids=lambda mode: mode.name)
def test_with_the_behaviour_off_the_mode_is_the_targets(mode: Any) -> None:
    assert decode_mode(mode, full_decode_only=False) is mode


class StockManager:
    """Captures as vLLM does: a forward for the warm-up and another for the capture of each descriptor."""

    descriptors = ("a", "b")

    def __init__(self) -> None:
        self.label = ""

    def capture(self, create_forward_fn: Callable[..., Callable[[Any], None]], progress_bar_desc: str) -> None:
        self.label = progress_bar_desc
        for descriptor in self.descriptors:
            create_forward_fn(descriptor, warmup=True)("warm-up")
            create_forward_fn(descriptor)("capture")


@pytest.mark.parametrize("mixin", [FreshInputsCapture, PrefillCapture, DecodeCapture])
def test_every_pass_gets_inputs_of_its_own(mixin: type[FreshInputsCapture]) -> None:
    manager = type("Manager", (mixin, StockManager), {})()
    made: list[CapturedAttentionState] = []
    passes: list[tuple[Any, ...]] = []

    def make_inputs(descriptor: str) -> CapturedAttentionState:
        made.append(CapturedAttentionState(2, 8, {"of": descriptor}, {"slots": descriptor}, None))
        return made[-1]

    def forward(*arguments: Any, **further: Any) -> None:
        passes.append((arguments, further))

    manager.capture_fresh(forward, make_inputs, "Capturing", lambda descriptor: {"num_draft_tokens": descriptor * 2})

    assert manager.label == "Capturing"
    # One set of inputs for each pass, and each pass with its own, made before it ran.
    assert [inputs.attn_metadata["of"] for inputs in made] == ["a", "a", "b", "b"]
    assert len({id(inputs.attn_metadata) for inputs in made}) == len(passes) == 4
    for inputs, (arguments, _) in zip(made, passes, strict=True):
        assert arguments[:2] == (2, 8)
        assert arguments[2] is inputs.attn_metadata
        assert arguments[3] is inputs.slot_mappings
    assert [arguments[-1] for arguments, _ in passes] == ["warm-up", "capture"] * 2
    assert [further for _, further in passes] == [{"num_draft_tokens": text} for text in ("aa", "aa", "bb", "bb")]


def test_inputs_are_made_outside_the_graph() -> None:
    """``create_forward`` runs before a capture, what it returns inside: building inputs there would be recorded."""
    made: list[str] = []

    class Looks(StockManager):
        def capture(self, create_forward_fn: Any, progress_bar_desc: str) -> None:
            forward = create_forward_fn("a")
            assert made == ["a"]
            forward("capture")
            forward("replay")
            assert made == ["a"]

    def make_inputs(descriptor: str) -> CapturedAttentionState:
        made.append(descriptor)
        return CapturedAttentionState(1, 1, None, None, None)

    type("Manager", (FreshInputsCapture, Looks), {})().capture_fresh(lambda *a, **k: None, make_inputs, "")
    assert made == ["a"]
