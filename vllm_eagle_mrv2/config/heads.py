"""Detects the family of a draft from its configuration and tensors, never from its path.

A draft is accepted if vLLM itself accepts it on Model Runner V2.  vLLM's own rule, which differs between releases,
decides whether a checkpoint has MTP layers.  EAGLE heads declare themselves, or are recognized by their contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from vllm_eagle_mrv2.config.checkpoints import Reader, is_mtp, is_stored, tensor_names
from vllm_eagle_mrv2.config.families import METHOD, Family
from vllm_eagle_mrv2.errors import EagleMRV2Error

# An EAGLE-1 head is published under the architecture of its target, so only its depth tells it from a whole model.
# No published head has more layers than this.
_MAX_HEAD_LAYERS = 4
# Drafts of other kinds: (part of the architecture or model type, description, vLLM's method for them).
_OTHER_KINDS = (
    ("dflash", "a DFlash draft", "dflash"),
    ("dspark", "a DSpark draft", "dspark"),
    ("medusa", "a Medusa head", "medusa"),
    ("mlpspeculator", "an MLP speculator", "mlp_speculator"),
    ("gemma4assistant", "a Gemma 4 assistant, which vLLM drafts with by a speculator of its own", "mtp"),
    ("gemma4unifiedassistant", "a Gemma 4 assistant, which vLLM drafts with by a speculator of its own", "mtp"),
)
_NAMES: Mapping[Family, str] = {"eagle": "an EAGLE-1 head", "eagle3": "an EAGLE-3 head", "mtp": "an MTP head"}
_PER_CENT_PADDED = 1
"""Largest difference in per cent between two sizes of one vocabulary: models pad it to different multiples."""


def detect_family(model: str | None, target: str, revision: str | None = None, reader: Reader | None = None) -> Family:
    """The family of a draft.

    Args:
        model: path or hub name of the draft; None stands for MTP layers inside the target.
        target: path or hub name of the target.
        revision: revision of the draft on the hub.
        reader: reads configurations with the options that vLLM was given.

    Raises:
        EagleMRV2Error: the checkpoint cannot be read, or it is neither an EAGLE nor an MTP head.
    """
    reader = reader or Reader()
    if is_stored(model or target):
        raise EagleMRV2Error(
            f"the draft's family is not read from object storage ({model or target}); name it with "
            f"method={METHOD}:eagle, :eagle3 or :mtp."
        )
    if model is None:
        if reader.has_mtp_layers(target, revision):
            return "mtp"
        raise EagleMRV2Error(
            f"method={METHOD} needs a draft model: {target} has no MTP layers that this vLLM release drafts with, "
            "so set model in the speculative configuration to an EAGLE head."
        )
    config, tensors = reader.config(model, revision), tensor_names(model)
    _refuse_other_kinds(model, config)
    if declared := _declared(config, tensors):
        return declared
    draft_config = reader.draft_config(model, revision)
    if declared := _declared(draft_config.to_dict(), None):
        return declared
    if is_mtp(draft_config):
        return "mtp"
    if likely := _likely(config if "architectures" in config else draft_config.to_dict(), tensors):
        return likely
    layers = config.get("num_hidden_layers")
    kind = "a whole model and " if tensors or _is_deep(layers) else ""
    advice = "" if kind else f", or name its family with method={METHOD}:eagle, :eagle3 or :mtp"
    raise EagleMRV2Error(
        f"{model} is {kind}no EAGLE or MTP head (architectures: {', '.join(_architectures(config)) or 'none'}, "
        f"layers: {layers}); give the path of one{advice}."
    )


def check_forced(family: Family, model: str, revision: str | None = None, reader: Reader | None = None) -> None:
    """Refuse a family that the draft certainly does not belong to; unreadable checkpoints are left to vLLM.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    try:
        config = (reader or Reader()).config(model, revision)
    except EagleMRV2Error:
        return
    _refuse_other_kinds(model, config, family)
    declared = _declared(config, tensor_names(model))
    if declared is not None and declared != family:
        raise EagleMRV2Error(f"{model} is {_NAMES[declared]}, not {_NAMES[family]}; use method={METHOD}.")


