"""Public heads and targets by their configurations: what stock vLLM accepts on Model Runner V2, and what we do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle_mrv2.config.heads import detect_family
from vllm_eagle_mrv2.config.method import settings_of
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.plugin import register

pytest.importorskip("vllm")
register()

from vllm.engine.arg_utils import EngineArgs  # noqa: E402

CATALOG = Path(__file__).parents[1] / "catalog"
HEADS: dict[str, dict[str, Any]] = json.loads((CATALOG / "heads.json").read_text())
TARGETS: dict[str, dict[str, Any]] = json.loads((CATALOG / "targets.json").read_text())

KIMI, DEEPSEEK, GPT_OSS = "moonshotai/Kimi-K2-Instruct", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"
LLAMA_3, LLAMA_31, LLAMA_70B = (
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
)
QWEN3, QWEN3_MOE, QWEN2 = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2-7B-Instruct"
PAIRS: dict[str, tuple[str, str]] = {
    # a head: its family, and a target of the shape that it was trained for
    "AQ-MedAI/Kimi-K2-Instruct-eagle3": ("eagle3", KIMI),
    "AngelSlim/Qwen3-8B_eagle3": ("eagle3", QWEN3),
    "CohereLabs/command-eagle": ("eagle", "CohereLabs/c4ai-command-r7b-12-2024"),
    "Rayzl/qwen2.5-vl-7b-eagle3-sgl": ("eagle3", QWEN2),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": ("eagle3", QWEN3_MOE),
    "RedHatAI/Qwen3-8B-speculator.eagle3": ("eagle3", QWEN3),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": ("eagle3", GPT_OSS),
    "SpecForge/qwen3-30B-A3B-eagle3.1": ("eagle3", QWEN3_MOE),
    "Tengyunw/qwen3_8b_eagle3": ("eagle3", QWEN3),
    "abhigoyal/EAGLE-llama2-chat-7B-vllm": ("eagle", "lmsys/vicuna-7b"),
    "eagle618/eagle-deepseek-v3-random": ("eagle", DEEPSEEK),
    "lightseekorg/kimi-k2.6-eagle3-mla": ("eagle3", KIMI),
    "lmsys/DeepSeek-V3-NextN": ("mtp", DEEPSEEK),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": ("eagle3", GPT_OSS),
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge": ("eagle3", QWEN3_MOE),
    "morgendave/EAGLE-Llama-4-Scout-17B-16E-Instruct": ("eagle", "meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "nm-testing/SpeculatorLlama3-1-8B-Eagle3-converted-0717-quantized": ("eagle3", LLAMA_31),
    "nvidia/Kimi-K2-Thinking-Eagle3": ("eagle3", KIMI),
    "nvidia/gpt-oss-120b-Eagle3": ("eagle3", GPT_OSS),
    "nvidia/gpt-oss-120b-Eagle3-v2": ("eagle3", GPT_OSS),
    "nvidia/gpt-oss-120b-Eagle3-v3": ("eagle3", GPT_OSS),
    "openbmb/MiniCPM4-8B-Eagle-vLLM": ("eagle", "openbmb/MiniCPM4-8B"),
    "taobao-mnn/Qwen3-VL-8B-Instruct-Eagle3": ("eagle3", QWEN3),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": ("eagle", LLAMA_3),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": ("eagle", LLAMA_31),
    "yuhuili/EAGLE-Qwen2-7B-Instruct": ("eagle", QWEN2),
    "yuhuili/EAGLE-mixtral-instruct-8x7B": ("eagle", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": ("eagle3", LLAMA_31),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": ("eagle3", LLAMA_70B),
    "yuhuili/EAGLE3-Vicuna1.3-13B": ("eagle3", "lmsys/vicuna-13b-v1.3"),
}
OTHER_KINDS = {
    # a draft that is no head of ours: what its refusal says
    "RedHatAI/Qwen3-8B-speculator.dflash": "is a DFlash draft, not an EAGLE or MTP head; use method=dflash.",
    "z-lab/Qwen3-8B-DFlash-b16": "is a DFlash draft, not an EAGLE or MTP head; use method=dflash.",
    "RedHatAI/Qwen3-8B-speculator.peagle": "needs parallel drafting, and Model Runner V2 lacks that for EAGLE",
    "amazon/GPT-OSS-20B-P-EAGLE": "needs parallel drafting, and Model Runner V2 lacks that for EAGLE",
    "google/gemma-4-31B-it-assistant": "is a Gemma 4 assistant, which vLLM drafts with by a speculator of its own",
}
MISFITS = [
    # a head, a target that it does not fit, and what does not
    ("yuhuili/EAGLE-LLaMA3-Instruct-8B", LLAMA_70B, "hidden states of size 4096"),
    ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", LLAMA_31, "hidden states of size 8192"),
    ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", QWEN3, "a vocabulary of 128256 tokens"),
    ("abhigoyal/EAGLE-llama2-chat-7B-vllm", LLAMA_3, "a vocabulary of 32000 tokens"),
    ("RedHatAI/Qwen3-8B-speculator.eagle3", QWEN3_MOE, "hidden states of size 4096"),
    ("AngelSlim/Qwen3-8B_eagle3", GPT_OSS, "hidden states of size 4096"),
    ("lmsys/DeepSeek-V3-NextN", KIMI, "a vocabulary of 129280 tokens"),
]
COMMON = {"skip_tokenizer_init": True, "load_format": "dummy", "enforce_eager": True, "max_model_len": 1024}

Folder = Callable[[str], str]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, on Model Runner V2; vLLM looks at classes of models here, where it would start a process for each."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a head or a target, with its config.json in it and nothing else."""
    root = tmp_path_factory.mktemp("catalog")

    def written(name: str) -> str:
        place = root / name.rpartition("/")[2].replace("EAGLE-", "E1-").replace("eagle-", "e1-")
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps({**HEADS, **TARGETS}[name]))
        return str(place)

    return written


