"""What Model Runner V2 does not serve: refused before the model loads in a sentence that blames our method."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.cli.doctor.recorded import recorded
from vllm_eagle_mrv2.config.method import settings_of
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases.v2_limits import LIMITS, check, limits_of, listed_by_vllm

from .test_doctor import run_json
from .test_engine_args import ask, fresh, models, refused  # noqa: F401  (fixtures)

pytest.importorskip("vllm")

from vllm.config.vllm import VllmConfig

OTHER_METHODS = ("speculative method", "ngram", "heterogeneous-vocabulary draft models")


def in_force(version: Version | None = None) -> set[str]:
    return {limit.what for limit in limits_of(version or releases.installed_version())}


def vllms_words() -> set[str]:
    """All that the installed vLLM can say it does not serve, read from the source of the functions that say it."""
    names = ("_validate_v2_model_runner", "_get_v2_model_runner_unsupported_features", "_get_dbo_unsupported_features")
    words = set()
    for name in names:
        function = getattr(VllmConfig, name, None)
        function = getattr(function, "_eagle_mrv2_original", function)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))) if function else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "unsupported.append":
                (said,) = node.args
                words.add(str(said.value if isinstance(said, ast.Constant) else said.values[0].value))  # type: ignore[attr-defined]
    return {word for word in words if not word.startswith(OTHER_METHODS)}


def test_the_table_has_words_for_all_that_vllm_lists() -> None:
    limits = [limit for limit in limits_of(releases.installed_version()) if limit.vllm]
    words = vllms_words()
    assert words
    assert [word for word in words if not any(word.startswith(limit.vllm.rstrip("'")) for limit in limits)] == []


def test_what_vllm_does_not_list_is_asked_by_us() -> None:
    """A limit that the installed vLLM does not list would be in the table in vain without a question of our own."""
    for limit in limits_of(releases.installed_version()):
        if limit.vllm and not any(word.startswith(limit.vllm) for word in vllms_words()):
            assert limit.asked is not None, limit.what


def test_every_limit_is_in_force_somewhere() -> None:
    versions = [Version(f"{series}.0") for each in releases.all_releases() for series in each.series]
    assert {limit.what for limit in LIMITS} == set().union(*map(in_force, versions))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"ubatch_size": 2}, "dual batch overlap and micro-batches"),
        ({"enable_prompt_embeds": True}, "prompt embeddings (--enable-prompt-embeds)"),
        ({"logits_processors": ["module:Class"]}, "custom logits processors"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode raw_logits"),
        ({"compilation_config": {"mode": 1}, "enforce_eager": False}, "compilation mode STOCK_TORCH_COMPILE"),
    ],
)
def test_an_engine_is_refused_where_the_release_lacks_it_and_nowhere_else(
    arguments: dict[str, Any],
    what: str,
    models: dict[str, str],  # noqa: F811
) -> None:
    engine = ask(models, **arguments)
    if any(known.startswith(what) and not known.endswith("V1") for known in in_force()):
        message = refused(engine)
        assert message.startswith("method=eagle_mrv2 runs on Model Runner V2, which on vLLM ")
        assert what in message
        assert "use method=eagle, with which vLLM chooses the model runner itself" in message
        assert "VLLM_USE_V2_MODEL_RUNNER" not in message
    else:
        assert settings_of(engine.create_engine_config().speculative_config) is not None


@pytest.mark.parametrize(
    ("hybrid", "schedule", "refused"),
    [
        (True, [(1, 4, 3), (5, 8, 0)], True),
        (True, [(1, 4, 3), (5, 8, 1)], False),
        (True, None, False),
        (False, [(1, 8, 0)], False),
    ],
)
def test_a_hybrid_that_drafts_nothing_for_a_while(
    hybrid: bool, schedule: list[tuple[int, int, int]] | None, refused: bool
) -> None:
    (limit,) = (limit for limit in LIMITS if limit.what == "0 draft tokens of a schedule with hybrid models")
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid),
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=schedule),
    )
    assert limit.asked is not None
    assert limit.asked(config) is refused


def test_an_engine_of_pipeline_stages(models: dict[str, str]) -> None:  # noqa: F811
    message = refused(ask(models, pipeline_parallel_size=2, async_scheduling=False))
    older = releases.installed_version() < Version("0.30")  # vLLM itself says it of this head there
    assert ("Pipeline parallelism is not supported" if older else "without asynchronous scheduling") in message


@pytest.mark.parametrize(
    ("release", "stages", "asynchronous", "refused"),
    [
        ("0.20.2", 1, False, None),
        ("0.29.0", 2, True, "drafting with pipeline_parallel_size above 1"),
        ("0.30.0", 2, True, None),
        ("0.33.0", 2, False, "pipeline parallelism without asynchronous scheduling"),
        ("0.33.0", 1, False, None),
    ],
)
def test_pipeline_stages(release: str, stages: int, asynchronous: bool, refused: str | None) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, distributed_executor_backend="mp"),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    limits = [limit for limit in limits_of(Version(release)) if "pipeline" in limit.what and limit.asked]
    assert [limit.what for limit in limits if limit.asked and limit.asked(config)] == ([refused] if refused else [])


@pytest.mark.parametrize("release", ["0.25.1", "0.26.0"])
@pytest.mark.parametrize(("hybrid", "cached"), [(True, True), (True, False), (False, True)])
def test_a_hybrid_whose_prefixes_are_cached(release: str, hybrid: bool, cached: bool) -> None:
    what = "prefix caching of hybrid and Mamba models (on by default: --no-enable-prefix-caching)"
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=hybrid), cache_config=SimpleNamespace(enable_prefix_caching=cached)
    )
    limits = [limit for limit in limits_of(Version(release)) if limit.what == what]
    asked = [limit.asked(config) for limit in limits if limit.asked is not None]
    assert any(asked) is (hybrid and cached and release == "0.25.1")


def test_the_stock_method_has_vllms_own_error(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    speculative = {"method": "eagle", "model": models["head"], "num_speculative_tokens": 3, "parallel_drafting": True}
    with pytest.raises(ValueError, match="not yet support: parallel drafting") as error:
        ask(models, speculative_config=speculative).create_engine_config()
    assert "eagle_mrv2" not in str(error.value)


def test_a_feature_that_vllm_lists_and_we_do_not_know(monkeypatch: pytest.MonkeyPatch, models: dict[str, str]) -> None:  # noqa: F811
    if not hasattr(VllmConfig, "_get_v2_model_runner_unsupported_features"):
        pytest.skip("this release has no such list")
    monkeypatch.setattr(VllmConfig, "_get_v2_model_runner_unsupported_features", lambda self: ["time travel"])
    assert "does not support time travel; do without" in refused(ask(models))


def test_the_words_of_0_20_are_in_its_error() -> None:
    def validate(config: object) -> None:
        raise ValueError("VLLM_USE_V2_MODEL_RUNNER does not yet support: hybrid/mamba models, EC transfer")

    assert listed_by_vllm(validate, SimpleNamespace()) == ["hybrid/mamba models", "EC transfer"]
    assert listed_by_vllm(lambda config: None, SimpleNamespace()) == []


@pytest.mark.parametrize(
    ("release", "listed", "what"),
    [
        ("0.20.2", ["hybrid/mamba models"], "hybrid and Mamba models;"),
        ("0.24.0", ["hybrid/mamba models with align cache mode"], "prefix caching of hybrid and Mamba models"),
        ("0.22.1", ["reasoning budget enforcement"], "thinking budgets"),
        ("0.25.1", ["logprobs mode 'raw_logits'", "EC transfer"], "processed_logits, nor encoder-cache transfer"),
        ("0.31.0", ["dual batch overlap with LoRA", "dual batch overlap with speculative decoding"], "micro-batches"),
    ],
)
def test_vllms_words_become_ours(
    release: str,
    listed: list[str],
    what: str,
    models: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ask(models).create_engine_config()
    off_the_cpu(monkeypatch)
    with pytest.raises(EagleMRV2Error, match=f"^method=eagle_mrv2 .* on vLLM {release} does not support .*{what}"):
        check(config, listed, Version(release))
    assert check(config, [], Version(release)) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        ({"logprobs_mode": "processed_logits"}, "logprobs_mode"),
    ],
)
def test_0_20_is_asked_by_us(
    arguments: dict[str, Any],
    what: str,
    models: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.20's own list lacks these; its worker raises, or its outputs are silently others."""
    config = ask(models, method="eagle", **arguments).create_engine_config()
    off_the_cpu(monkeypatch)
    with pytest.raises(EagleMRV2Error, match=what):
        check(config, [], Version("0.20.2"))


