"""How a draft's configuration is fitted to its target, on real configurations of vLLM's."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_eagle_mrv2.config.draft_config import fit_to_target, takes_auxiliary_states
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.plugin import register

register()

CONTEXT = 128
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
EAGLE3: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
LAYERS = "eagle_aux_hidden_state_layer_ids"
MTP = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as before 0.27, which leaves the positions as they are."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        SpeculativeConfig, "_maybe_override_draft_max_position_embeddings", lambda *args: None, raising=False
    )


def configure(folder: Path, method: str, *, target: dict[str, Any] = LLAMA, **head: Any) -> Any:
    """The engine's configuration of a target with a head that has these fields."""
    for name, config in (("target", target), ("head", {**LLAMA, "num_hidden_layers": 1, **head})):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return EngineArgs(
        model=str(folder / "target"),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=4,
        speculative_config={"method": method, "model": str(folder / "head"), "num_speculative_tokens": 3},
    ).create_engine_config()


def positions(config: Any) -> int:
    """Those of the draft, as a worker gets them."""
    arrived = pickle.loads(pickle.dumps(config.speculative_config))
    return int(arrived.draft_model_config.hf_config.max_position_embeddings)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("method", "head", "expected"),
    [
        ("eagle_mrv2", {"max_position_embeddings": 32}, CONTEXT),
        ("eagle_mrv2", {"max_position_embeddings": 32, **EAGLE3}, CONTEXT),
        ("eagle_mrv2", {"max_position_embeddings": 32, "rope_scaling": LLAMA3}, CONTEXT),
        ("eagle_mrv2", {"max_position_embeddings": 2 * CONTEXT}, 2 * CONTEXT),
        ("eagle", {"max_position_embeddings": 32}, 32),
    ],
)
def test_a_draft_has_its_targets_positions(method: str, head: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert positions(configure(tmp_path, method, **head)) == expected


def test_an_mtp_layer_of_another_copy_of_the_target(tmp_path: Path) -> None:
    target = {**LLAMA, **MTP}
    head = {**target, "max_position_embeddings": 32}
    assert positions(configure(tmp_path, "eagle_mrv2:mtp", target=target, **head)) == CONTEXT


def yarn(factor: float) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 32}
    return {"max_position_embeddings": 32, "rope_scaling": rope}


def test_a_table_that_does_not_grow_is_refused(tmp_path: Path) -> None:
    """vLLM 0.33 lowers max_model_len itself."""
    config = configure(tmp_path, "eagle", **yarn(2.0)).speculative_config
    config.target_model_config.max_model_len = CONTEXT
    fit_to_target(config, Version("0.33.0"))
    with pytest.raises(
        EagleMRV2Error, match=r"has positions for 64 tokens, .* type yarn .*; set max_model_len to 64\.$"
    ):
        fit_to_target(config, Version("0.32.0"))


@pytest.mark.parametrize(
    "rope",
    [yarn(4.0), {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}],
    ids=["yarn", "dynamic"],
)
def test_a_table_that_is_long_enough_stays(rope: dict[str, Any], tmp_path: Path) -> None:
    config = configure(tmp_path, "eagle", **rope).speculative_config
    fit_to_target(config, Version("0.32.0"))
    assert config.draft_model_config.hf_config.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ({}, (None, None)),  # the runner knows which three
        ({LAYERS: [1, 2, 3]}, ([1, 2, 3], 3)),
        ({LAYERS: [1, 3]}, ([1, 3], 2)),
        ({"eagle_config": {LAYERS: [0, 1, 2, 3, 4]}}, ([0, 1, 2, 3, 4], 5)),
        ({"eagle_config": {"layer_ids": [2]}}, ([2], 1)),
        ({LAYERS: [1, 2, 3, 4], "num_aux_hidden_states": 4}, ([1, 2, 3, 4], 4)),
        ({"eagle_config": {"use_aux_hidden_state": False, LAYERS: []}}, (None, None)),
    ],
    ids=str,
)
def test_layers_of_the_target(head: dict[str, Any], expected: tuple[Any, Any], tmp_path: Path) -> None:
    """Where the runner looks for them, and how many the draft's model has to combine."""
    config = configure(tmp_path, "eagle3", **EAGLE3, **head).speculative_config
    fit_to_target(config, Version("0.22.1"))
    draft = config.draft_model_config.hf_config
    assert (getattr(draft, LAYERS, None), getattr(draft, "num_aux_hidden_states", None)) == expected
    assert takes_auxiliary_states(config) is ("use_aux_hidden_state" not in head.get("eagle_config", {}))


