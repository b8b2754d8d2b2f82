"""``EAGLE_MRV2_DISABLE``: the arguments that ask for ``eagle_mrv2`` make the configuration of stock's method."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support import PAIR, recorded_log

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.config import kill_switch
from vllm_eagle_mrv2.config.method import MARKER, settings_of
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches import speculator
from vllm_eagle_mrv2.patches.wrap import wrap
from vllm_eagle_mrv2.plugin import register

pytest.importorskip("vllm")
register()

from vllm.engine.arg_utils import EngineArgs  # noqa: E402

V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture(autouse=True)
def unsupported_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A vLLM that the package would refuse, in a process that has warned of nothing yet."""

    def refuse() -> Any:
        raise EagleMRV2Error("vllm-eagle-mrv2 does not support this vLLM; use another.")

    monkeypatch.setattr(releases, "installed_release", refuse)
    monkeypatch.setenv(kill_switch.VARIABLE, "1")
    monkeypatch.setenv(V2_VARIABLE, "")  # so that what is left in it is gone after the test
    monkeypatch.delenv(V2_VARIABLE)
    kill_switch._announce.cache_clear()
    yield
    kill_switch._announce.cache_clear()


def ask(method: str = "eagle_mrv2", family: str = "eagle", **more: Any) -> EngineArgs:
    speculative = {"method": method, "model": str(PAIR / family), "num_speculative_tokens": 3}
    arguments = {"load_format": "dummy", "dtype": "float32", "max_model_len": 64, "speculative_config": speculative}
    return EngineArgs(model=str(PAIR / "target"), **{**arguments, **more})


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_the_configuration_is_stocks(family: str) -> None:
    ours, stock = ask(family=family).create_engine_config(), ask(family, family).create_engine_config()
    assert settings_of(ours.speculative_config) is None
    assert ours.speculative_config == stock.speculative_config
    assert ours.additional_config == stock.additional_config
    assert ours.compute_hash() == stock.compute_hash()
    assert ours.use_v2_model_runner == stock.use_v2_model_runner


def test_a_forced_family_and_options_that_are_not_valid() -> None:
    options = {"eagle_mrv2": {"typo": 1}}
    config = ask("eagle_mrv2:eagle", additional_config=options).create_engine_config()
    assert config.speculative_config.method == "eagle"
    assert config.additional_config == options


def test_one_warning_a_process() -> None:
    with recorded_log() as log:
        for _ in range(2):
            ask().create_engine_config()
    assert log == ["EAGLE_MRV2_DISABLE=1: eagle_mrv2 is off, and stock vLLM drafts with method=eagle and the same head"]


@pytest.mark.parametrize("value", ["1", "true", "Yes", " ON "])
def test_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kill_switch.VARIABLE, value)
    assert settings_of(ask().create_engine_config().speculative_config) is None


@pytest.mark.parametrize("value", [None, "", "0", "False", "no", "OFF"])
def test_off(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kill_switch.VARIABLE)
    if value is not None:
        monkeypatch.setenv(kill_switch.VARIABLE, value)
    with pytest.raises(EagleMRV2Error, match="does not support this vLLM"):
        ask().create_engine_config()


def test_a_value_that_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kill_switch.VARIABLE, "maybe")
    with pytest.raises(EagleMRV2Error) as refused:
        ask().create_engine_config()
    assert str(refused.value) == (
        "EAGLE_MRV2_DISABLE='maybe' is neither on nor off; set it to 1 for stock vLLM's own method, "
        "or unset it for eagle_mrv2."
    )
    assert settings_of(ask("eagle").create_engine_config().speculative_config) is None, "nobody asked for us"


def test_a_draft_whose_family_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for value in ("1", "0"):
        monkeypatch.undo()
        monkeypatch.setenv(kill_switch.VARIABLE, value)
        with pytest.raises(EagleMRV2Error) as refused:
            ask(family="nowhere").create_engine_config()
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_switched_on_between_two_uses_of_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    arguments = ask()
    assert settings_of(arguments.create_engine_config().speculative_config) is not None
    monkeypatch.setenv(kill_switch.VARIABLE, "1")
    with recorded_log() as log:
        assert settings_of(arguments.create_engine_config().speculative_config) is None
    assert len(log) == 1
    assert MARKER not in arguments.speculative_config


def test_a_vllm_without_what_is_wrapped_stays_as_it_is() -> None:
    renamed = ModuleType("vllm.v1.worker.gpu.model_runner")
    wrap(renamed, "init_speculator", speculator.our_speculator)
    assert not hasattr(renamed, "init_speculator")
