"""``vllm-eagle-mrv2 doctor --model`` over public heads and targets.

Each is looked at twice: as on a machine that serves the target, where vLLM makes the configuration of the engine if it
can here, and as on one that does not, where the configurations of target and draft answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.cli.doctor import preflight

from .test_catalog import (  # noqa: F401  (fixtures)
    CATALOG,
    HEADS,
    MISFITS,
    OTHER_KINDS,
    PAIRS,
    QWEN3,
    TARGETS,
    Folder,
    environment,
    folder,
)
from .test_preflight import healthy, look_at, no_kernels  # noqa: F401

UNREADABLE = {
    # what vLLM itself cannot read: its class for the one wants more, the code of the others is not in the catalog
    "eagle618/eagle-deepseek-v3-random": "model should not be None when method is eagle",
    "openbmb/MiniCPM4-8B-Eagle-vLLM": "minicpm",
    "XiaomiMiMo/MiMo-7B-RL": "mimo",
    "openbmb/MiniCPM4-8B": "minicpm",
}
UNSUPPORTED = {"yuhuili/EAGLE-Qwen2-7B-Instruct": "EagleQwen2ForCausalLM"}  # vLLM has no such head
MTP = {
    # targets with MTP layers, and a release of vLLM that drafts with them
    "deepseek-ai/DeepSeek-V3": "0.20",
    "deepseek-ai/DeepSeek-V3.2": "0.20",
    "luccafong/deepseek_mtp_main_random": "0.20",
    "XiaomiMiMo/MiMo-7B-RL-qwen2type": "0.20",
    "baidu/ERNIE-4.5-21B-A3B-PT": "0.20",
    "zai-org/GLM-4.5-Air": "0.20",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "0.20",
    "LGAI-EXAONE/K-EXAONE-236B-A23B": "0.32",
    "Qwen/Qwen3.5-35B-A3B": "0.32",
    "XiaomiMiMo/MiMo-V2-Flash": "0.32",
    "deepseek-ai/DeepSeek-V4-Flash": "0.32",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "0.32",
    "stepfun-ai/Step-3.5-Flash": "0.32",
    "zai-org/GLM-5": "0.32",
    "zai-org/GLM-OCR": "0.32",
}


@pytest.fixture(autouse=True, params=["serves the target", "does not"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda_alike", lambda: False)
    if request.param == "does not":
        monkeypatch.setattr(preflight, "_engine_config", no_kernels)


@pytest.mark.parametrize("head", PAIRS)
def test_a_head_with_its_target(head: str, folder: Folder) -> None:  # noqa: F811
    family, target = PAIRS[head]
    report = look_at(folder(target), folder(head))
    if head in UNREADABLE:
        assert UNREADABLE[head] in report["reason"]
    elif head in UNSUPPORTED:
        unsupported = f"(Model architectures ['{UNSUPPORTED[head]}'] are not supported for now)"
        assert f"vLLM refuses the draft {folder(head)} for method={family} {unsupported}" in report["reason"]
        assert report["family"] == family
    else:
        assert (report["reason"], report["accepted"], report["family"]) == (None, True, family)
        assert report["deployment"]["checked"] in ("engine", "models")


@pytest.mark.parametrize("head", OTHER_KINDS)
def test_a_draft_of_another_kind(head: str, folder: Folder) -> None:  # noqa: F811
    report = look_at(folder(QWEN3), folder(head))
    assert (report["accepted"], report["family"]) == (False, None)
    assert OTHER_KINDS[head] in report["reason"]


@pytest.mark.parametrize(("head", "target", "says"), MISFITS)
def test_a_head_of_another_target(head: str, target: str, says: str, folder: Folder) -> None:  # noqa: F811
    report = look_at(folder(target), folder(head))
    assert report["family"] == PAIRS[head][0]
    assert says in report["reason"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_alone(target: str, folder: Folder) -> None:  # noqa: F811
    report = look_at(folder(target), None, "-k", "1")
    if target in UNREADABLE:
        assert UNREADABLE[target] in report["reason"]
    elif target in MTP:
        # An older release may lack them.
        if releases.installed_version() >= Version(MTP[target]) or report["accepted"]:
            assert (report["reason"], report["family"]) == (None, "mtp")
    else:
        assert "has no MTP layers that this vLLM release drafts with" in report["reason"]


def test_a_speculators_checkpoint_that_names_its_target(folder: Folder, tmp_path: Path) -> None:  # noqa: F811
    config = json.loads(json.dumps(HEADS["RedHatAI/Qwen3-8B-speculator.eagle3"]))
    config["speculators_config"]["verifier"]["name_or_path"] = folder(QWEN3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = look_at(str(tmp_path))
    assert (report["reason"], report["family"]) == (None, "eagle3")