def built(target: str, **speculative: Any) -> Any:
    """The configuration of an engine."""
    return EngineArgs(model=target, speculative_config=speculative, **COMMON).create_engine_config()


def stock_family(target: str, method: str, **speculative: Any) -> str | None:
    """What stock's own method makes of a pair; None where it refuses it."""
    try:
        config = built(target, method=method, **speculative)
    except Exception:
        return None
    family: str = config.speculative_config.method
    return family


def assert_one_sentence(error: BaseException) -> None:
    assert "\n" not in str(error)
    assert str(error).endswith(".")


def assert_refused(target: str, folder: Folder, **draft: Any) -> None:
    """What stock refuses is refused in one sentence, or with the target, which has nothing to do with drafting."""
    try:
        EngineArgs(model=folder(target), **COMMON).create_engine_config()
    except Exception:
        pytest.skip("this vLLM cannot make a configuration of the target")
    with pytest.raises(EagleMRV2Error) as refused:
        built(folder(target), method="eagle_mrv2", **draft)
    assert_one_sentence(refused.value)


def test_the_whole_catalog_is_sorted() -> None:
    assert set(PAIRS) | set(OTHER_KINDS) == set(HEADS)


@pytest.mark.parametrize("head", PAIRS)
def test_family(head: str, folder: Folder) -> None:
    assert detect_family(folder(head), "target") == PAIRS[head][0]


@pytest.mark.parametrize("head", OTHER_KINDS)
@pytest.mark.parametrize("forced", ["", ":eagle", ":eagle3", ":mtp"])
def test_a_draft_of_another_kind(head: str, forced: str, folder: Folder) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        built(folder(QWEN3), method=f"eagle_mrv2{forced}", model=folder(head), num_speculative_tokens=3)
    assert OTHER_KINDS[head] in str(refused.value)
    assert_one_sentence(refused.value)


@pytest.mark.parametrize("head", PAIRS)
def test_a_pair_beside_stock(head: str, folder: Folder) -> None:
    family, target = PAIRS[head]
    draft = {"model": folder(head), "num_speculative_tokens": 3}
    stock = stock_family(folder(target), family, **draft)
    if stock is None:
        assert_refused(target, folder, **draft)
        return
    config = built(folder(target), method="eagle_mrv2", **draft)
    assert config.speculative_config.method == stock == family
    settings = settings_of(config.speculative_config)
    assert settings is not None
    assert settings.family == family


@pytest.mark.parametrize("target", TARGETS)
def test_mtp_inside_a_target_beside_stock(target: str, folder: Folder) -> None:
    """The draft is not named, or it is the target's own name."""
    if stock_family(folder(target), "mtp", num_speculative_tokens=1) == "mtp":
        for draft in ({}, {"model": folder(target)}):
            config = built(folder(target), method="eagle_mrv2", num_speculative_tokens=1, **draft)
            settings = settings_of(config.speculative_config)
            assert settings is not None
            assert settings.family == "mtp"
        assert detect_family(folder(target), "another/copy") == "mtp"
        return
    assert_refused(target, folder, num_speculative_tokens=1)


@pytest.mark.parametrize("target", [DEEPSEEK, "XiaomiMiMo/MiMo-7B-RL-qwen2type", "zai-org/GLM-4.5-Air"])
def test_a_target_with_mtp(target: str, folder: Folder) -> None:
    """On every release, so that the test above is about something."""
    assert detect_family(None, folder(target)) == "mtp"


@pytest.mark.parametrize("target", [LLAMA_3, QWEN3, GPT_OSS, KIMI])
def test_a_target_without_mtp(target: str, folder: Folder) -> None:
    with pytest.raises(EagleMRV2Error, match="has no MTP layers"):
        detect_family(None, folder(target))
    with pytest.raises(EagleMRV2Error, match="is a whole model and no EAGLE or MTP head"):
        detect_family(folder(target), folder(LLAMA_31))


@pytest.mark.parametrize(("head", "target", "says"), MISFITS)
def test_a_head_of_another_target(head: str, target: str, says: str, folder: Folder) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        built(folder(target), method="eagle_mrv2", model=folder(head), num_speculative_tokens=3)
    assert says in str(refused.value)
    assert str(refused.value).endswith("give the head of this target.")
    assert_one_sentence(refused.value)
