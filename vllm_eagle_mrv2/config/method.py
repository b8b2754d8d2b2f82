"""The method ``eagle_mrv2`` in a speculative configuration.

vLLM branches on the name of the method in a hundred places, and its schema admits no other names.  The name is
therefore translated into the stock one (``eagle``, ``eagle3`` or ``mtp``) before vLLM sees it.  A `Settings` attached
to the resulting configuration marks that this package's speculator was asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.families import FAMILIES, METHOD, Family
from vllm_eagle_mrv2.config.heads import check_forced, detect_family
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens, kept_tokens
from vllm_eagle_mrv2.errors import EagleMRV2Error

MARKER = "_eagle_mrv2_request"


class Asked(NamedTuple):
    """The draft as the user named it."""

    method: str  # with the family, if it is forced
    model: str | None
    revision: str | None


@dataclass(frozen=True)
class Settings:
    """What the user asked for; sent with the configuration to all processes of an engine (`patches.sent_settings`)."""

    family: Family
    options: Options
    enforce_eager: bool = False
    """The user's own ``enforce_eager`` for the draft; vLLM also sets this field of its configuration by itself."""
    kept_tokens: KeptTokens | None = None
    """The tokens that ``draft_vocab`` keeps; None drafts from the whole vocabulary."""
    asked: Asked | None = field(default=None, compare=False)
    """What the family was found for."""
    vllm_largest: int = 0
    """Tokens of the largest batch that vLLM would capture by itself, if larger ones are captured; else 0."""


def settings_of(marked: object) -> Settings | None:
    """The settings attached to a ``SpeculativeConfig`` or to the speculator made for it; None if it is stock."""
    settings = getattr(marked, "__dict__", {}).get(MARKER)
    return settings if isinstance(settings, Settings) else None


def mark(marked: object, settings: Settings) -> None:
    """Attach settings to a ``SpeculativeConfig``, or to the speculator made for it."""
    marked.__dict__[MARKER] = settings


def canonical(method: str) -> str:
    """A method's name as `names` spells it; ``Eagle-MRV2`` is accepted as well."""
    return method.lower().replace("-", "_")


def is_ours(method: object) -> bool:
    """Whether a method's name is ``eagle_mrv2``, with or without a forced family."""
    return isinstance(method, str) and canonical(method).partition(":")[0] == METHOD


def names() -> tuple[str, ...]:
    """Every name of the method that a user can write."""
    return (METHOD, *(f"{METHOD}:{family}" for family in FAMILIES))


def parse_short_form(text: str) -> dict[str, Any] | None:
    """``method=eagle_mrv2,model=PATH,num_speculative_tokens=3`` as a dictionary.

    Values are read as JSON where possible (numbers, true, false, null) and as text otherwise.

    Returns:
        the dictionary, or None if the text does not have this form; vLLM's own parser then reads it.

    Raises:
        EagleMRV2Error: an item of the short form has no ``=``, or a key appears twice.
    """
    if "=" not in text.split(",", 1)[0] or text.lstrip().startswith(("{", "[")):
        return None
    items: dict[str, Any] = {}
    twice, ours = None, False
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not (equals and key.strip()):
            if ours:
                raise EagleMRV2Error(
                    f"'{item}' in --speculative-config is not key=value; write "
                    f"method={METHOD},model=PATH,num_speculative_tokens=3, or JSON."
                )
            return None
        name = key.strip().replace("-", "_")
        twice = name if name in items else twice
        items[name] = value.strip()
        ours |= name == "method" and is_ours(items[name])
        if name not in ("method", "model", "revision"):
            with contextlib.suppress(json.JSONDecodeError):
                items[name] = json.loads(value)
    if not ours:
        return None
    if twice is not None:
        raise EagleMRV2Error(f"'{twice}' stands twice in --speculative-config; give it once.")
    return items


def translate(
    speculative_config: Mapping[str, Any], target: str, options: Options, reader: Reader | None = None
) -> tuple[dict[str, Any], Settings]:
    """Translate a speculative configuration for ``eagle_mrv2`` into the stock one and its settings.

    Args:
        speculative_config: the user's configuration, with ``eagle_mrv2`` as method.
        target: path or hub name of the target model, which may contain an MTP head.
        options: the validated options.
        reader: reads configurations with the options that vLLM was given.

    Raises:
        EagleMRV2Error: there is no draft model, the checkpoint is not an EAGLE or MTP head, K is below 1, or the
            draft vocabulary is not possible.
    """
    config = {key.replace("-", "_"): value for key, value in speculative_config.items()}
    model = config["model"] = config.get("model") or None
    _, _, forced = canonical(config["method"]).partition(":")
    if forced and forced not in FAMILIES:
        raise EagleMRV2Error(f"method={METHOD}:{forced} names no family; use one of {', '.join(names())}.")
    if config.get("num_speculative_tokens") is not None:
        config["num_speculative_tokens"] = _whole_number(config["num_speculative_tokens"])
    family: Family
    if forced:
        family = next(known for known in FAMILIES if known == forced)
        if model is not None:
            check_forced(family, model, config.get("revision"), reader)
    else:
        family = detect_family(model, target, config.get("revision"), reader)
    if config.get("num_speculative_tokens") is None:
        raise EagleMRV2Error(f"method={METHOD} needs num_speculative_tokens; 3 is a good start.")
    if model is None and family != "mtp":
        raise EagleMRV2Error(
            f"method={METHOD} needs a draft model: set model in the speculative configuration to an EAGLE head."
        )
    if is_on(config.get("parallel_drafting")):
        raise EagleMRV2Error(
            "Model Runner V2 lacks parallel drafting for EAGLE; leave parallel_drafting out of the speculative "
            "configuration."
        )
    if family == "mtp":
        _refuse_misleading_path(model or target)
    if model is None:
        del config["model"]
    asked, config["method"] = Asked(config["method"], model, config.get("revision")), family
    enforce_eager = is_on(config.get("enforce_eager"))
    return config, Settings(family, options, enforce_eager, _kept_tokens(family, options), asked)


def is_on(flag: object) -> bool:
    """Whether a flag is set as vLLM reads it: text and numbers count, too."""
    try:
        return TypeAdapter(bool).validate_python(flag)
    except ValidationError:  # vLLM refuses it
        return False


def _whole_number(tokens: object) -> int:
    """The number of draft tokens, given as an int, as text or as a whole float."""
    number = tokens
    if (isinstance(tokens, str) and tokens.strip().isdecimal()) or (isinstance(tokens, float) and tokens.is_integer()):
        number = int(tokens)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise EagleMRV2Error(
            f"method={METHOD} needs num_speculative_tokens of at least 1 (given: {tokens!r}); 3 is a good start."
        )
    return number


def _kept_tokens(family: Family, options: Options) -> KeptTokens | None:
    if options.draft_vocab is None:
        return None
    if family == "eagle3":
        raise EagleMRV2Error(
            "draft_vocab is for EAGLE-1 and MTP heads, and an EAGLE-3 head is trained with a draft vocabulary of its "
            "own; leave draft_vocab out."
        )
    return kept_tokens(options.draft_vocab)


def _refuse_misleading_path(path: str) -> None:
    """Refuse an MTP draft if its path contains the name of another method, from which vLLM would infer the method."""
    for word in ("eagle-", "eagle3", "dflash", "dspark"):
        if word in path.lower():
            raise EagleMRV2Error(
                f"vLLM takes the MTP draft {path} for another kind because '{word}' stands in its path; "
                "rename or move the folder."
            )
