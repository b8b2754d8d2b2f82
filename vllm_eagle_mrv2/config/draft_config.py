"""Fits a draft's configuration to its target while the engine is configured, before any process builds the draft.

vLLM pickles the configuration into every worker, so every worker builds the same draft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_eagle_mrv2.errors import EagleMRV2Error

_GROWING_TABLE = frozenset({"default", "linear", "llama3", "ntk", "proportional"})
"""RoPE types for which ``max_position_embeddings`` sets the number of rows in the table and nothing else."""
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_USUAL_LAYERS = 3


def fit_to_target(config: Any, release: Version) -> None:
    """Give a draft as many positions as its target, and the number of auxiliary hidden states that it combines.

    Args:
        config: vLLM's ``SpeculativeConfig``, changed in place.
        release: the vLLM release.

    Raises:
        EagleMRV2Error: the release cannot serve the draft this way; the message has the cause and the remedy.
    """
    _fit_positions(config, release)
    if config.method == "eagle3":
        _fit_auxiliary_layers(config, release)


def takes_auxiliary_states(config: Any) -> bool:
    """Whether a draft takes auxiliary hidden states of several target layers, not only those of the last layer."""
    return config.method == "eagle3" and bool(_eagle_config(config).get("use_aux_hidden_state", True))


def _eagle_config(config: Any) -> Mapping[str, Any]:
    return getattr(config.draft_model_config.hf_config, "eagle_config", None) or {}


def _fit_positions(config: Any, release: Version) -> None:
    """Extend the draft's positions as vLLM does: EAGLE from 0.27 on (#48894, #49343), MTP from 0.33 on (#57941)."""
    draft, needed = config.draft_model_config, config.target_model_config.max_model_len
    ropes = _ropes(draft.hf_text_config)
    if ropes.keys() <= _GROWING_TABLE:
        for hf_config in (draft.hf_config, draft.hf_text_config):
            if (getattr(hf_config, "max_position_embeddings", None) or needed) < needed:
                hf_config.max_position_embeddings = needed
        return
    longest = max(draft.max_model_len, getattr(draft.hf_text_config, "max_position_embeddings", None) or 0)
    rows = min(_rows(rope, longest) for rope in ropes.values())
    if rows < needed and release < Version("0.33"):  # 0.33 lowers max_model_len
        raise EagleMRV2Error(
            f"the draft {config.model} has positions for {rows} tokens, to which its RoPE of type "
            f"{', '.join(sorted(ropes.keys() - _GROWING_TABLE))} is bound, and max_model_len is {needed}; "
            f"set max_model_len to {rows}."
        )


def _ropes(hf_config: Any) -> dict[str, Mapping[str, Any]]:
    """RoPE parameters by RoPE type; layers may use different types."""
    named = (getattr(hf_config, name, None) for name in ("rope_parameters", "rope_scaling"))
    given: Mapping[str, Any] = next((each for each in named if each and isinstance(each, Mapping)), {})
    by_layer_type = [each for each in given.values() if isinstance(each, Mapping)]
    return {str(each.get("rope_type", each.get("type", "default"))): each for each in by_layer_type or [given]}


def _rows(rope: Mapping[str, Any], longest: int) -> int:
    """How many positions the table of a RoPE has."""
    original = rope.get("original_max_position_embeddings")
    is_yarn = "yarn" in str(rope.get("rope_type", rope.get("type")))
    return int(original * rope["factor"]) if is_yarn and original else longest


def _fit_auxiliary_layers(config: Any, release: Version) -> None:
    """Check the auxiliary layers; store their ids for the runner and their number for the draft model."""
    draft, eagle_config = config.draft_model_config.hf_config, _eagle_config(config)
    if not takes_auxiliary_states(config):
        if config.target_parallel_config.pipeline_parallel_size > 1 and release < Version("0.33"):
            raise EagleMRV2Error(
                f"the EAGLE-3 head {config.model} takes no auxiliary hidden states, which vLLM below 0.33 passes "
                "between pipeline stages all the same; use tensor parallelism."
            )
        return
    layers = getattr(draft, _LAYERS, None) or eagle_config.get(_LAYERS) or eagle_config.get("layer_ids") or ()
    declared = getattr(draft, "num_aux_layers", None) or getattr(draft, "num_aux_hidden_states", None)
    known = len(layers) or _USUAL_LAYERS
    combined = _states_in_checkpoint(Path(config.model), draft) or declared or known
    if combined != known:
        named = f"names {known}" if layers else "does not say which"
        raise EagleMRV2Error(
            f"the EAGLE-3 head {config.model} combines {combined} layers of its target, and its configuration {named}; "
            f"correct {_LAYERS} in its config.json."
        )
    if not layers:
        return
    of_target = getattr(config.target_model_config.hf_text_config, "num_hidden_layers", max(layers))
    if len(set(layers)) < len(layers) or not 0 <= min(layers) <= max(layers) <= of_target:
        raise EagleMRV2Error(
            f"the EAGLE-3 head {config.model} combines the layers {', '.join(map(str, layers))} of a target that has "
            f"{of_target}; take a head that was trained for this target."
        )
    if len(layers) != _USUAL_LAYERS and release < Version("0.22"):
        raise EagleMRV2Error(
            f"the EAGLE-3 head {config.model} combines {len(layers)} layers of its target, and vLLM {release} builds "
            f"every head for {_USUAL_LAYERS}; use vLLM 0.22 or newer."
        )
    setattr(draft, _LAYERS, list(layers))
    draft.num_aux_hidden_states = len(layers)


def _states_in_checkpoint(folder: Path, draft: Any) -> int | None:
    """How many hidden states ``fc`` combines in a local checkpoint; None if its shape does not tell."""
    from safetensors import SafetensorError, safe_open

    width = getattr(draft, "target_hidden_size", None) or draft.hidden_size
    with contextlib.suppress(SafetensorError, OSError):  # loading the draft reports the cause
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="np") as checkpoint:
                for name in sorted(checkpoint.keys()):
                    if name.split(".")[-2:] == ["fc", "weight"]:
                        states, rest = divmod(checkpoint.get_slice(name).get_shape()[1], width)
                        return None if rest else int(states)
    return None