def test_a_mode_of_compilation_on_0_20(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    config = ask(models, method="eagle").create_engine_config()
    off_the_cpu(monkeypatch)
    modes = type(config.compilation_config.mode)
    config.compilation_config.mode = modes.STOCK_TORCH_COMPILE
    with pytest.raises(EagleMRV2Error, match="STOCK_TORCH_COMPILE"):
        check(config, [], Version("0.20.2"))


def test_shared_kv_caches_on_0_20(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    config = ask(models).create_engine_config()
    off_the_cpu(monkeypatch)
    assert check(config, [], Version("0.20.2")) == []
    config.model_config.hf_text_config.num_kv_shared_layers = 2
    with pytest.raises(EagleMRV2Error, match="share KV caches"):
        check(config, [], Version("0.20.2"))
    assert check(config, [], Version("0.22.1")) == []


def test_cpus(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from vllm.platforms import current_platform

    config = ask(models).create_engine_config()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    with pytest.raises(EagleMRV2Error, match="CPUs"):
        check(config, [], Version("0.22.1"))
    assert check(config, [], Version("0.23.0")) == []


def test_thinking_budgets_of_requests_are_a_warning(
    models: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ask(models).create_engine_config()
    off_the_cpu(monkeypatch)
    config.reasoning_config = SimpleNamespace()
    (warning,) = check(config, [], Version("0.26.0"))
    assert "does not support thinking_token_budget in requests." in warning
    assert check(config, [], Version("0.28.0")) == []


def off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


# In the doctor's report


@pytest.mark.parametrize(
    ("what", "lacking"),
    [
        ("hybrid and Mamba models", "0.20.2 0.22.1"),
        ("prompt embeddings (--enable-prompt-embeds)", "0.20.2 0.22.1 0.23.0 0.24.0 0.25.1 0.26.0 0.27.1 0.28.0"),
        ("custom logits processors written for Model Runner V1", "0.31.0 0.32.0 0.33.0"),
        ("thinking_token_budget in requests", "0.20.2 0.23.0 0.24.0 0.25.1 0.26.0 0.27.1"),
        (
            "drafting with pipeline_parallel_size above 1",
            "0.20.2 0.22.1 0.23.0 0.24.0 0.25.1 0.26.0 0.27.1 0.28.0 0.29.0",
        ),
    ],
)
def test_the_doctor_lists_it_by_release(what: str, lacking: str) -> None:
    surfaces = list(recorded())
    listed = {release: run_json("--surface", release)["unsupported"] for release in surfaces}
    assert {release for release in surfaces if what in listed[release]} == set(lacking.split())
    assert all(len(set(phrases)) == len(phrases) for phrases in listed.values())
