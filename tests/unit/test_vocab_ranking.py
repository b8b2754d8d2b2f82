"""Rankings of tokens, and what of them cannot be a draft vocabulary."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle_mrv2.config.method import Settings, translate
from vllm_eagle_mrv2.config.options import DraftVocab, Options
from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens, kept_tokens
from vllm_eagle_mrv2.errors import EagleMRV2Error

pytestmark = pytest.mark.any_release


def write(path: Path, ranking: Any) -> Path:
    path.write_text(ranking if isinstance(ranking, str) else json.dumps(ranking))
    return path


def ask(path: Path, size: int) -> KeptTokens:
    return kept_tokens(DraftVocab(size=size, ranking=path))


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(EagleMRV2Error) as refusal:
        call(*args)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def test_the_first_of_the_ranking_in_the_order_of_their_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {"tokenizer": "t", "vocab_size": 50, "tokens": [9, 3, 40, 7], "coverage": {}})
    assert ask(path, 3) == KeptTokens((3, 9, 40), str(path), 50)
    assert ask(path, 4).ids == (3, 7, 9, 40)


def test_a_ranking_of_ids_alone(tmp_path: Path) -> None:
    assert ask(write(tmp_path / "r.json", {"tokens": [5, 2]}), 2).tokenizer_size is None


@pytest.mark.parametrize(
    ("ranking", "cause"),
    [
        ("", "Invalid JSON"),
        ([1, 2], "an object"),
        ({}, "tokens: Field required"),
        ({"tokens": ["a"]}, "tokens.0: Input should be a valid integer"),
        ({"tokens": [1, 2.5]}, "tokens.1: Input should be a valid integer"),
        ({"tokens": [1, -2]}, "tokens.1: Input should be greater than or equal to 0"),
        ({"tokens": [1, 2, 1]}, "stand in it twice"),
    ],
)
def test_what_is_not_a_ranking(ranking: Any, cause: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", ranking)
    message = refused(ask, path, 1)
    assert message.startswith(f"{path} is not a ranking (")
    assert cause in message
    assert "rank-vocab" in message


def test_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert f"the ranking {path} of draft_vocab cannot be read (No such file" in refused(ask, path, 1)
    assert "cannot be read (Is a directory)" in refused(ask, tmp_path, 1)


def test_a_ranking_that_is_too_short(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {"tokens": [1, 2]})
    assert refused(ask, path, 3).startswith(f"draft_vocab asks for 3 tokens and {path} ranks 2")


@pytest.mark.parametrize(
    ("ids", "tokenizer_size", "cause"),
    [
        (range(100), None, "draft_vocab keeps 100 tokens of a draft with 100"),
        (range(150), 100, "draft_vocab keeps 150 tokens of a draft with 100"),
        ((1, 100), None, "r.json is of a vocabulary with the token 100, the draft has a vocabulary of 100"),
        ((1, 2), 111, "r.json is of a tokenizer of 111 tokens, the draft has a vocabulary of 100"),
        ((1, 2), 89, "r.json is of a tokenizer of 89 tokens, the draft has a vocabulary of 100"),
    ],
)
def test_another_vocabulary(ids: Any, tokenizer_size: int | None, cause: str) -> None:
    assert cause in refused(KeptTokens(tuple(ids), "r.json", tokenizer_size).within, 100)


@pytest.mark.parametrize("tokenizer_size", [None, 90, 100])
def test_a_vocabulary_that_is_padded(tokenizer_size: int | None) -> None:
    assert KeptTokens((1, 99), "r.json", tokenizer_size).within(100) == (1, 99)


def test_tokens_that_the_model_lacks() -> None:
    """Such as one for padding that was added to the tokenizer."""
    assert KeptTokens((1, 99, 100), "r.json", 101).within(100) == (1, 99)


# In the settings


@pytest.fixture
def options(tmp_path: Path) -> Options:
    path = write(tmp_path / "r.json", {"vocab_size": 50, "tokens": [4, 0, 2]})
    return Options(draft_vocab=DraftVocab(size=2, ranking=path))


def translated(family: str, options: Options) -> Settings:
    asked = {"method": f"eagle_mrv2:{family}", "model": "draft", "num_speculative_tokens": 2}
    return translate(asked, "target", options)[1]


@pytest.mark.parametrize("family", ["eagle", "mtp"])
def test_the_tokens_travel_with_the_request(family: str, options: Options) -> None:
    settings = translated(family, options)
    assert settings.kept_tokens is not None
    assert options.draft_vocab is not None
    options.draft_vocab.ranking.unlink()  # another machine does not have the file
    assert pickle.loads(pickle.dumps(settings)).kept_tokens.ids == (0, 4)
    assert "0, 4" not in repr(settings)  # vLLM logs its arguments
    assert translated(family, Options()).kept_tokens is None


def test_an_eagle3_head(options: Options) -> None:
    assert "an EAGLE-3 head is trained with a draft vocabulary of its own" in refused(translated, "eagle3", options)
