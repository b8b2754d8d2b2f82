"""The method's name in a speculative configuration: read, translated, and the draft's family told from its files."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file

from vllm_eagle_mrv2.config.families import FAMILIES
from vllm_eagle_mrv2.config.heads import detect_family
from vllm_eagle_mrv2.config.method import (
    MARKER,
    Settings,
    is_ours,
    mark,
    names,
    parse_short_form,
    settings_of,
    translate,
)
from vllm_eagle_mrv2.config.options import Options, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}
WHOLE_LLAMA = {**LLAMA, "num_hidden_layers": 32}
# transformers knows no "mimo", whose fields are Qwen2's; vLLM goes by the architecture.
MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
QWEN3_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48}
EAGLE_TENSORS = ("fc.weight", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight")
EAGLE3_TENSORS = ("fc.weight", "midlayer.self_attn.q_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d")
LLAMA_TENSORS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")

Checkpoint = Callable[..., str]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this file may ask the hub for anything."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Makes a folder with a config.json and, on request, tensors of these names in one file or in an indexed two."""

    def make(config: dict[str, Any], tensors: Iterable[str] = (), name: str = "draft", *, indexed: bool = False) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if indexed:
            weight_map = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        elif tensors:
            save_file({tensor: torch.zeros(1) for tensor in tensors}, folder / "model.safetensors")
        return str(folder)

    return make


def assert_one_sentence(error: Exception) -> None:
    message = str(error)
    assert message.endswith(".")
    assert "\n" not in message


# The short form


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (
            "method=eagle_mrv2,model=/m/eagle,num_speculative_tokens=3",
            {"method": "eagle_mrv2", "model": "/m/eagle", "num_speculative_tokens": 3},
        ),
        ("method=eagle_mrv2:mtp,num_speculative_tokens=1", {"method": "eagle_mrv2:mtp", "num_speculative_tokens": 1}),
        # the order is the user's, spaces do not count, dashes in keys are for vLLM to read
        ("model = /m , method = eagle_mrv2", {"model": "/m", "method": "eagle_mrv2"}),
        ("method=eagle_mrv2,draft-tensor-parallel-size=1", {"method": "eagle_mrv2", "draft_tensor_parallel_size": 1}),
        # paths
        ("method=eagle_mrv2,model=./up.v1.5/a=b", {"method": "eagle_mrv2", "model": "./up.v1.5/a=b"}),
        ("method=eagle_mrv2,model=C:\\m", {"method": "eagle_mrv2", "model": "C:\\m"}),
        ("method=eagle_mrv2,model=", {"method": "eagle_mrv2", "model": ""}),
        # values that are JSON
        ("method=eagle_mrv2,a=true,b=false,c=null", {"method": "eagle_mrv2", "a": True, "b": False, "c": None}),
        ("method=eagle_mrv2,a=0.5,b=-1", {"method": "eagle_mrv2", "a": 0.5, "b": -1}),
        ("method=eagle_mrv2,revision=True", {"method": "eagle_mrv2", "revision": "True"}),
        # a method, a model and a revision are text, whatever they look like
        (
            "method=eagle_mrv2,model=123,revision=1e5,num_speculative_tokens=3",
            {"method": "eagle_mrv2", "model": "123", "revision": "1e5", "num_speculative_tokens": 3},
        ),
        (
            "model=null,method=eagle_mrv2,revision=true",
            {"model": "null", "method": "eagle_mrv2", "revision": "true"},
        ),
        ("method=eagle_mrv2,model = 7 ", {"method": "eagle_mrv2", "model": "7"}),
    ],
)
def test_short_form(text: str, parsed: dict[str, Any]) -> None:
    found = parse_short_form(text)
    assert found == parsed
    assert found is not None
    assert {key: type(value) for key, value in found.items()} == {key: type(value) for key, value in parsed.items()}


