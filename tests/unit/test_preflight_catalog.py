"""``vllm-eagle-mrv2 doctor --model`` over public heads and targets, as configurations alone tell them.

vLLM is kept from making the configuration of an engine, for which it inspects the classes of each model in a process
of their own; the answers come from what remains, which is how a machine without the target's kernels answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.unit.test_preflight import healthy, look_at, no_kernels  # noqa: F401  (fixtures)
from tests.unit.test_seams import LLAMA, fresh  # noqa: F401
from vllm_eagle_mrv2 import hosts
from vllm_eagle_mrv2.cli import preflight

pytest.importorskip("vllm")

CATALOG = Path(__file__).parents[1] / "catalog"
QWEN3, QWEN3_MOE, GPT_OSS = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"
KIMI, DEEPSEEK = "moonshotai/Kimi-K2-Instruct", "deepseek-ai/DeepSeek-V3"
LLAMA3, LLAMA31 = "meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"

# Head, its target, and the family.
HEADS = [
    ("AngelSlim/Qwen3-8B_eagle3", QWEN3, "eagle3"),
    ("Tengyunw/qwen3_8b_eagle3", QWEN3, "eagle3"),
    ("RedHatAI/Qwen3-8B-speculator.eagle3", QWEN3, "eagle3"),
    ("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3", QWEN3_MOE, "eagle3"),
    ("SpecForge/qwen3-30B-A3B-eagle3.1", QWEN3_MOE, "eagle3"),
    ("lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge", QWEN3_MOE, "eagle3"),
    ("RedHatAI/gpt-oss-20b-speculator.eagle3", GPT_OSS, "eagle3"),
    ("lmsys/EAGLE3-gpt-oss-120b-bf16", GPT_OSS, "eagle3"),
    ("nvidia/gpt-oss-120b-Eagle3", GPT_OSS, "eagle3"),
    ("nvidia/gpt-oss-120b-Eagle3-v2", GPT_OSS, "eagle3"),
    ("nvidia/gpt-oss-120b-Eagle3-v3", GPT_OSS, "eagle3"),
    ("AQ-MedAI/Kimi-K2-Instruct-eagle3", KIMI, "eagle3"),
    ("lightseekorg/kimi-k2.6-eagle3-mla", KIMI, "eagle3"),
    ("nvidia/Kimi-K2-Thinking-Eagle3", KIMI, "eagle3"),
    ("nm-testing/SpeculatorLlama3-1-8B-Eagle3-converted-0717-quantized", LLAMA31, "eagle3"),
    ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", LLAMA31, "eagle3"),
    ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "meta-llama/Llama-3.3-70B-Instruct", "eagle3"),
    ("yuhuili/EAGLE3-Vicuna1.3-13B", "lmsys/vicuna-13b-v1.3", "eagle3"),
    ("yuhuili/EAGLE-LLaMA3-Instruct-8B", LLAMA3, "eagle"),
    ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", LLAMA31, "eagle"),
    ("yuhuili/EAGLE-Qwen2-7B-Instruct", "Qwen/Qwen2-7B-Instruct", "eagle"),
    ("yuhuili/EAGLE-mixtral-instruct-8x7B", "mistralai/Mixtral-8x7B-Instruct-v0.1", "eagle"),
    ("abhigoyal/EAGLE-llama2-chat-7B-vllm", "lmsys/vicuna-7b", "eagle"),
    ("CohereLabs/command-eagle", "CohereLabs/c4ai-command-r7b-12-2024", "eagle"),
    ("morgendave/EAGLE-Llama-4-Scout-17B-16E-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "eagle"),
    ("lmsys/DeepSeek-V3-NextN", DEEPSEEK, "mtp"),
]
# What is refused, and a part of the reason.
OTHERS = [
    ("RedHatAI/Qwen3-8B-speculator.dflash", QWEN3, "use method=dflash"),
    ("z-lab/Qwen3-8B-DFlash-b16", QWEN3, "use method=dflash"),
    ("RedHatAI/Qwen3-8B-speculator.peagle", QWEN3, "is a P-EAGLE head, which needs parallel drafting"),
    ("amazon/GPT-OSS-20B-P-EAGLE", GPT_OSS, "is a P-EAGLE head, which needs parallel drafting"),
    ("google/gemma-4-31B-it-assistant", QWEN3, "use method=mtp"),
    ("eagle618/eagle-deepseek-v3-random", DEEPSEEK, "model should not be None"),  # the class of vLLM's for it says so
    ("openbmb/MiniCPM4-8B-Eagle-vLLM", QWEN3, "minicpm"),  # whose own code is not in the catalog
]
# Heads whose target is not in the catalog; one of their shape is made up.
LONE = [("Rayzl/qwen2.5-vl-7b-eagle3-sgl", "eagle3"), ("taobao-mnn/Qwen3-VL-8B-Instruct-Eagle3", "eagle3")]
# Targets with MTP layers, and a release of vLLM that drafts with them.
MTP = [
    ("deepseek-ai/DeepSeek-V3", "0.20"),
    ("deepseek-ai/DeepSeek-V3.2", "0.20"),
    ("luccafong/deepseek_mtp_main_random", "0.20"),
    ("XiaomiMiMo/MiMo-7B-RL-qwen2type", "0.20"),
    ("baidu/ERNIE-4.5-21B-A3B-PT", "0.20"),
    ("zai-org/GLM-4.5-Air", "0.20"),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "0.20"),
    ("LGAI-EXAONE/K-EXAONE-236B-A23B", "0.32"),
    ("Qwen/Qwen3.5-35B-A3B", "0.32"),
    ("XiaomiMiMo/MiMo-V2-Flash", "0.32"),
    ("deepseek-ai/DeepSeek-V4-Flash", "0.32"),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "0.32"),
    ("stepfun-ai/Step-3.5-Flash", "0.32"),
    ("zai-org/GLM-5", "0.32"),
    ("zai-org/GLM-OCR", "0.32"),
]
WITHOUT = [QWEN3, QWEN3_MOE, GPT_OSS, KIMI, LLAMA3, LLAMA31, "lmsys/vicuna-7b"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder with a ``config.json`` for each name of the catalog."""
    root = tmp_path_factory.mktemp("published")
    folders = {}
    for file in ("heads", "targets"):
        for name, config in json.loads((CATALOG / f"{file}.json").read_text()).items():
            folder = root / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config))
            folders[name] = str(folder)
    return folders