def check_fit(speculative_config: Any) -> None:
    """Refuse a draft that does not fit its target, judging by vLLM's configurations of both.

    Args:
        speculative_config: vLLM's ``SpeculativeConfig``.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    draft, target = speculative_config.draft_model_config, speculative_config.target_model_config
    name, tokens = speculative_config.model, speculative_config.num_speculative_tokens
    if tokens >= target.max_model_len:
        raise EagleMRV2Error(
            f"num_speculative_tokens={tokens} does not fit into a context of {target.max_model_len} tokens "
            "(max_model_len); 3 is a good start."
        )
    expected = draft.get_hidden_size()
    if speculative_config.method == "eagle3":
        expected = getattr(draft.hf_config, "target_hidden_size", None) or expected
    if expected != target.get_hidden_size():
        raise EagleMRV2Error(
            f"the draft {name} was trained for a target with hidden states of size {expected}, and {target.model} has "
            f"{target.get_hidden_size()}; give the head of this target."
        )
    vocabulary, of_target = draft.get_vocab_size(), target.get_vocab_size()
    if 100 * abs(vocabulary - of_target) > _PER_CENT_PADDED * of_target:
        raise EagleMRV2Error(
            f"the draft {name} was trained for a vocabulary of {vocabulary} tokens, and {target.model} has "
            f"{of_target}; give the head of this target."
        )


def _refuse_other_kinds(model: str, config: Mapping[str, Any], forced: Family | None = None) -> None:
    """Refuse a draft that is neither EAGLE nor MTP, naming its kind and vLLM's method for it."""
    from vllm.config.speculative import SpeculativeMethod

    names = [name.lower().replace("_", "") for name in _self_descriptions(config)]
    parallel = config.get("parallel_drafting") or "ptd_token_id" in config or "pard_token" in config
    if any("peagle" in name for name in names) or (parallel and "eagle3" in (forced, _declared(config, None))):
        raise EagleMRV2Error(
            f"{model} is a P-EAGLE head, which needs parallel drafting, and Model Runner V2 lacks that for EAGLE; "
            "use method=eagle3 with parallel_drafting=true, which runs on Model Runner V1."
        )
    for sign, kind, method in _OTHER_KINDS:
        if any(sign in name for name in names):
            known = method in get_args(SpeculativeMethod)
            remedy = f"use method={method}" if known else "this vLLM release has no method for it, so use another draft"
            raise EagleMRV2Error(f"{model} is {kind}, not an EAGLE or MTP head; {remedy}.")


def _declared(config: Mapping[str, Any], tensors: Iterable[str] | None) -> Family | None:
    """The family of an EAGLE head whose architecture, model type or unique tensors declare it."""
    names = [name.lower() for name in _self_descriptions(config)]
    if "speculators_model_type" in config:
        names = [str(config["speculators_model_type"])]
    if any("eagle3" in name for name in names):
        return "eagle3"
    if any(name.startswith("eagle") for name in names):
        return "eagle"
    if any(name.rpartition(".")[2] in ("d2t", "t2d") or "midlayer." in name for name in tensors or ()):
        return "eagle3"
    return None


def _likely(config: Mapping[str, Any], tensors: Iterable[str] | None) -> Family | None:
    """The likely family of an EAGLE head that is published under the architecture of its target."""
    if any(config.get(key) for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config")):
        return "eagle3"
    if tensors is not None:
        joins = (["fc", "weight"], ["eagle_linear", "weight"])  # join embedding and hidden state; the second is Mistral
        return "eagle" if any(name.split(".")[-2:] in joins for name in tensors) else None
    layers = config.get("num_hidden_layers")
    is_head = isinstance(layers, int) and not _is_deep(layers)
    return "eagle" if is_head and any(name.endswith("ForCausalLM") for name in _architectures(config)) else None


def _is_deep(layers: object) -> bool:
    return isinstance(layers, int) and layers > _MAX_HEAD_LAYERS


def _architectures(config: Mapping[str, Any]) -> list[str]:
    return [str(name) for name in config.get("architectures") or []]


def _self_descriptions(config: Mapping[str, Any]) -> list[str]:
    keys = ("model_type", "speculators_model_type")
    return [*_architectures(config), *(str(config[key]) for key in keys if config.get(key))]