@pytest.mark.parametrize(
    "text",
    [
        '{"method": "eagle_mrv2", "model": "/m", "num_speculative_tokens": 3}',
        ' {"model": "a=b", "method": "eagle_mrv2"}',
        '["method=eagle_mrv2"]',
        "method=eagle,model=/m,num_speculative_tokens=3",
        "method=eagle_mrv3",
        "method=eagle,nothing",
        "method=eagle,model=/m,model=/n",
        "method=1,method=2",
        "model=/m,num_speculative_tokens=3",
        "eagle_mrv2",
        "null",
        "",
        "=",
    ],
)
def test_what_is_not_our_short_form_is_left_to_vllm(text: str) -> None:
    assert parse_short_form(text) is None


@pytest.mark.parametrize("text", ["method=eagle_mrv2,/m", "method=eagle_mrv2,=3", "method=eagle_mrv2,"])
def test_malformed_short_form(text: str) -> None:
    with pytest.raises(EagleMRV2Error, match="is not key=value; write method=eagle_mrv2"):
        parse_short_form(text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("method=eagle_mrv2,model=/m,model=/n", "model"),
        ("method=eagle_mrv2,model=/m,num_speculative_tokens=3,model=/m", "model"),
        ("model=/m,method=eagle_mrv2, model =/n", "model"),
        ("method=eagle_mrv2,num_speculative_tokens=2,num_speculative_tokens=3", "num_speculative_tokens"),
        ("method=eagle_mrv2,method=eagle_mrv2:eagle", "method"),
        ("method=eagle_mrv2,method=eagle", "method"),
        ("model=/m,model=/n,method=eagle_mrv2", "model"),
        ("method=eagle,method=eagle_mrv2", "method"),
    ],
)
def test_a_key_given_twice(text: str, key: str) -> None:
    with pytest.raises(EagleMRV2Error, match=f"'{key}' stands twice in --speculative-config") as refused:
        parse_short_form(text)
    assert_one_sentence(refused.value)


@pytest.mark.parametrize(
    ("method", "ours"),
    [
        *((name, True) for name in names()),
        ("eagle_mrv2:anything", True),
        ("Eagle_MRV2", True),
        ("EAGLE-mrv2:EAGLE3", True),
        ("eagle_mrv22", False),
        ("eagle", False),
        (None, False),
        (3, False),
    ],
)
def test_is_ours(method: object, ours: bool) -> None:
    assert is_ours(method) is ours


# Translation


