"""What a user can set in ``additional_config``."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle_mrv2.config.behaviours import BEYOND_STOCK, SWITCHES, Behaviour
from vllm_eagle_mrv2.config.options import DraftVocab, Options, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error

pytestmark = pytest.mark.any_release


@pytest.mark.parametrize("additional_config", [None, {}, {"other": 1}, {"eagle_mrv2": {}}, object()])
def test_everything_is_on_by_default(additional_config: object) -> None:
    options = parse_options(additional_config)
    assert all(options.enabled(behaviour) for behaviour in Behaviour)
    assert options.draft_logits_dtype == "float32"
    assert options.draft_vocab is None
    assert options.draft_quantization is None


@pytest.mark.parametrize("behaviour", sorted(SWITCHES))
def test_one_behaviour_can_be_switched_off(behaviour: Behaviour) -> None:
    options = parse_options({"eagle_mrv2": {"disable": [behaviour.value]}})
    assert [each for each in Behaviour if not options.enabled(each)] == [behaviour]


def test_the_dtype_of_draft_logits_can_be_that_of_the_head() -> None:
    assert parse_options({"eagle_mrv2": {"draft_logits_dtype": "head"}}).draft_logits_dtype == "head"


def test_a_draft_vocabulary() -> None:
    options = parse_options({"eagle_mrv2": {"draft_vocab": {"size": 32768, "ranking": "ranking.json"}}})
    assert options.draft_vocab == DraftVocab(size=32768, ranking=Path("ranking.json"))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"disabled": []}, "unknown option 'disabled'"),
        ({"disable": ["full_decode"]}, "'full_decode'"),
        ({"disable": "full_decode_only"}, "'full_decode_only'"),
        ({"disable": ["shared_graph_pool"]}, "disable: shared_graph_pool cannot be switched off (given:"),
        ({"draft_logits_dtype": "float16"}, "'float16'"),
        ({"draft_vocab": {"ranking": "r.json"}}, "draft_vocab.size: Field required"),
        ({"draft_vocab": {"size": 8}}, "draft_vocab.ranking: Field required"),
        ({"draft_vocab": {"size": 0, "ranking": "r.json"}}, "draft_vocab.size: Input should be greater than 0"),
        ({"draft_vocab": {"size": "8", "ranking": "r.json"}}, "draft_vocab.size: Input should be a valid integer"),
        ({"draft_vocab": {"size": 8, "ranking": "r.json", "top": 1}}, "unknown option 'draft_vocab.top'"),
        ({"draft_vocab": 8}, "draft_vocab: "),
        ({"draft_quantization": "int4"}, "draft_quantization: Input should be 'fp8'"),
        ({"draft_quantization": "fp8", "disable": ["row_products"]}, "needs row_products, which is in disable"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        parse_options({"eagle_mrv2": given})
    message = str(refused.value)
    assert cause in message
    assert "\n" not in message
    for known in (*(behaviour.value for behaviour in SWITCHES), *Options.model_fields):
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


FOLLOW_NO_SINGLE_CHANGE = {
    Behaviour.PADDING_WITHOUT_LOGITS,
    Behaviour.SINGLE_TOKEN_CAPTURE_SIZES,
    Behaviour.LENGTHS_WITHOUT_SYNC,
    Behaviour.INDEPENDENT_DRAFT_NOISE,
    Behaviour.DRAFT_ENFORCE_EAGER,
    *(BEYOND_STOCK - {Behaviour.DRAFT_TOP_K_TOP_P}),
}


@pytest.mark.parametrize("behaviour", Behaviour)
def test_every_behaviour_says_what_it_does(behaviour: Behaviour) -> None:
    text, _, changes = behaviour.summary.partition(" (")
    assert text
    assert text == text.strip()
    assert "\n" not in text
    assert bool(re.fullmatch(r"#\d+(, #\d+)*\)", changes)) == (behaviour not in FOLLOW_NO_SINGLE_CHANGE)
    assert ("#" in behaviour.summary) == (behaviour not in FOLLOW_NO_SINGLE_CHANGE)
    assert str(behaviour) == behaviour.value
