"""What a user can set in ``additional_config={"eagle_mrv2": {...}}``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from vllm_eagle_mrv2.config.behaviours import SWITCHES, Behaviour
from vllm_eagle_mrv2.errors import EagleMRV2Error

OPTIONS_KEY = "eagle_mrv2"


class DraftVocab(BaseModel):
    """The tokens that a head with the whole vocabulary may draft; other rows are not computed (FR-Spec, 2502.14856)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(gt=0, strict=True)
    """How many tokens to keep, the first of the ranking."""
    ranking: Path
    """File of ``vllm-eagle-mrv2 rank-vocab``."""


class Options(BaseModel):
    """Validated options of one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    disable: frozenset[Behaviour] = frozenset()
    """Behaviours to switch off, for measurement only."""
    draft_logits_dtype: Literal["float32", "head"] = "float32"
    """Dtype of the stored draft logits: float32, or that of the draft's head."""
    draft_vocab: DraftVocab | None = None
    """Keep the head's rows for frequent tokens only."""
    draft_quantization: Literal["fp8"] | None = None
    """Round the draft's weights to FP8: less to read, other drafts, the same output."""
    draft_length: Literal["constant", "auto"] = "constant"
    """Draft ``num_speculative_tokens`` always, or choose up to so many at run time, none included."""
    lookup_drafts: bool = False
    """Where a request's text repeats itself, draft the tokens that followed before."""

    @field_validator("disable")
    @classmethod
    def _only_switches(cls, disable: frozenset[Behaviour]) -> frozenset[Behaviour]:
        for behaviour in sorted(disable - SWITCHES):
            raise ValueError(f"{behaviour} cannot be switched off")
        return disable

    @field_validator("draft_quantization")
    @classmethod
    def _needs_products(cls, draft_quantization: str | None, info: ValidationInfo) -> str | None:
        if draft_quantization is not None and Behaviour.ROW_PRODUCTS in info.data.get("disable", ()):
            raise ValueError(f"needs {Behaviour.ROW_PRODUCTS}, which is in disable; leave one of them out")
        return draft_quantization

    def enabled(self, behaviour: Behaviour) -> bool:
        """Whether a behaviour is on."""
        return behaviour not in self.disable

    def without(self, behaviour: Behaviour) -> Options:
        """The same options with one more behaviour switched off."""
        return self.model_copy(update={"disable": self.disable | {behaviour}})


def parse_options(additional_config: object) -> Options:
    """Read and validate the options in vLLM's ``additional_config``.

    Args:
        additional_config: the engine's ``additional_config``; anything but a mapping counts as no options.

    Raises:
        EagleMRV2Error: a key is unknown or a value is invalid; the message lists the known options.
    """
    given = additional_config.get(OPTIONS_KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise EagleMRV2Error(
            f'additional_config["{OPTIONS_KEY}"] must be a mapping of options, not {type(given).__name__}.'
        )
    try:
        return Options.model_validate(dict(given))
    except ValidationError as invalid:
        raise EagleMRV2Error(
            f'additional_config["{OPTIONS_KEY}"] is not valid: {_first_problem(invalid)}; known options are {_known()}.'
        ) from None


def _first_problem(invalid: ValidationError) -> str:
    error: Mapping[str, Any] = invalid.errors()[0]
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown option '{where}'"
    return f"{where}: {error['msg'].removeprefix('Value error, ')} (given: {error['input']!r})"


def _known() -> str:
    behaviours = ", ".join(behaviour.value for behaviour in Behaviour if behaviour in SWITCHES)
    return (
        f"disable (a list of: {behaviours}), draft_logits_dtype (float32 or head), "
        'draft_vocab ({"size": NUMBER, "ranking": PATH}), draft_quantization (fp8), draft_length (constant or auto) '
        "and lookup_drafts (true or false)"
    )