def test_translate(checkpoint: Checkpoint) -> None:
    draft = checkpoint(ONE_LAYER, EAGLE_TENSORS)
    asked = {"method": "eagle_mrv2", "model": draft, "num-speculative-tokens": 3, "draft_tensor_parallel_size": 1}
    kept = dict(asked)
    options = parse_options({"eagle_mrv2": {"disable": ["full_decode_only"]}})

    config, settings = translate(asked, "target", options)

    assert config == {"method": "eagle", "model": draft, "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    assert settings == Settings(family="eagle", options=options)
    assert asked == kept


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_family_needs_no_checkpoint_that_can_be_read(family: str) -> None:
    asked = {"method": f"eagle_mrv2:{family}", "model": "/not/there", "num_speculative_tokens": 1}
    config, settings = translate(asked, "target", Options())
    assert config["method"] == family
    assert settings.family == family


@pytest.mark.parametrize("forced", ["medusa", "eagle:eagle3", "eagle "])
def test_a_family_that_does_not_exist(forced: str) -> None:
    with pytest.raises(EagleMRV2Error, match="names no family; use one of eagle_mrv2, eagle_mrv2:eagle, "):
        translate({"method": f"eagle_mrv2:{forced}", "model": "/m", "num_speculative_tokens": 1}, "t", Options())


@pytest.mark.parametrize(("given", "tokens"), [("3", 3), (" 3 ", 3), (3.0, 3), (3, 3)])
def test_num_speculative_tokens_however_written(given: object, tokens: int) -> None:
    asked = {"method": "eagle_mrv2:eagle", "model": "/m", "num_speculative_tokens": given}
    taken = translate(asked, "t", Options())[0]["num_speculative_tokens"]
    assert taken == tokens
    assert type(taken) is int


@pytest.mark.parametrize(
    ("given", "on"), [(True, True), ("True", True), (1, True), ("false", False), (None, False), ("perhaps", False)]
)
def test_flags_are_read_as_vllm_reads_them(given: object, on: bool) -> None:
    """The short form and dotted options give text."""
    asked = {"method": "eagle_mrv2:eagle", "model": "/m", "num_speculative_tokens": 3}
    assert translate(asked | {"enforce_eager": given}, "t", Options())[1].enforce_eager is on
    with pytest.raises(EagleMRV2Error) if on else nullcontext():
        translate(asked | {"parallel_drafting": given}, "t", Options())


@pytest.mark.parametrize("pair", [("s3://bucket/head", "t"), (None, "s3://bucket/target")], ids=str)
def test_object_storage_needs_the_family(pair: tuple[str | None, str]) -> None:
    with pytest.raises(EagleMRV2Error, match="name it with method=eagle_mrv2:eagle, :eagle3 or :mtp"):
        detect_family(*pair)


def test_parallel_drafting_is_refused() -> None:
    asked = {"method": "eagle_mrv2:eagle3", "model": "/m", "num_speculative_tokens": 3, "parallel_drafting": True}
    with pytest.raises(EagleMRV2Error, match="lacks parallel drafting for EAGLE; leave parallel_drafting out"):
        translate(asked, "t", Options())


@pytest.mark.parametrize("method", ["Eagle_MRV2:eagle", "EAGLE-MRV2:Eagle"])
def test_the_spelling_of_the_method(method: str) -> None:
    asked = {"method": method, "model": "/m", "num_speculative_tokens": 3}
    assert translate(asked, "t", Options())[0]["method"] == "eagle"
    assert parse_short_form(f"method={method},model=/m") == {"method": method, "model": "/m"}


@pytest.mark.parametrize("tokens", [0, -1, "0", "x", "-1", "3.5", True, 3.5, float("nan"), [3]])
def test_num_speculative_tokens_must_be_a_positive_whole_number(tokens: object) -> None:
    asked = {"method": "eagle_mrv2:eagle", "model": "/m", "num_speculative_tokens": tokens}
    with pytest.raises(EagleMRV2Error, match="needs num_speculative_tokens of at least 1") as refused:
        translate(asked, "t", Options())
    assert repr(tokens) in str(refused.value)


@pytest.mark.parametrize("tokens", [{}, {"num_speculative_tokens": None}], ids=["absent", "None"])
@pytest.mark.parametrize("model", [{}, {"model": "/m"}], ids=["no model", "model"])
@pytest.mark.parametrize("family", FAMILIES)
def test_num_speculative_tokens_must_be_given(family: str, model: dict[str, Any], tokens: dict[str, Any]) -> None:
    with pytest.raises(EagleMRV2Error, match="needs num_speculative_tokens; 3 is a good start") as refused:
        translate({"method": f"eagle_mrv2:{family}", **model, **tokens}, "t", Options())
    assert_one_sentence(refused.value)


def test_num_speculative_tokens_must_be_given_for_a_detected_mtp_head(checkpoint: Checkpoint) -> None:
    with pytest.raises(EagleMRV2Error, match="needs num_speculative_tokens; 3 is a good start"):
        translate({"method": "eagle_mrv2", "model": checkpoint(MIMO)}, "t", Options())


def test_mtp_needs_no_model() -> None:
    config, _ = translate({"method": "eagle_mrv2:mtp", "num_speculative_tokens": 1}, "t", Options())
    assert config == {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(
    ("given", "asked_for"),
    [
        ({}, False),
        ({"enforce_eager": None}, False),
        ({"enforce_eager": False}, False),
        ({"enforce_eager": True}, True),
        ({"enforce-eager": True}, True),
    ],
)
def test_the_request_says_who_asked_for_an_eager_draft(given: dict[str, Any], asked_for: bool) -> None:
    """vLLM fills the field of its own configuration in by itself, so the user's word is kept apart."""
    asked = {"method": "eagle_mrv2:eagle", "model": "/m", "num_speculative_tokens": 3, **given}
    config, settings = translate(asked, "t", Options())
    assert settings == Settings("eagle", Options(), enforce_eager=asked_for)
    assert [config[key] for key in config if key == "enforce_eager"] == list(given.values())


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}], ids=["absent", "None", "empty"])
@pytest.mark.parametrize("method", ["eagle_mrv2", "eagle_mrv2:eagle", "eagle_mrv2:eagle3"])
def test_no_draft_model(method: str, model: dict[str, Any], checkpoint: Checkpoint) -> None:
    asked = {"method": method, "num_speculative_tokens": 3, **model}
    with pytest.raises(EagleMRV2Error, match="needs a draft model") as refused:
        translate(asked, checkpoint(WHOLE_LLAMA, name="t"), Options())
    assert_one_sentence(refused.value)


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}], ids=["absent", "None", "empty"])
@pytest.mark.parametrize("method", ["eagle_mrv2", "eagle_mrv2:mtp"])
def test_no_draft_model_where_the_target_has_mtp_layers(
    method: str, model: dict[str, Any], checkpoint: Checkpoint
) -> None:
    target = checkpoint(MIMO, name="t")
    config, settings = translate({"method": method, "num_speculative_tokens": 1, **model}, target, Options())
    assert config == {"method": "mtp", "num_speculative_tokens": 1}
    assert settings.family == "mtp"


