"""The method ``eagle_mrv2`` in a speculative configuration.

vLLM switches on the name of the method in a hundred places, and its schema admits no other names.  So the name is
translated into the stock one (``eagle``, ``eagle3`` or ``mtp``) before vLLM sees it, and a `Request` rides on the
resulting configuration as the marker that our speculator was asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.options import Options
from vllm_eagle_mrv2.ranking import DraftTokens, draft_tokens

METHOD = "eagle_mrv2"
MARKER = "_eagle_mrv2_request"
Family = Literal["eagle", "eagle3", "mtp"]
FAMILIES: tuple[Family, ...] = get_args(Family)

# An EAGLE-1 head is published under the architecture of its target, so a whole model and a head look alike but for
# their depth.  No published head has more layers than this.
_MAX_HEAD_LAYERS = 4


@dataclass(frozen=True)
class Request:
    """What a user asked for; it is pickled with the configuration into every engine and worker process."""

    family: Family
    options: Options
    enforce_eager: bool = False
    """The user's own ``enforce_eager`` for the draft; vLLM sets the field on its configuration by itself, too."""
    draft_tokens: DraftTokens | None = None
    """What ``draft_vocab`` keeps; None drafts from the whole vocabulary."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process, which then checks its workers even where it did not load the plugin."""
        from vllm_eagle_mrv2 import worker_check

        self.__dict__.update(state)
        worker_check.install()


def request_of(marked: object) -> Request | None:
    """The request that rides on a ``SpeculativeConfig`` or on the speculator made for it; None is stock's."""
    request = getattr(marked, "__dict__", {}).get(MARKER)
    return request if isinstance(request, Request) else None


def mark(marked: object, request: Request) -> None:
    """Attach a request to a ``SpeculativeConfig``, or to the speculator made for it."""
    marked.__dict__[MARKER] = request


def is_ours(method: object) -> bool:
    """Whether a method's name is ``eagle_mrv2``, with a forced family or without."""
    return isinstance(method, str) and (method == METHOD or method.startswith(METHOD + ":"))


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


