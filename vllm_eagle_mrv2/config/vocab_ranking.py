"""Rankings of tokens by frequency, and the draft vocabulary taken from one.

``vllm-eagle-mrv2 rank-vocab`` writes the file, and the option ``draft_vocab`` names it.  The process that makes the
configuration reads it once, before the model loads; the tokens reach the workers with the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_eagle_mrv2.config.options import DraftVocab
from vllm_eagle_mrv2.errors import EagleMRV2Error

_REMEDY = "make one with `vllm-eagle-mrv2 rank-vocab`"
# A model's vocabulary is a little larger than its tokenizer's, or smaller; more means that they do not belong together.
_PADDING = 0.1


class Ranking(BaseModel):
    """A ranking file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokenizer: str = ""
    """Name or path of the tokenizer; informative only."""
    vocab_size: int | None = Field(default=None, gt=0)
    """Number of ids of the tokenizer."""
    tokens: tuple[Annotated[int, Field(ge=0, strict=True)], ...]
    """Token ids: special tokens, then the others by falling frequency; tokens that never occurred are left out."""
    coverage: dict[int, float] = {}
    """Size of a draft vocabulary -> share of the corpus that its tokens cover."""


def read_ranking(path: Path) -> Ranking:
    """Read a ranking file.

    Raises:
        EagleMRV2Error: the file cannot be read, or is not a ranking.
    """
    try:
        ranking = Ranking.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EagleMRV2Error(
            f"the ranking {path} of draft_vocab cannot be read ({error.strerror or error}); {_REMEDY}."
        ) from error
    except ValidationError as invalid:
        problem: Mapping[str, Any] = invalid.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise EagleMRV2Error(f"{path} is not a ranking ({where}: {problem['msg']}); {_REMEDY}.") from None
    if len(set(ranking.tokens)) < len(ranking.tokens):
        raise EagleMRV2Error(f"{path} is not a ranking (tokens stand in it twice); {_REMEDY}.")
    return ranking


@dataclass(frozen=True)
class KeptTokens:
    """The draft vocabulary that a user asked for."""

    ids: tuple[int, ...] = field(repr=False)
    """Token ids in ascending order."""
    ranking: str
    tokenizer_size: int | None

    def within(self, vocab_size: int) -> tuple[int, ...]:
        """Return the ids that a draft has; a tokenizer may have a few more, such as a token for padding.

        Args:
            vocab_size: size of the draft's whole vocabulary.

        Raises:
            EagleMRV2Error: no token is left out, or the ranking belongs to another vocabulary.
        """
        if len(self.ids) >= vocab_size:
            raise EagleMRV2Error(
                f"draft_vocab keeps {len(self.ids)} tokens of a draft with {vocab_size}; "
                "take a smaller size, or leave draft_vocab out."
            )
        of = self.tokenizer_size
        if self.ids[-1] >= vocab_size if of is None else abs(of - vocab_size) > _PADDING * vocab_size:
            size = f"a tokenizer of {of} tokens" if of is not None else f"a vocabulary with the token {self.ids[-1]}"
            raise EagleMRV2Error(
                f"the ranking {self.ranking} is of {size}, the draft has a vocabulary of {vocab_size}; "
                "make one with `vllm-eagle-mrv2 rank-vocab --tokenizer` and the target's name."
            )
        return tuple(token for token in self.ids if token < vocab_size)


def kept_tokens(asked: DraftVocab) -> KeptTokens:
    """The first ``size`` tokens of the ranking that the user named.

    Raises:
        EagleMRV2Error: the file is not a ranking, or has fewer tokens.
    """
    ranking = read_ranking(asked.ranking)
    if len(ranking.tokens) < asked.size:
        raise EagleMRV2Error(
            f"draft_vocab asks for {asked.size} tokens and {asked.ranking} ranks {len(ranking.tokens)}; "
            "take a smaller size, or rank more text."
        )
    return KeptTokens(tuple(sorted(ranking.tokens[: asked.size])), str(asked.ranking), ranking.vocab_size)