@pytest.fixture(autouse=True)
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_engine_config", no_kernels)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda_alike", lambda: False)


def test_every_head_has_its_answer() -> None:
    heads = set(json.loads((CATALOG / "heads.json").read_text()))
    assert heads == {head for head, *_ in [*HEADS, *OTHERS, *LONE]}


def answer(target: str, head: str | None, published: dict[str, str], k: str = "1") -> dict[str, Any]:
    return look_at(published[target], None if head is None else published[head], "-k", k)


@pytest.mark.parametrize(("head", "target", "family"), HEADS)
def test_a_head_with_its_target(head: str, target: str, family: str, published: dict[str, str]) -> None:
    report = answer(target, head, published)
    assert report["reason"] is None
    assert report["family"] == family


@pytest.mark.parametrize(("head", "target", "reason"), OTHERS)
def test_what_is_no_head_of_ours(head: str, target: str, reason: str, published: dict[str, str]) -> None:
    report = answer(target, head, published)
    assert report["accepted"] is False
    assert reason in report["reason"]


@pytest.mark.parametrize(
    ("head", "target"), [("AngelSlim/Qwen3-8B_eagle3", GPT_OSS), ("nvidia/Kimi-K2-Thinking-Eagle3", QWEN3)]
)
def test_a_head_with_another_target(head: str, target: str, published: dict[str, str]) -> None:
    report = answer(target, head, published)
    assert (report["accepted"], report["family"]) == (False, "eagle3")
    assert "give the head of this target" in report["reason"]


@pytest.mark.parametrize(("target", "since"), MTP)
def test_a_target_with_mtp_layers(target: str, since: str, published: dict[str, str]) -> None:
    report = answer(target, None, published)
    if hosts.installed_release() >= Version(since) or report["accepted"]:
        assert (report["reason"], report["family"]) == (None, "mtp")


@pytest.mark.parametrize("target", WITHOUT)
def test_a_target_without(target: str, published: dict[str, str]) -> None:
    assert "has no MTP layers" in answer(target, None, published)["reason"]


@pytest.mark.parametrize(("head", "family"), LONE)
def test_a_head_whose_target_is_made_up(head: str, family: str, published: dict[str, str], tmp_path: Path) -> None:
    shape = json.loads((CATALOG / "heads.json").read_text())[head]
    target = {**LLAMA, "hidden_size": shape["hidden_size"], "vocab_size": shape["vocab_size"], "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(target))
    report = look_at(str(tmp_path), published[head])
    assert (report["reason"], report["family"]) == (None, family)


def test_a_speculators_checkpoint_that_names_its_target(published: dict[str, str], tmp_path: Path) -> None:
    config = json.loads((CATALOG / "heads.json").read_text())["RedHatAI/Qwen3-8B-speculator.eagle3"]
    config["speculators_config"]["verifier"]["name_or_path"] = published[QWEN3]
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = look_at(str(tmp_path))
    assert (report["reason"], report["family"]) == (None, "eagle3")