# vLLM reads the path of an MTP draft before its configuration

MISLEADING = [
    ("eagle-mimo", "eagle-"),
    ("EAGLE-MiMo", "eagle-"),
    ("mimo_EAGLE3", "eagle3"),
    ("eagle3-mimo", "eagle3"),
    ("mimo-DFlash", "dflash"),
    ("dspark_mimo", "dspark"),
]


def refused_path(asked: dict[str, Any], target: str) -> str:
    with pytest.raises(EagleMRV2Error, match=r"vLLM takes the MTP draft .* rename or move the folder") as refused:
        translate({**asked, "num_speculative_tokens": 1}, target, Options())
    assert_one_sentence(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("place", ["/m/{}", "/{}/mimo", "{}"], ids=["folder", "folder above", "hub"])
@pytest.mark.parametrize(("name", "word"), MISLEADING)
def test_misleading_path_of_a_forced_mtp_head(name: str, word: str, place: str) -> None:
    path = place.format(name)
    message = refused_path({"method": "eagle_mrv2:mtp", "model": path}, "target")
    assert path in message
    assert f"'{word}'" in message
    for model in ({}, {"model": ""}):  # the head inside a target of that name
        message = refused_path({"method": "eagle_mrv2:mtp", **model}, path)
        assert path in message
        assert f"'{word}'" in message


@pytest.mark.parametrize("inside", [False, True], ids=["draft", "inside the target"])
@pytest.mark.parametrize(("name", "word"), MISLEADING)
def test_misleading_path_of_a_detected_mtp_head(name: str, word: str, inside: bool, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIMO))
    asked = {"method": "eagle_mrv2"} if inside else {"method": "eagle_mrv2", "model": str(folder)}
    message = refused_path(asked, str(folder) if inside else "target")
    assert str(folder) in message
    assert f"'{word}'" in message


def test_neutral_path_of_an_mtp_head() -> None:
    for path in ("/m/mimo", "/m/eagle", "/m/eagle_mimo", "XiaomiMiMo/MiMo-7B-RL"):
        asked = {"method": "eagle_mrv2:mtp", "model": path, "num_speculative_tokens": 1}
        assert translate(asked, "/eagle3/target", Options())[0] == {**asked, "method": "mtp"}


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", [name for name, _ in MISLEADING])
def test_the_path_of_an_eagle_head_misleads_nobody(name: str, family: str) -> None:
    asked = {"method": f"eagle_mrv2:{family}", "model": f"/m/{name}", "num_speculative_tokens": 3}
    assert translate(asked, "target", Options())[0] == {**asked, "method": family}


# The family of a checkpoint