def translate(speculative_config: Mapping[str, Any], target: str, options: Options) -> tuple[dict[str, Any], Request]:
    """Turn a speculative configuration with our method into the stock one and the request for it.

    Args:
        speculative_config: the user's configuration, ``method`` being one of `names`.
        target: path or hub name of the target model; an MTP head may live in it.
        options: the validated options.

    Raises:
        EagleMRV2Error: no draft model, a checkpoint that is no EAGLE or MTP head, a K below 1, a draft vocabulary
            that cannot be had.
    """
    config = {key.replace("-", "_"): value for key, value in speculative_config.items()}
    config["model"] = config.get("model") or None
    _, _, forced = config["method"].partition(":")
    if forced and forced not in FAMILIES:
        raise EagleMRV2Error(f"method={METHOD}:{forced} names no family; use one of {', '.join(names())}.")
    tokens = config.get("num_speculative_tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
        raise EagleMRV2Error(
            f"method={METHOD} needs num_speculative_tokens of at least 1 (given: {tokens!r}); 3 is a good start."
        )
    family: Family = (
        next(known for known in FAMILIES if known == forced)
        if forced
        else detect_family(config.get("model"), target, config.get("revision"))
    )
    if tokens is None:
        raise EagleMRV2Error(f"method={METHOD} needs num_speculative_tokens; 3 is a good start.")
    if config.get("model") is None and family != "mtp":
        raise EagleMRV2Error(
            f"method={METHOD} needs a draft model: set model in the speculative configuration to an EAGLE head."
        )
    if family == "mtp":
        _refuse_misleading_path(config["model"] or target)
    if config["model"] is None:
        del config["model"]
    config["method"] = family
    enforce_eager = config.get("enforce_eager") is True
    return config, Request(family, options, enforce_eager, _draft_tokens(family, options))


def _draft_tokens(family: Family, options: Options) -> DraftTokens | None:
    if options.draft_vocab is None:
        return None
    if family == "eagle3":
        raise EagleMRV2Error(
            "draft_vocab is for EAGLE-1 and MTP heads, and an EAGLE-3 head is trained with a draft vocabulary of its "
            "own; leave draft_vocab out."
        )
    return draft_tokens(options.draft_vocab)


def _refuse_misleading_path(path: str) -> None:
    """vLLM looks at the path of an MTP draft first, and takes what it finds there for the method."""
    for word in ("eagle-", "eagle3", "dflash", "dspark"):
        if word in path.lower():
            raise EagleMRV2Error(
                f"vLLM takes the MTP draft {path} for another kind because '{word}' stands in its path; "
                "rename or move the folder."
            )


def detect_family(model: str | None, target: str, revision: str | None = None) -> Family:
    """The family of a draft, read from its checkpoint and never from its path.

    Args:
        model: path or hub name of the draft; None stands for a head inside the target.
        target: path or hub name of the target.
        revision: revision of the draft on the hub.

    Raises:
        EagleMRV2Error: the checkpoint cannot be read, or it is neither an EAGLE nor an MTP head.
    """
    if model is None:
        if _has_mtp_layers(_read_config(target, None)) or any(map(_is_of_mtp, _tensor_names(target) or ())):
            return "mtp"
        raise EagleMRV2Error(
            f"method={METHOD} needs a draft model: {target} has no MTP layers of its own, "
            "so set model in the speculative configuration to an EAGLE head."
        )
    config = _read_config(model, revision)
    if _same_place(model, target) and _has_mtp_layers(config):
        return "mtp"
    family = _family_of(config, _tensor_names(model))
    if family is None:
        raise EagleMRV2Error(
            f"{model} is no EAGLE or MTP head (architectures: {_architectures(config)}, "
            f"layers: {config.get('num_hidden_layers')}); give the path of one, "
            f"or force its family with method={METHOD}:eagle, :eagle3 or :mtp."
        )
    return family


def _family_of(config: Mapping[str, Any], tensors: frozenset[str] | None) -> Family | None:
    speculators = config.get("speculators_model_type")
    if speculators is not None:
        return next((family for family in FAMILIES if family == speculators), None)
    architectures = _architectures(config)
    model_type = str(config.get("model_type", ""))
    if any("eagle3" in name.lower() for name in architectures) or model_type == "eagle3":
        return "eagle3"
    if any(name.startswith("Eagle") for name in architectures) or model_type == "eagle":
        return "eagle"
    if any("MTP" in name or "NextN" in name for name in architectures) or model_type.endswith("mtp"):
        return "mtp"
    if config.get("draft_vocab_size") or "eagle_aux_hidden_state_layer_ids" in config or "eagle_config" in config:
        return "eagle3"
    if tensors is not None:
        if any(name.rpartition(".")[2] in ("d2t", "t2d") or "midlayer." in name for name in tensors):
            return "eagle3"
        if any(map(_is_of_mtp, tensors)):
            return "mtp"
        return "eagle" if any(name.split(".")[-2:] == ["fc", "weight"] for name in tensors) else None
    layers = config.get("num_hidden_layers")
    is_head = isinstance(layers, int) and layers <= _MAX_HEAD_LAYERS
    return "eagle" if is_head and any(name.endswith("ForCausalLM") for name in architectures) else None


def _is_of_mtp(tensor: str) -> bool:
    """Whether a tensor belongs to MTP layers: ``model.mtp_layers.0.``, ``mtp.fc.`` or DeepSeek's ``eh_proj``."""
    return any("mtp" in part or part == "eh_proj" for part in tensor.split("."))


def _same_place(model: str, target: str) -> bool:
    """Whether a draft is the target itself, however its folder is spelled."""
    return model == target or (Path(model).is_dir() and Path(model).resolve() == Path(target).resolve())


def _has_mtp_layers(config: Mapping[str, Any]) -> bool:
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict", "num_mtp_layers")
    return any(part.get(key) for part in (config, text or {}) for key in keys)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in config.get("architectures") or []]


def _read_config(model: str, revision: str | None) -> Mapping[str, Any]:
    """``config.json`` of a local folder or of a hub model, through transformers' own cache and offline rules."""
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EagleMRV2Error(
            f"the configuration of {model} cannot be read ({reason}); check the path, or download it first."
        ) from error
    if not config:
        raise EagleMRV2Error(
            f"{model} has no config.json; give the path of an EAGLE or MTP head, "
            f"or force its family with method={METHOD}:eagle, :eagle3 or :mtp."
        )
    return dict(config)


def _tensor_names(model: str) -> frozenset[str] | None:
    """Names of the tensors in a local safetensors checkpoint; None where there is none to look into.

    Raises:
        EagleMRV2Error: a file that is not what it is called, such as the pointer that git-lfs leaves.
    """
    folder = Path(model)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise EagleMRV2Error(
                f"{index} is not an index of a checkpoint ({error!r}); download the draft model again."
            ) from error
        return frozenset(weight_map)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="np") as checkpoint:
                names.update(checkpoint.keys())
        except (SafetensorError, OSError) as error:
            raise EagleMRV2Error(
                f"{file} is not a complete safetensors file ({error}); download the draft model again."
            ) from error
    return frozenset(names)
