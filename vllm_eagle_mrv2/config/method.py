"""The method ``eagle_mrv2`` in a speculative configuration.

vLLM switches on the name of the method in a hundred places, and its schema admits no other names.  So the name is
translated into the stock one (``eagle``, ``eagle3`` or ``mtp``) before vLLM sees it, and a `Settings` rides on the
resulting configuration as the marker that our speculator was asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.families import FAMILIES as FAMILIES
from vllm_eagle_mrv2.config.families import METHOD as METHOD
from vllm_eagle_mrv2.config.families import Family as Family
from vllm_eagle_mrv2.config.heads import check_forced
from vllm_eagle_mrv2.config.heads import detect_family as detect_family
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.config.vocab_ranking import KeptTokens, kept_tokens
from vllm_eagle_mrv2.errors import EagleMRV2Error

MARKER = "_eagle_mrv2_request"


@dataclass(frozen=True)
class Settings:
    """What a user asked for; it is pickled with the configuration into every engine and worker process."""

    family: Family
    options: Options
    enforce_eager: bool = False
    """The user's own ``enforce_eager`` for the draft; vLLM sets the field on its configuration by itself, too."""
    kept_tokens: KeptTokens | None = None
    """What ``draft_vocab`` keeps; None drafts from the whole vocabulary."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process, which then checks its workers even where it did not load the plugin."""
        from vllm_eagle_mrv2.patches import worker_check

        self.__dict__.update(state)
        worker_check.install()


def settings_of(marked: object) -> Settings | None:
    """The settings that ride on a ``SpeculativeConfig`` or on the speculator made for it; None is stock's."""
    settings = getattr(marked, "__dict__", {}).get(MARKER)
    return settings if isinstance(settings, Settings) else None


def mark(marked: object, settings: Settings) -> None:
    """Attach settings to a ``SpeculativeConfig``, or to the speculator made for it."""
    marked.__dict__[MARKER] = settings


def canonical(method: str) -> str:
    """A method's name as `names` spells it; ``Eagle-MRV2`` is ours as well."""
    return method.lower().replace("-", "_")


def is_ours(method: object) -> bool:
    """Whether a method's name is ``eagle_mrv2``, with a forced family or without."""
    return isinstance(method, str) and canonical(method).partition(":")[0] == METHOD


def names() -> tuple[str, ...]:
    """Every spelling of the method that a user can write."""
    return (METHOD, *(f"{METHOD}:{family}" for family in FAMILIES))


def parse_short_form(text: str) -> dict[str, Any] | None:
    """``method=eagle_mrv2,model=PATH,num_speculative_tokens=3`` as a dictionary.

    Values are read as JSON where they are JSON (numbers, true, false, null) and as text otherwise.  Returns None
    where the text is not this form, so that vLLM's own parser has its say.

    Raises:
        EagleMRV2Error: an item of a short form without a ``=``.
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
    """Turn a speculative configuration with our method into the stock one and the settings for it.

    Args:
        speculative_config: the user's configuration, ``method`` being ours.
        target: path or hub name of the target model; an MTP head may live in it.
        options: the validated options.
        reader: how vLLM is told to read configurations.

    Raises:
        EagleMRV2Error: no draft model, a checkpoint that is no EAGLE or MTP head, a K below 1, a draft vocabulary
            that cannot be had.
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
    if config.get("parallel_drafting"):
        raise EagleMRV2Error(
            "Model Runner V2 lacks parallel drafting for EAGLE; leave parallel_drafting out of the speculative "
            "configuration."
        )
    if family == "mtp":
        _refuse_misleading_path(model or target)
    if model is None:
        del config["model"]
    config["method"] = family
    enforce_eager = config.get("enforce_eager") is True
    return config, Settings(family, options, enforce_eager, _kept_tokens(family, options))


def _whole_number(tokens: object) -> int:
    """The number of draft tokens, however it is written."""
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
    """vLLM looks at the path of an MTP draft first, and takes what it finds there for the method."""
    for word in ("eagle-", "eagle3", "dflash", "dspark"):
        if word in path.lower():
            raise EagleMRV2Error(
                f"vLLM takes the MTP draft {path} for another kind because '{word}' stands in its path; "
                "rename or move the folder."
            )