HEADS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "EAGLE-1 as a one-layer Llama": ("eagle", ONE_LAYER, EAGLE_TENSORS),
    "EAGLE-1 whose weights are not to be seen": ("eagle", ONE_LAYER, ()),
    "EAGLE-1 by architecture": ("eagle", {"architectures": ["EagleLlamaForCausalLM"]}, ()),
    "EAGLE-1 by model type": ("eagle", {"model_type": "eagle"}, ()),
    "EAGLE-1 whose architecture says MTP too": ("eagle", {"architectures": ["EagleDeepSeekMTPModel"]}, ()),
    "EAGLE-3 by architecture": ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, ()),
    "EAGLE-3 of another spelling": ("eagle3", {"architectures": ["Eagle3LlamaForCausalLM"]}, ()),
    "EAGLE-3 as a one-layer Llama": ("eagle3", {**ONE_LAYER, "draft_vocab_size": 32000}, EAGLE3_TENSORS),
    "EAGLE-3 as a one-layer Llama, weights not seen": ("eagle3", {**ONE_LAYER, "draft_vocab_size": 32000}, ()),
    "EAGLE-3 by its tensors alone": ("eagle3", ONE_LAYER, EAGLE3_TENSORS),
    "EAGLE-3 of the whole vocabulary": ("eagle3", ONE_LAYER, EAGLE3_TENSORS[:4]),
    "EAGLE-3 by its layers of the target": ("eagle3", {**ONE_LAYER, "eagle_aux_hidden_state_layer_ids": [2, 9]}, ()),
    "speculators, EAGLE-1": ("eagle", {"speculators_model_type": "eagle", **ONE_LAYER}, ()),
    "speculators, EAGLE-3": ("eagle3", {"speculators_model_type": "eagle3", **ONE_LAYER}, ()),
    "speculators, EAGLE-1 that looks like EAGLE-3": (
        "eagle",
        {"speculators_model_type": "eagle", "architectures": ["Eagle3Speculator"]},
        (),
    ),
    "MTP of MiMo": ("mtp", MIMO, ()),
    "MTP of another spelling": (
        "mtp",
        {"architectures": ["DeepseekV3ForCausalLMNextN"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        (),
    ),
    "MTP whose configuration does not say how many": ("mtp", QWEN3_NEXT, ()),
}


@pytest.mark.parametrize(("family", "config", "tensors"), HEADS.values(), ids=HEADS.keys())
def test_family(family: str, config: dict[str, Any], tensors: tuple[str, ...], checkpoint: Checkpoint) -> None:
    assert detect_family(checkpoint(config, tensors), "target") == family


@pytest.mark.parametrize(("tensors", "family"), [(EAGLE_TENSORS, "eagle"), (EAGLE3_TENSORS, "eagle3")])
def test_family_by_an_index_of_tensors(tensors: tuple[str, ...], family: str, checkpoint: Checkpoint) -> None:
    assert detect_family(checkpoint(ONE_LAYER, tensors, indexed=True), "target") == family


@pytest.mark.parametrize(
    ("name", "config", "tensors", "family"),
    [
        ("eagle3-foo", ONE_LAYER, EAGLE_TENSORS, "eagle"),
        ("eagle-foo", {**ONE_LAYER, "draft_vocab_size": 8}, EAGLE3_TENSORS, "eagle3"),
        ("mtp", ONE_LAYER, EAGLE_TENSORS, "eagle"),
    ],
)
def test_the_name_of_the_folder_says_nothing(
    name: str, config: dict[str, Any], tensors: tuple[str, ...], family: str, checkpoint: Checkpoint
) -> None:
    assert detect_family(checkpoint(config, tensors, name), "target") == family


@pytest.mark.parametrize("config", [MIMO, QWEN3_NEXT], ids=["MiMo", "Qwen3-Next"])
def test_mtp_inside_the_target(config: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    target = checkpoint(config, name="target")
    assert detect_family(None, target) == "mtp"
    monkeypatch.chdir(Path(target).parent)
    for copy_of_it in (target, "./target/"):
        assert detect_family(copy_of_it, target) == "mtp"
        assert detect_family(copy_of_it, "another/target") == "mtp"


@pytest.mark.parametrize(
    "config", [WHOLE_LLAMA, {**WHOLE_LLAMA, "num_nextn_predict_layers": 1}, {**MIMO, "num_nextn_predict_layers": 0}]
)
def test_no_mtp_inside_the_target(config: dict[str, Any], checkpoint: Checkpoint) -> None:
    """vLLM decides, whatever the configuration says."""
    target = checkpoint(config, name="target")
    with pytest.raises(EagleMRV2Error, match="has no MTP layers that this vLLM release drafts with"):
        detect_family(None, target)


def refused_draft(config: Any, tensors: Iterable[str], checkpoint: Checkpoint) -> str:
    draft = checkpoint(config, tensors)
    with pytest.raises(EagleMRV2Error) as refused:
        detect_family(draft, "target")
    assert draft in str(refused.value)
    assert_one_sentence(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("config", "tensors", "whole"),
    [
        (WHOLE_LLAMA, (), True),
        (WHOLE_LLAMA, LLAMA_TENSORS, True),
        (ONE_LAYER, LLAMA_TENSORS, True),
        ({**LLAMA, "architectures": ["LlamaModel"], "num_hidden_layers": 1}, (), False),
    ],
    ids=["whole Llama", "whole Llama, seen", "one layer without fc", "no head"],
)
def test_what_is_no_head_is_refused(
    config: dict[str, Any], tensors: tuple[str, ...], whole: bool, checkpoint: Checkpoint
) -> None:
    message = refused_draft(config, tensors, checkpoint)
    assert "no EAGLE or MTP head" in message
    assert ("whole model" in message) is whole
    assert ("method=eagle_mrv2:eagle" in message) is not whole  # a family forced on a whole model fails later


OTHER_KINDS = {
    "P-EAGLE of speculators": ({"speculators_model_type": "peagle"}, "Model Runner V2 lacks"),
    "P-EAGLE": ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 7}, "Model Runner V2 lacks"),
    "DFlash of speculators": ({"speculators_model_type": "dflash", "draft_vocab_size": 9}, "use method=dflash"),
    "DFlash": ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "use method=dflash"),
    "Gemma 4 assistant": ({"model_type": "gemma4_assistant"}, "use method=mtp"),
    "Medusa": ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "is a Medusa head"),
    "MLP speculator": ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "is an MLP speculator"),
}


