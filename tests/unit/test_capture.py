"""Graph managers: the mode of draft decodes, and inputs made anew for every pass."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.drafting.capture import (
    CollectsAttentionState,
    DecodeCapture,
    FreshInputsCapture,
    PrefillCapture,
    decode_mode,
)
from vllm_eagle_mrv2.drafting.loop import ForwardInputs

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
    chosen: Any = decode_mode(mode, full_decode_only=True)
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


def inputs_of(descriptor: Any) -> ForwardInputs:
    return ForwardInputs(2, 8, {"of": descriptor}, {"slots": descriptor}, None, "not yet known")  # type: ignore[arg-type]


@pytest.mark.parametrize("mixin", [FreshInputsCapture, PrefillCapture, DecodeCapture])
def test_every_pass_gets_inputs_of_its_own(mixin: type[FreshInputsCapture]) -> None:
    manager = type("Manager", (mixin, StockManager), {})()
    made: list[ForwardInputs] = []
    passes: list[tuple[ForwardInputs, Any]] = []

    def make_inputs(descriptor: Any) -> ForwardInputs:
        made.append(inputs_of(descriptor))
        return made[-1]

    manager.capture_fresh(
        lambda inputs, **further: passes.append((inputs, further)),
        make_inputs,
        "Capturing",
        lambda descriptor: {"num_draft_tokens": descriptor * 2},
    )

    assert manager.label == "Capturing"
    # One set of inputs for each pass, and each pass with its own, made before it ran.
    assert [inputs.attn_metadata["of"] for inputs in made] == ["a", "a", "b", "b"]
    assert len({id(inputs.attn_metadata) for inputs in made}) == 4
    modes: list[Any] = ["warm-up", "capture"] * 2
    assert [inputs for inputs, _ in passes] == [
        inputs._replace(mode=mode) for inputs, mode in zip(made, modes, strict=True)
    ]
    assert all(ran.attn_metadata is inputs.attn_metadata for (ran, _), inputs in zip(passes, made, strict=True))
    assert [further for _, further in passes] == [{"num_draft_tokens": text} for text in ("aa", "aa", "bb", "bb")]


def test_inputs_are_made_outside_the_graph() -> None:
    """``create_forward`` runs before a capture, what it returns inside: building inputs there would be recorded."""
    made: list[Any] = []

    class Looks(StockManager):
        def capture(self, create_forward_fn: Any, progress_bar_desc: str) -> None:
            forward = create_forward_fn("a")
            assert made == ["a"]
            forward("capture")
            forward("replay")
            assert made == ["a"]

    def make_inputs(descriptor: Any) -> ForwardInputs:
        made.append(descriptor)
        return inputs_of(descriptor)

    type("Manager", (FreshInputsCapture, Looks), {})().capture_fresh(lambda *a, **k: None, make_inputs, "")
    assert made == ["a"]


def numbered_passes() -> tuple[Callable[[Any], Callable[[Any], None]], list[tuple[Any, ...]]]:
    """A maker of passes, and what happens: each pass knows the number of the inputs that were made for it."""
    happened: list[tuple[Any, ...]] = []
    numbers = itertools.count()

    def make_pass(descriptor: Any) -> Callable[[Any], None]:
        number = next(numbers)
        happened.append(("made", number, descriptor))
        return lambda mode: happened.append(("ran", number, mode))

    return make_pass, happened


def made_and_run(number: int, mode: str) -> list[tuple[Any, ...]]:
    return [("made", number, "a"), ("ran", number, mode)]


def test_the_pass_factory_makes_a_pass_at_every_call() -> None:
    make_pass, happened = numbered_passes()
    factory = FreshInputsCapture().pass_factory(make_pass)
    factory("a", warmup=True)("warm-up")
    factory("a")("capture")
    factory("a", False)("capture again")
    assert happened == [
        *made_and_run(0, "warm-up"),
        *made_and_run(1, "capture"),
        *made_and_run(2, "capture again"),
    ]


def test_capture_hands_the_release_what_its_pass_factory_returns() -> None:
    """As where the capture loop collects attention states too."""
    handed: list[Any] = []

    class Looks:
        def capture(self, create_forward_fn: Any, progress_bar_desc: str) -> None:
            handed.append(create_forward_fn("a"))

    modes: list[Any] = []
    manager = type("Manager", (CollectsAttentionState, FreshInputsCapture, Looks), {})()
    manager.capture_fresh(lambda inputs: modes.append(inputs.mode), inputs_of, "")
    ((captured, state),) = handed
    captured("mode")
    assert modes == ["mode"]
    assert state is None


@pytest.mark.parametrize("arguments", [({}, {}), ({"warmup": True}, {"warmup": False})], ids=["0.22", "0.23"])
def test_a_factory_of_releases_that_collect_attention_states(arguments: tuple[dict[str, bool], ...]) -> None:
    make_pass, happened = numbered_passes()
    factory = CollectsAttentionState().pass_factory(make_pass)
    for number, given in enumerate(arguments):
        run, state = factory("a", **given)
        run("mode")  # type: ignore[arg-type]
        assert state is None
        assert happened[2 * number :] == made_and_run(number, "mode")


def module_of(adapter: str, *, elsewhere: bool = False) -> Any:
    """An adapter's module, which is imported on its own releases.

    With ``elsewhere`` also on others that have what it imports, for a module whose seams pass by what is not ours.
    """
    covered = importlib.import_module(f"vllm_eagle_mrv2.releases.{adapter}").RELEASE.covers(
        releases.installed_version()
    )
    if not (covered or elsewhere):
        pytest.skip(f"{adapter} is not for the installed vLLM")
    try:
        return importlib.import_module(f"vllm_eagle_mrv2.releases.{adapter}.adapter")
    except ImportError as error:
        if covered:
            raise
        pytest.skip(f"{adapter} is not for the installed vLLM: {error}")


@pytest.mark.parametrize("adapter", ["v0_22", "v0_23"])
def test_managers_of_releases_that_collect_attention_states(adapter: str) -> None:
    """The mixin comes first, or a manager would hand passes without a state."""
    for manager in module_of(adapter).Adapter.managers:
        assert manager.pass_factory is CollectsAttentionState.pass_factory


@pytest.mark.parametrize("full", [True, False], ids=["FULL", "PIECEWISE"])
def test_one_factory_call_for_warm_up_and_capture(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pass, happened = numbered_passes()
    factory = module_of("v0_20", elsewhere=True)._OneFactoryCall().pass_factory(make_pass)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    run = factory("a")
    run("warm-up")
    # Made anew before the capture begins: inside it, building inputs would be recorded.
    before = [*made_and_run(0, "warm-up"), ("made", 1, "a")]
    assert happened == before
    capturing = full
    run("capture")
    assert happened[: len(before) + 1] == [*before, ("ran", 1, "capture")]
    assert len(happened) == len(before) + (1 if full else 2)
