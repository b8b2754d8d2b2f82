"""What a user can set in ``additional_config``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from vllm_eagle_mrv2.behaviours import Behaviour
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.options import Options, parse_options


@pytest.mark.parametrize("additional_config", [None, {}, {"other": 1}, {"eagle_mrv2": {}}, object()])
def test_everything_is_on_by_default(additional_config: object) -> None:
    options = parse_options(additional_config)
    assert all(options.enabled(behaviour) for behaviour in Behaviour)
    assert options.draft_logits_dtype == "float32"


@pytest.mark.parametrize("behaviour", Behaviour)
def test_one_behaviour_can_be_switched_off(behaviour: Behaviour) -> None:
    options = parse_options({"eagle_mrv2": {"disable": [behaviour.value]}})
    assert [each for each in Behaviour if not options.enabled(each)] == [behaviour]


def test_the_dtype_of_draft_logits_can_be_that_of_the_head() -> None:
    assert parse_options({"eagle_mrv2": {"draft_logits_dtype": "head"}}).draft_logits_dtype == "head"


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"disabled": []}, "unknown option 'disabled'"),
        ({"disable": ["full_decode"]}, "'full_decode'"),
        ({"disable": "full_decode_only"}, "'full_decode_only'"),
        ({"draft_logits_dtype": "float16"}, "'float16'"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        parse_options({"eagle_mrv2": given})
    message = str(refused.value)
    assert cause in message
    assert "\n" not in message
    for known in (*(behaviour.value for behaviour in Behaviour), *Options.model_fields):
        assert known in message


@pytest.mark.parametrize("given", [None, True, "disable", ["full_decode_only"]])
def test_options_must_be_a_mapping(given: object) -> None:
    with pytest.raises(EagleMRV2Error, match=f"must be a mapping of options, not {type(given).__name__}"):
        parse_options({"eagle_mrv2": given})


def test_options_travel_and_do_not_change() -> None:
    options = parse_options({"eagle_mrv2": {"disable": ["full_decode_only"], "draft_logits_dtype": "head"}})
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options) == options
    assert options != parse_options(None)
    with pytest.raises(ValueError, match="frozen"):
        options.draft_logits_dtype = "float32"  # type: ignore[misc]


@pytest.mark.parametrize("behaviour", Behaviour)
def test_every_behaviour_says_what_it_does(behaviour: Behaviour) -> None:
    assert "#" in behaviour.summary
    assert str(behaviour) == behaviour.value