@pytest.mark.parametrize(("config", "says"), OTHER_KINDS.values(), ids=OTHER_KINDS.keys())
def test_a_draft_of_another_kind(config: dict[str, Any], says: str, checkpoint: Checkpoint) -> None:
    message = refused_draft(config, (), checkpoint)
    assert says in message
    assert "eagle_mrv2" not in message
    for family in FAMILIES:
        asked = {"method": f"eagle_mrv2:{family}", "model": message.split()[0], "num_speculative_tokens": 3}
        with pytest.raises(EagleMRV2Error, match=says):
            translate(asked, "target", Options())


@pytest.mark.parametrize("method", ["medusa", "nothing"])
def test_the_remedy_for_another_kind_is_one_of_the_installed_release(
    method: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.config.speculative.SpeculativeMethod", Literal[method])
    message = refused_draft({"model_type": "medusa"}, (), checkpoint)
    assert ("use method=medusa" in message) is (method == "medusa")


SURE = {
    "EAGLE-3 by architecture": ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"]}, ()),
    "EAGLE-3 by tensors": ("eagle3", ONE_LAYER, EAGLE3_TENSORS),
    "EAGLE-1 by architecture": ("eagle", {"architectures": ["EagleCohereForCausalLM"]}, ()),
    "EAGLE-1 by model type": ("eagle", {"model_type": "eagle"}, ()),
}
UNSURE = {
    "one layer": (ONE_LAYER, ()),
    "with fc": (ONE_LAYER, EAGLE_TENSORS),
    "draft vocabulary": ({**ONE_LAYER, "draft_vocab_size": 9}, ()),
}


@pytest.mark.parametrize("forced", FAMILIES)
@pytest.mark.parametrize(("family", "config", "tensors"), SURE.values(), ids=SURE.keys())
def test_a_family_forced_on_a_head_of_another(
    forced: str, family: str, config: dict[str, Any], tensors: tuple[str, ...], checkpoint: Checkpoint
) -> None:
    asked = {"method": f"eagle_mrv2:{forced}", "model": checkpoint(config, tensors), "num_speculative_tokens": 3}
    if forced == family:
        assert translate(asked, "target", Options())[1].family == family
        return
    with pytest.raises(
        EagleMRV2Error, match=r"is an EAGLE-. head, not an? .* head; use method=eagle_mrv2\."
    ) as refused:
        translate(asked, "target", Options())
    assert_one_sentence(refused.value)


@pytest.mark.parametrize("forced", FAMILIES)
@pytest.mark.parametrize(("config", "tensors"), UNSURE.values(), ids=UNSURE.keys())
def test_a_family_forced_where_nothing_is_sure(
    forced: str, config: dict[str, Any], tensors: tuple[str, ...], checkpoint: Checkpoint
) -> None:
    asked = {"method": f"eagle_mrv2:{forced}", "model": checkpoint(config, tensors), "num_speculative_tokens": 3}
    assert translate(asked, "target", Options())[1].family == forced


@pytest.mark.parametrize("config", [[], ["eagle"], "eagle", 3, None])
@pytest.mark.parametrize("inside", [False, True], ids=["draft", "target"])
def test_a_configuration_that_is_no_object(config: Any, inside: bool, checkpoint: Checkpoint) -> None:
    folder = checkpoint(config)
    with pytest.raises(EagleMRV2Error, match=r"cannot be read|is not a JSON object") as refused:
        detect_family(None if inside else folder, folder if inside else "target")
    assert folder in str(refused.value)
    assert_one_sentence(refused.value)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def refused_weights(draft: str, file: str) -> str:
    with pytest.raises(EagleMRV2Error, match="download the draft model again") as refused:
        detect_family(draft, "target")
    assert str(Path(draft) / file) in str(refused.value)
    assert_one_sentence(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("content", [b"", LFS_POINTER], ids=["empty", "not downloaded"])
def test_weights_that_are_none(content: bytes, checkpoint: Checkpoint) -> None:
    draft = checkpoint(ONE_LAYER)
    (Path(draft) / "model.safetensors").write_bytes(content)
    assert "is not a complete safetensors file" in refused_weights(draft, "model.safetensors")


@pytest.mark.parametrize("kept", [4, 8, 40, -1])
def test_truncated_weights(kept: int, checkpoint: Checkpoint) -> None:
    draft = checkpoint(ONE_LAYER, EAGLE_TENSORS)
    weights = Path(draft) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert "is not a complete safetensors file" in refused_weights(draft, "model.safetensors")


def test_one_truncated_file_of_two(checkpoint: Checkpoint) -> None:
    draft = checkpoint(ONE_LAYER, EAGLE_TENSORS)
    (Path(draft) / "second.safetensors").write_bytes((Path(draft) / "model.safetensors").read_bytes()[:-1])
    assert "is not a complete safetensors file" in refused_weights(draft, "second.safetensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"weight_map": {"fc.weight": "model',
        b"{}",
        b"\xff",
        LFS_POINTER,
        b"[]",
        b"null",
        b'{"weight_map": null}',
        b'{"weight_map": 3}',
    ],
)
def test_bad_index_of_weights(content: bytes, checkpoint: Checkpoint) -> None:
    draft = checkpoint(ONE_LAYER)
    (Path(draft) / "model.safetensors.index.json").write_bytes(content)
    assert "is not an index of a checkpoint" in refused_weights(draft, "model.safetensors.index.json")


def test_missing_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "gone")
    with pytest.raises(EagleMRV2Error, match="cannot be read") as refused:
        detect_family(missing, "target")
    assert missing in str(refused.value)
    assert_one_sentence(refused.value)


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        detect_family(str(tmp_path), "target")
    assert str(tmp_path) in str(refused.value)
    assert_one_sentence(refused.value)


def test_config_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EagleMRV2Error, match="cannot be read") as refused:
        detect_family(str(tmp_path), "target")
    assert_one_sentence(refused.value)


# The marker


def test_mark_and_request_of() -> None:
    config, settings = SimpleNamespace(method="eagle"), Settings("eagle", Options())
    assert settings_of(config) is None
    mark(config, settings)
    assert settings_of(config) is settings
    assert settings_of(SimpleNamespace(method="eagle_mrv2")) is None
    assert settings_of(SimpleNamespace(**{MARKER: "eagle"})) is None
    assert settings_of(None) is None


def test_a_request_travels() -> None:
    settings = Settings(
        "eagle3", parse_options({"eagle_mrv2": {"disable": ["actual_max_seq_len"]}}), enforce_eager=True
    )
    config = SimpleNamespace()
    mark(config, settings)
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
        assert settings_of(copied) == settings
