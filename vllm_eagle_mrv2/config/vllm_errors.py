"""vLLM's errors: a refusal of this package inside of one, and one of vLLM's as a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pydantic import ValidationError

from vllm_eagle_mrv2.config.families import Family
from vllm_eagle_mrv2.errors import EagleMRV2Error


@contextlib.contextmanager
def our_sentence_alone() -> Iterator[None]:
    """Raise the EagleMRV2Error that pydantic wrapped into a ValidationError while it made a configuration."""
    try:
        yield
    except ValidationError as report:
        for error in report.errors():
            refusal = error.get("ctx", {}).get("error")
            if isinstance(refusal, EagleMRV2Error):
                raise refusal from None
        raise


def refused_by_vllm(draft: str, family: Family, reason: str) -> EagleMRV2Error:
    """The error for a draft that vLLM itself refuses."""
    return EagleMRV2Error(
        f"vLLM refuses the draft {draft} for method={family} ({reason}); give a draft, or "
        "settings of the speculative configuration, that it takes."
    )


def first_sentence(error: Exception) -> str:
    """The first sentence of a vLLM error, which may be a validation error of many lines or a long list."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
    return text.strip().partition("\n")[0].partition(". ")[0].removeprefix("Value error, ").rstrip(".")
