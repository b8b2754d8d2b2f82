"""``vllm-eagle-mrv2 doctor --model``: one deployment, by the functions that the engine asks, in the same words."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.cli.doctor import preflight
from vllm_eagle_mrv2.releases.draft_paths import draft_paths

from .test_doctor import module as doctor
from .test_doctor import run, run_json
from .test_engine_args import LLAMA, ask, fresh, models, refused  # noqa: F401  (fixtures)

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The symbols of the installed vLLM are not what these tests are about."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(doctor, "check_installed", lambda needed: [])


def look_at(target: str, draft: str | None = None, *more: str) -> dict[str, Any]:
    head = () if draft is None else ("--draft", draft)
    report = run_json("--model", target, *head, *more)
    assert report["accepted"] == (report["exit_code"] == 0)
    assert report["reason"] == (report["problems"][0] if report["problems"] else None)
    return report


@pytest.mark.parametrize(("head", "family"), [("head", "eagle"), ("head3", "eagle3")])
def test_a_deployment_that_will_run(head: str, family: str, models: dict[str, str]) -> None:  # noqa: F811
    report = look_at(models["target"], models[head], "-k", "2", "--max-num-seqs", "8")
    assert report["problems"] == []
    assert report["family"] == family
    deployment = report["deployment"]
    assert (deployment["target"], deployment["draft"]) == (models["target"], models[head])
    assert deployment["checked"] == "engine"
    assert (deployment["num_speculative_tokens"], deployment["max_num_seqs"]) == (2, 8)
    assert deployment["draft_logits_bytes"] == 0
    assert {"backends": "FlashAttention, Triton attention", "path": "one graph"} in deployment["paths"]
    assert deployment["own_kernels"] is True


def test_memory_of_draft_logits(models: dict[str, str]) -> None:  # noqa: F811
    report = look_at(models["target"], models["head"], "-k", "2", "--max-num-seqs", "8", "--probabilistic")
    assert report["deployment"]["draft_logits_bytes"] == 8 * 2 * LLAMA["vocab_size"] * 4


def test_vllms_own_number_of_requests(models: dict[str, str]) -> None:  # noqa: F811
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    served = EngineArgs(model=models["target"], skip_tokenizer_init=True, load_format="dummy")
    expected = served.create_engine_config(UsageContext.OPENAI_API_SERVER).scheduler_config.max_num_seqs
    assert look_at(models["target"], models["head"])["deployment"]["max_num_seqs"] == expected


def test_refused_in_the_words_of_the_engine(models: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, "hidden_size": 32}))
    report = look_at(models["target"], str(tmp_path))
    assert report["exit_code"] == 1
    assert report["reason"] == refused(ask({**models, "head": str(tmp_path)}))
    assert report["family"] == "eagle"
    assert report["deployment"]["checked"] == "nothing"


@pytest.mark.parametrize("draft", [None, "no/such/folder"])
def test_no_head(draft: str | None, models: dict[str, str]) -> None:  # noqa: F811
    report = look_at(models["target"], draft)
    assert report["exit_code"] == 1
    assert report["family"] is None
    assert ("has no MTP layers" if draft is None else "no/such/folder cannot be read") in report["reason"]


def test_the_report_for_a_person(models: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    code, output = run("--model", models["target"], "--draft", models["head"], "--max-num-seqs", "4", "--probabilistic")
    assert code == 0
    assert f"deployment: {models['target']} with {models['head']}, K=3" in output
    assert "family: eagle" in output
    assert "looked at: the configuration of the whole engine" in output
    assert "draft logits: 0.0 MiB a rank at max_num_seqs=4" in output
    assert "OK: eagle_mrv2 drafts as eagle" in output
    code, output = run("--model", models["target"], "--draft", str(tmp_path))
    assert code == 1
    assert "FAILED: eagle_mrv2 will not draft" in output


# Where vLLM makes no configuration of the engine


def no_kernels(arguments: Any) -> Any:
    raise RuntimeError("no kernels for FP8 here\nand more")


@pytest.mark.parametrize(("sampled", "size"), [((), 0), (("--probabilistic",), 8 * 3 * LLAMA["vocab_size"] * 4)])
def test_a_target_that_is_not_for_this_machine(
    sampled: tuple[str, ...],
    size: int,
    models: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_engine_config", no_kernels)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda_alike", lambda: False)
    report = look_at(models["target"], models["head3"], "--max-num-seqs", "8", *sampled)
    assert report["accepted"] is True
    assert report["family"] == "eagle3"
    assert report["deployment"]["checked"] == "models"
    assert report["deployment"]["draft_logits_bytes"] == size
    assert (
        "on this machine (no kernels for FP8 here), so only the configurations of target and draft were looked at."
        in report["notes"][-1]
    )
    assert "the configuration of none cannot be read" in look_at(models["target"], "none")["reason"]
    assert look_at("none", models["head3"])["accepted"] is False


def test_a_target_that_a_gpu_does_not_serve(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(preflight, "_engine_config", no_kernels)
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda_alike", lambda: True)
    report = look_at(models["target"], models["head"])
    assert report["reason"] == f"vLLM does not serve {models['target']} here: no kernels for FP8 here."
    assert report["family"] == "eagle"


def test_a_draft_that_vllm_refuses(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def only_the_target(arguments: Any) -> Any:
        if arguments.speculative_config is not None:
            no_kernels(arguments)

    monkeypatch.setattr(preflight, "_engine_config", only_the_target)
    assert look_at(models["target"], models["head"])["reason"] == "vLLM refuses this draft: no kernels for FP8 here."


def test_what_forbids_every_deployment(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    report = look_at(models["target"], models["head"])
    assert "VLLM_PLUGINS=lora keeps vLLM from loading this plugin" in report["reason"]
    assert report["deployment"]["checked"] == "nothing"


@pytest.mark.parametrize(
    "arguments",
    [("--draft", "x"), ("--probabilistic",), ("--model", "x", "--surface", "0.32.0"), ("--model", "x", "-k", "0")],
)
def test_options_that_do_not_go_together(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2


# The paths


def paths(version: str, *architectures: str, mla: bool = False) -> dict[str, str]:
    draft = SimpleNamespace(use_mla=mla, architectures=architectures)
    return {path.backends: path.path for path in draft_paths(draft, Version(version))}


def test_the_paths_of_a_draft() -> None:
    llama, other = paths("0.26.0", "EagleLlamaForCausalLM"), paths("0.26.0", "EagleDeepSeekMTPModel")
    assert llama["FlashAttention, Triton attention"] == other["FlashAttention, Triton attention"] == "one graph"
    assert llama["FlashInfer, where its decodes need a plan"] == "fused decodes"
    assert other["FlashInfer, where its decodes need a plan"] == "by steps"
    assert paths("0.26.0", "DeepSeekMTPModel", mla=True) == {"MLA backends": "by steps"}
    assert paths("0.29.0", "DeepSeekMTPModel", mla=True) == {
        "Triton MLA": "one graph",
        "other MLA backends": "by steps",
    }


def test_the_backends_of_the_installed_vllm() -> None:
    """Which builders have a refresh that a graph can hold, as the table of paths has it."""
    import inspect

    if releases.installed_version() < Version("0.28"):
        pytest.skip("there is no such refresh")
    from vllm.v1.attention import backend

    named = "update_draft_decode_metadata"
    assert hasattr(backend.AttentionMetadataBuilder, named)
    backends = {"Triton MLA": "mla.triton_mla", "sparse MLA with FlashAttention": "mla.flashattn_mla_sparse"}
    listed = ", ".join(paths(str(releases.installed_version()), "DeepSeekMTPModel", mla=True))
    for name, module in backends.items():
        source = inspect.getsource(importlib.import_module(f"vllm.v1.attention.backends.{module}"))
        assert (named in source) == (name in listed), name