@pytest.mark.parametrize(
    ("head", "version", "sentence"),
    [
        ({LAYERS: [1, 2]}, "0.20.2", "combines 2 layers of its target, and vLLM 0.20.2 builds every head for 3;"),
        (
            {"num_aux_hidden_states": 4},
            "0.32.0",
            "combines 4 layers of its target, and its configuration does not say which;",
        ),
        (
            {LAYERS: [1, 2], "num_aux_hidden_states": 3},
            "0.32.0",
            "combines 3 layers of its target, and its configuration names 2;",
        ),
        ({LAYERS: [2, 5]}, "0.32.0", "combines the layers 2, 5 of a target that has 4;"),
        ({LAYERS: [2, 2, 1]}, "0.32.0", "combines the layers 2, 2, 1 of a target that has 4;"),
    ],
)
def test_layers_that_cannot_be_had(head: dict[str, Any], version: str, sentence: str, tmp_path: Path) -> None:
    config = configure(tmp_path, "eagle3", **EAGLE3, **head).speculative_config
    with pytest.raises(EagleMRV2Error, match=sentence) as refused:
        fit_to_target(config, Version(version))
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("states", "head", "sentence"),
    [
        (3, {}, None),
        (2, {}, "combines 2 layers of its target, and its configuration does not say which;"),
        (2, {LAYERS: [1, 2]}, None),
        (2, {LAYERS: [1, 2, 3]}, "combines 2 layers of its target, and its configuration names 3;"),
        (2, {"target_hidden_size": 32, LAYERS: [1, 2, 3, 4]}, None),
        (1.5, {LAYERS: [1, 2]}, None),  # of another hidden size: that is for others to say
    ],
)
def test_layers_by_the_checkpoint(states: float, head: dict[str, Any], sentence: str | None, tmp_path: Path) -> None:
    config = configure(tmp_path, "eagle3", **EAGLE3, **head).speculative_config
    save_file({"model.fc.weight": torch.zeros(64, int(64 * states))}, tmp_path / "head" / "model.safetensors")
    if sentence is None:
        fit_to_target(config, Version("0.22.1"))
        return
    with pytest.raises(EagleMRV2Error, match=sentence):
        fit_to_target(config, Version("0.22.1"))


@pytest.mark.parametrize(("version", "refused"), [("0.32.0", True), ("0.33.0", False)])
def test_no_auxiliary_states_between_stages(version: str, refused: bool, tmp_path: Path) -> None:
    head = {**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}}
    config = configure(tmp_path, "eagle3", **head).speculative_config
    config.target_parallel_config.pipeline_parallel_size = 2
    if not refused:
        fit_to_target(config, Version(version))
        return
    with pytest.raises(EagleMRV2Error, match="use tensor parallelism"):
        fit_to_target(config, Version(version))


def test_compiled_models_are_cached_by_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of RoPE's table is compiled in, of which vLLM's own name below 0.26 says nothing."""
    monkeypatch.setattr(SpeculativeConfig, "compute_hash", lambda self: "eagle")
    longer = [configure(tmp_path, "eagle_mrv2", max_position_embeddings=times * CONTEXT) for times in (2, 4)]
    assert len({config.compute_hash() for config in longer}) == 2
