"""The patches in the installed vLLM, from a user's configuration to the speculator's class; no engine is started."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file

from vllm_eagle_mrv2 import patches, releases
from vllm_eagle_mrv2.config import one_model
from vllm_eagle_mrv2.config.behaviours import SWITCHES, Behaviour
from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.engine_arguments import check_lookup, check_translated
from vllm_eagle_mrv2.config.families import Family
from vllm_eagle_mrv2.config.method import MARKER, Settings, settings_of
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches import engine_args, metrics
from vllm_eagle_mrv2.patches.wrap import wrap
from vllm_eagle_mrv2.plugin import register
from vllm_eagle_mrv2.releases import v0_20, v0_32, v2_limits
from vllm_eagle_mrv2.releases.spec import ALWAYS_OURS, Release

pytest.importorskip("vllm")
register()

import vllm  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.config import ModelConfig  # noqa: E402
from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.config.speculative import SpeculativeConfig  # noqa: E402
from vllm.config.vllm import VllmConfig  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "target": LLAMA,
    "head": {**LLAMA, "num_hidden_layers": 1},
    "mtp": {
        **LLAMA,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_nextn_predict_layers": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "head_dim": 32,
    },
    "head3": {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 64},
}


V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A clean environment, and a look at the installed vLLM that is not remembered from another test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    # Set before it is deleted, so that what the package leaves in it is gone after the test.
    monkeypatch.setenv(V2_VARIABLE, "")
    monkeypatch.delenv(V2_VARIABLE)
    cached = releases.installed_release
    cached.cache_clear()
    yield
    cached.cache_clear()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with nothing but a config.json each."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CHECKPOINTS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return {name: str(root / name) for name in CHECKPOINTS}


COMMON = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
}


def ask(models: dict[str, str], method: str = "eagle_mrv2", head: str = "head", **more: Any) -> EngineArgs:
    speculative = {"method": method, "model": models[head], "num_speculative_tokens": 3}
    return EngineArgs(**{"model": models["target"], **COMMON, "speculative_config": speculative, **more})


def settings_in(config: VllmConfig) -> Settings | None:
    return settings_of(config.speculative_config)


# The configuration


@pytest.mark.parametrize(
    ("method", "head", "family"),
    [
        ("eagle_mrv2", "head", "eagle"),
        ("eagle_mrv2", "head3", "eagle3"),
        ("eagle_mrv2:eagle3", "head", "eagle3"),
    ],
)
def test_the_method_becomes_the_stock_one_with_a_marker(
    method: str, head: str, family: Family, models: dict[str, str]
) -> None:
    config = ask(models, method, head).create_engine_config()
    assert config.speculative_config.method == family
    assert config.speculative_config.num_speculative_tokens == 3
    assert settings_in(config) == Settings(family, Options())


def test_options_reach_the_marker(models: dict[str, str]) -> None:
    options = {"disable": ["full_decode_only"], "draft_quantization": "fp8"}
    settings = settings_in(ask(models, additional_config={"eagle_mrv2": options}).create_engine_config())
    assert settings is not None
    assert settings.options == Options.model_validate(options)


def captured(
    models: dict[str, str],
    method: str = "eagle_mrv2",
    sizes: list[int] | None = None,
    most: int | None = None,
    **given: Any,
) -> list[int]:
    """What vLLM would capture on a GPU, given ``cudagraph_capture_sizes`` or ``max_cudagraph_capture_size``."""
    return captured_with(ask(models, method, **given).create_engine_config(), sizes, most)


def captured_with(config: Any, sizes: list[int] | None = None, most: int | None = None) -> list[int]:
    compilation = config.compilation_config
    config.model_config.enforce_eager = False
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, most
    config._set_cudagraph_sizes()
    assert compilation.max_cudagraph_capture_size == compilation.cudagraph_capture_sizes[-1]
    return list(compilation.cudagraph_capture_sizes)


@pytest.mark.parametrize("most_requests", [1, 7, 256])
def test_batches_with_prefills_are_captured(most_requests: int, models: dict[str, str]) -> None:
    """vLLM's own choice of sizes stays, and is gone on with, in steps of 16 but not by multiples of 16."""
    for budget, largest in ((8192, 2048), (2048, 2048), (1000, 1000), (640, 640)):
        given: dict[str, Any] = {"max_num_seqs": most_requests, "max_num_batched_tokens": budget}
        stocks, ours = captured(models, "eagle", **given), captured(models, **given)
        assert ours[: len(stocks)] == stocks
        assert stocks[-1] <= 512
        assert ours[-1] == largest
        assert all(0 < size - before <= 16 for before, size in pairwise(ours))
        assert not [size for size in ours[len(stocks) : -1] if size % 16 == 0]


@pytest.mark.parametrize("sizes", [None, [1, 2, 4]])
def test_the_workers_know_what_vllm_would_capture(sizes: list[int] | None, models: dict[str, str]) -> None:
    given: dict[str, Any] = {"max_num_seqs": 7, "max_num_batched_tokens": 8192}
    config = ask(models, **given).create_engine_config()
    captured_with(config, sizes)
    settings = settings_of(config.speculative_config)
    assert settings is not None
    assert settings.vllm_largest == (0 if sizes else captured(models, "eagle", **given)[-1])


def test_captured_sizes_that_the_user_gives_stay(models: dict[str, str]) -> None:
    given: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    assert captured(models, sizes=[1, 2, 4], **given) == [1, 2, 4]
    assert captured(models, most=64, **given) == captured(models, "eagle", most=64, **given)
    assert captured(models, most=64, **given)[-1] == 64


def test_latent_attention_keeps_vllms_sizes(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
    config = ask(models, **given).create_engine_config()
    monkeypatch.setattr(ModelConfig, "use_mla", True)
    assert captured_with(config) == captured(models, "eagle", **given)


def test_ranks_that_share_out_tokens_can_share_those_of_every_size(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ask(models, max_num_seqs=256, max_num_batched_tokens=1000).create_engine_config()
    monkeypatch.setattr(config.compilation_config.pass_config, "enable_sp", True, raising=False)  # gone from 0.32 on
    sizes = captured_with(config)
    assert sizes[-1] == 992
    assert not [size for size in sizes if size > 16 and size % 8]


def test_of_a_small_budget_of_tokens_the_whole_is_captured(models: dict[str, str]) -> None:
    given: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 500}
    assert captured(models, **given) == sorted({*captured(models, "eagle", **given), 500})


def test_an_eager_draft_reaches_the_marker_where_the_user_asked(models: dict[str, str]) -> None:
    """These engines are eager, and vLLM makes their drafts eager as well; that is not the user's word for the draft."""
    arguments = ask(models)
    assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options())
    arguments = ask(models)
    arguments.speculative_config["enforce_eager"] = True
    assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options(), enforce_eager=True)


def test_compiled_models_are_cached_apart_from_stocks(models: dict[str, str]) -> None:
    given: dict[str, Any] = {"eagle_mrv2": {"disable": ["row_products"]}}
    engines = [ask(models, "eagle"), ask(models), ask(models, additional_config=given)]
    assert len({arguments.create_engine_config().compute_hash() for arguments in engines}) == 3
    other = {"of somebody else": 1}
    named = ask(models, additional_config=other).create_engine_config().additional_config
    assert named == other | {"eagle_mrv2": {}, "eagle_mrv2_draft": named["eagle_mrv2_draft"]}
    assert other == {"of somebody else": 1}
    assert ask(models, "eagle").create_engine_config().additional_config == {}


def test_compiled_models_are_cached_apart_from_another_versions(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose operators may take other arguments."""
    before = ask(models).create_engine_config().compute_hash()
    monkeypatch.setattr("vllm_eagle_mrv2.config.cache_names.__version__", "99.0")
    assert ask(models).create_engine_config().compute_hash() != before


def test_the_marker_survives_the_way_into_a_worker(models: dict[str, str]) -> None:
    config = ask(models).create_engine_config()
    assert b"sent_settings" in pickle.dumps(config)  # and brings the check of the workers
    for arrived in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert settings_in(arrived) == settings_in(config) != None  # noqa: E711
        assert arrived.use_v2_model_runner is True


def test_the_same_arguments_can_be_used_twice(models: dict[str, str]) -> None:
    arguments = ask(models)
    first, second = arguments.create_engine_config(), arguments.create_engine_config()
    assert settings_in(first) == settings_in(second) == Settings("eagle", Options())


def test_the_users_dictionary_is_not_changed(models: dict[str, str]) -> None:
    arguments = ask(models)
    given = arguments.speculative_config
    kept = dict(given)
    arguments.create_engine_config()
    assert given == kept


@pytest.mark.parametrize("speculative", [None, "eagle"])
def test_what_did_not_ask_is_stock(speculative: str | None, models: dict[str, str]) -> None:
    arguments = ask(models, "eagle") if speculative else ask(models, speculative_config=None)
    assert settings_in(arguments.create_engine_config()) is None


def test_stock_arguments_after_ours_are_stock(models: dict[str, str]) -> None:
    assert settings_in(ask(models).create_engine_config()) is not None
    assert settings_in(ask(models, "eagle").create_engine_config()) is None


def test_arguments_turned_stock_are_stock(models: dict[str, str]) -> None:
    arguments = ask(models)
    arguments.create_engine_config()
    arguments.speculative_config = ask(models, "eagle").speculative_config
    assert settings_in(arguments.create_engine_config()) is None


def test_arguments_copied_after_use_are_still_ours(models: dict[str, str]) -> None:
    arguments = ask(models)
    arguments.create_engine_config()
    assert settings_in(dataclasses.replace(arguments).create_engine_config()) == Settings("eagle", Options())


@pytest.mark.parametrize("trimmed", [False, True])
def test_used_arguments_as_a_dictionary(trimmed: bool, models: dict[str, str], tmp_path: Path) -> None:
    """`dataclasses.asdict` takes the settings apart."""
    options: dict[str, Any] = {"disable": ["full_decode_only"]}
    if trimmed:
        (tmp_path / "ranking.json").write_text('{"tokens": [5, 3, 1]}')
        options["draft_vocab"] = {"size": 2, "ranking": str(tmp_path / "ranking.json")}
    arguments = ask(models, additional_config={"eagle_mrv2": options})
    settings = settings_in(arguments.create_engine_config())
    taken_apart = dataclasses.asdict(arguments)["speculative_config"]
    again = dataclasses.replace(arguments, speculative_config=taken_apart)
    assert settings_in(again.create_engine_config()) == settings != None  # noqa: E711


def used(arguments: EngineArgs) -> EngineArgs:
    assert settings_in(arguments.create_engine_config()) is not None
    return arguments


@pytest.mark.parametrize(
    ("speculative", "watermark", "sentence"),
    [
        ({"enable_adaptive_verification": True}, None, "enable_adaptive_verification judges a draft"),
        ({"rejection_sample_method": "fly"}, None, "fly keeps drafts that the target would not choose"),
        ({"rejection_sample_method": "standard"}, None, None),
        ({}, {"allow_target_only_watermarking": False}, "drafts that lookup_drafts finds carry no watermark"),
        ({}, {"allow_target_only_watermarking": True}, None),
        ({}, None, None),
    ],
)
def test_what_excludes_lookup_drafts(
    speculative: dict[str, Any], watermark: dict[str, Any] | None, sentence: str | None
) -> None:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(**speculative),
        watermark_config=None if watermark is None else SimpleNamespace(**watermark),
    )
    check_lookup(config, Settings("eagle", Options()))
    with nullcontext() if sentence is None else pytest.raises(EagleMRV2Error, match=sentence):
        check_lookup(config, Settings("eagle", Options(lookup_drafts=True)))


@pytest.mark.parametrize("headless", [False, True])
def test_metrics_are_offered_where_somebody_shows_them(
    headless: bool, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[VllmConfig] = []
    monkeypatch.setattr(metrics, "offer", lambda config, settings: offered.append(config))
    config = ask(models).create_engine_config(headless=headless)
    assert offered == ([] if headless else [config])


@pytest.mark.parametrize(("first", "second"), [("head", "head3"), ("head3", "head")])
def test_arguments_used_again_take_another_draft(first: str, second: str, models: dict[str, str]) -> None:
    arguments = used(ask(models, head=first))
    arguments.speculative_config["model"] = models[second]
    family: Family = "eagle3" if second == "head3" else "eagle"
    assert settings_in(arguments.create_engine_config()) == Settings(family, Options())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, dataclasses.replace])
def test_the_request_rides_in_the_dictionary(copied: Callable[[Any], Any], models: dict[str, str]) -> None:
    """It is in nothing else of the arguments, so whatever takes the dictionary along takes the settings along."""
    options = {"disable": ["full_decode_only"]}
    arguments = used(ask(models, "eagle_mrv2:eagle", additional_config={"eagle_mrv2": options}))
    settings = Settings("eagle", Options.model_validate(options))
    assert arguments.speculative_config[MARKER] == settings
    assert set(vars(arguments)) == set(vars(ask(models, "eagle")))

    copy_of_it = copied(arguments)
    for each in (copy_of_it, arguments, copy_of_it):
        assert settings_in(each.create_engine_config()) == settings
        assert each.speculative_config[MARKER] == settings


@pytest.mark.parametrize("more", [{}, {"num_speculative_tokens": 2}])
def test_a_copy_turned_stock_is_stock_and_the_other_still_ours(more: dict[str, Any], models: dict[str, str]) -> None:
    arguments = used(ask(models))
    stock = {**ask(models, "eagle").speculative_config, **more}
    turned = dataclasses.replace(arguments, speculative_config=stock)
    config = turned.create_engine_config()
    assert settings_in(config) is None
    assert config.speculative_config.method == "eagle"
    assert MARKER not in turned.speculative_config
    without = dataclasses.replace(arguments, speculative_config=None).create_engine_config()
    assert without.speculative_config is None
    assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options())


def test_used_arguments_take_another_request(models: dict[str, str]) -> None:
    arguments = used(ask(models))
    arguments.speculative_config = ask(models, head="head3").speculative_config
    assert settings_in(arguments.create_engine_config()) == Settings("eagle3", Options())


def test_stock_arguments_turned_ours_are_ours(models: dict[str, str]) -> None:
    arguments = ask(models, "eagle")
    assert settings_in(arguments.create_engine_config()) is None
    arguments.speculative_config["method"] = "eagle_mrv2"
    assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options())


def test_arguments_that_vllm_refused_once_are_still_ours(models: dict[str, str]) -> None:
    arguments = ask(models)
    arguments.speculative_config["no_such_field"] = 1
    with pytest.raises(ValueError, match="no_such_field"):
        arguments.create_engine_config()
    del arguments.speculative_config["no_such_field"]
    assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options())


def test_model_runner_v2_is_chosen_for_us_and_for_nobody_else(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, stock = ask(models).create_engine_config(), ask(models, "eagle").create_engine_config()
    for forced, stock_uses_it in (("0", False), ("1", True)):
        monkeypatch.setenv(V2_VARIABLE, forced)
        assert ours.use_v2_model_runner is True
        assert stock.use_v2_model_runner is stock_uses_it


def on_release(adapter: Release, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the package take the installed vLLM for another release, and a CPU for a GPU."""
    monkeypatch.setattr(v2_limits, "LIMITS", [limit for limit in v2_limits.LIMITS if limit.what != "CPUs"])
    monkeypatch.setattr(releases, "installed_release", lambda: adapter)
    monkeypatch.setattr(releases, "installed_version", lambda: Version(release))


class TestV2ByEnvironment:
    """A release that selects Model Runner V2 by its environment variable and by nothing else."""

    @pytest.fixture(autouse=True)
    def old_release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        on_release(v0_20.RELEASE, "0.20.2", monkeypatch)

    def test_set_for_ours_and_unset_for_the_next(self, models: dict[str, str]) -> None:
        for _ in range(2):
            assert settings_in(ask(models).create_engine_config()) is not None
            assert os.environ[V2_VARIABLE] == "01"
            assert int(os.environ[V2_VARIABLE]) == 1  # as vLLM reads it
        for stock in (ask(models, "eagle"), ask(models, speculative_config=None)):
            assert settings_in(stock.create_engine_config()) is None
            assert V2_VARIABLE not in os.environ

    def test_seen_where_an_engine_has_vllm_keep_what_it_read(self, models: dict[str, str]) -> None:
        """As every engine core does when it is ready."""
        envs.enable_envs_cache()
        try:
            for method, chosen in (("eagle", False), ("eagle_mrv2", True), ("eagle", False)):
                ask(models, method).create_engine_config()
                assert bool(envs.VLLM_USE_V2_MODEL_RUNNER) is chosen
        finally:
            envs.disable_envs_cache()

    def test_set_for_arguments_that_are_used_again(self, models: dict[str, str]) -> None:
        arguments = used(ask(models))
        ask(models, "eagle").create_engine_config()
        assert V2_VARIABLE not in os.environ
        used(arguments)
        assert os.environ[V2_VARIABLE] == "01"

    def test_set_before_vllm_looks_at_it(self) -> None:
        seen = []
        arguments = engine_that_reads(SimpleNamespace(method="mtp", model="deepseek"))
        stock = type(arguments).create_speculative_config

        def look(self: Any) -> Any:
            seen.append(os.environ.get(V2_VARIABLE))
            return stock(self)

        type(arguments).create_speculative_config = look
        arguments.create_engine_config()
        assert seen == ["01"]

    def test_a_users_choice_stays(self, models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(V2_VARIABLE, "1")
        for method in ("eagle_mrv2", "eagle", "eagle_mrv2"):
            ask(models, method).create_engine_config()
            assert os.environ[V2_VARIABLE] == "1"

    def test_not_set_for_a_request_that_is_refused(
        self, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(EagleMRV2Error):
            ask(models, additional_config={"eagle_mrv2": {"typo": 1}}).create_engine_config()
        assert V2_VARIABLE not in os.environ
        monkeypatch.setenv(V2_VARIABLE, "0")
        with pytest.raises(EagleMRV2Error, match="VLLM_USE_V2_MODEL_RUNNER=0 forbids; unset it"):
            ask(models).create_engine_config()
        assert os.environ[V2_VARIABLE] == "0"


def test_the_environment_stays_where_the_release_knows_another_way(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_release(v0_32.RELEASE, "0.32.0", monkeypatch)
    assert settings_in(ask(models).create_engine_config()) is not None
    assert V2_VARIABLE not in os.environ


@pytest.mark.skipif("spec_method" not in EngineArgs.__dataclass_fields__, reason="this release has no --spec-method")
class TestSpecArguments:
    """The method in ``spec_method``, ``spec_model`` and ``spec_tokens``."""

    def test_alone(self, models: dict[str, str]) -> None:
        arguments = ask(
            models, speculative_config=None, spec_method="eagle_mrv2", spec_model=models["head"], spec_tokens=2
        )
        config = arguments.create_engine_config()
        assert settings_in(config) == Settings("eagle", Options())
        assert config.speculative_config.num_speculative_tokens == 2

    def test_beside_the_configuration(self, models: dict[str, str]) -> None:
        given = {"method": "eagle_mrv2", "model": models["head"]}
        config = ask(models, speculative_config=given, spec_tokens=2).create_engine_config()
        assert settings_in(config) == Settings("eagle", Options())
        assert config.speculative_config.num_speculative_tokens == 2
        assert given == {"method": "eagle_mrv2", "model": models["head"]}

    @pytest.mark.parametrize(
        ("spec", "key"),
        [({"spec_method": "eagle_mrv2"}, "method"), ({"spec_tokens": 2}, "num_speculative_tokens")],
    )
    def test_given_twice(self, spec: dict[str, Any], key: str, models: dict[str, str]) -> None:
        with pytest.raises(EagleMRV2Error, match=f"and (method|{key}) in --speculative-config exclude each other"):
            ask(models, **spec).create_engine_config()


# Refusals


def refused(arguments: EngineArgs) -> str:
    """The one sentence that an engine refuses these arguments with."""
    with pytest.raises(EagleMRV2Error) as error:
        arguments.create_engine_config()
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("value", ["0", "false", " False "])
def test_model_runner_v1_forced(value: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ask(models)
    monkeypatch.setenv(V2_VARIABLE, value)
    assert "VLLM_USE_V2_MODEL_RUNNER=0 forbids; unset it" in refused(arguments)


def test_bad_options(models: dict[str, str]) -> None:
    message = refused(ask(models, additional_config={"eagle_mrv2": {"typo": 1}}))
    assert "unknown option 'typo'" in message
    assert "draft_logits_dtype" in message


OLD, NEW = (v0_20.RELEASE, "0.20.2"), (v0_32.RELEASE, "0.32.0")


def test_logits_after_temperature_are_float32() -> None:
    """Where the rejection sampler reads them so; a worker would say it after loading the model."""
    settings = Settings("eagle", Options(draft_logits_dtype="head"))
    with pytest.raises(EagleMRV2Error, match="draft_logits_dtype=head is not exact"):
        OLD[0].check_settings(settings)
    OLD[0].check_settings(Settings("eagle", Options()))
    NEW[0].check_settings(settings)


@pytest.mark.parametrize(
    ("release", "behaviour", "whose"),
    [
        (NEW, Behaviour.FUSED_DRAFT_DECODE, "vLLM's own"),
    ],
)
def test_a_behaviour_that_cannot_be_disabled(
    release: tuple[Release, str],
    behaviour: Behaviour,
    whose: str,
    models: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_release(*release, monkeypatch)
    # The draft is not looked at: what is refused on any draft is refused first.
    arguments = ask(models, head="target", additional_config={"eagle_mrv2": {"disable": [behaviour.value]}})
    message = refused(arguments)
    assert f"{behaviour} cannot be disabled: it is {whose} on vLLM {release[1]}; take it out of disable" in message


@pytest.mark.parametrize("release", [OLD, NEW], ids=["0.20", "0.32"])
def test_behaviours_that_can_be_disabled(
    release: tuple[Release, str], models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_release(*release, monkeypatch)
    adapter, version = release
    ours = {behaviour for behaviour in SWITCHES if adapter.supplier(behaviour, Version(version)) == "eagle_mrv2"}
    disable = sorted(behaviour.value for behaviour in ours | ALWAYS_OURS)
    settings = settings_in(ask(models, additional_config={"eagle_mrv2": {"disable": disable}}).create_engine_config())
    assert settings is not None
    assert settings.options.disable == ours | ALWAYS_OURS


def with_draft_vocab(
    size: int, ranking: dict[str, Any], models: dict[str, str], folder: Path, **more: Any
) -> EngineArgs:
    (folder / "ranking.json").write_text(json.dumps(ranking))
    draft_vocab = {"size": size, "ranking": str(folder / "ranking.json")}
    return ask(models, additional_config={"eagle_mrv2": {"draft_vocab": draft_vocab}}, **more)


def test_a_draft_vocabulary_rides_on_the_marker(models: dict[str, str], tmp_path: Path) -> None:
    arguments = with_draft_vocab(3, {"vocab_size": 120, "tokens": [9, 2, 5, 1]}, models, tmp_path)
    settings = settings_in(pickle.loads(pickle.dumps(arguments.create_engine_config())))
    assert settings is not None
    assert settings.kept_tokens is not None
    assert settings.kept_tokens.ids == (2, 5, 9)


@pytest.mark.parametrize(
    ("size", "ranking", "head", "cause"),
    [
        (3, {"tokens": [9, 2]}, "head", "ranks 2"),
        (128, {"tokens": [*range(128)]}, "head", "keeps 128 tokens of a draft with 128"),
        (2, {"tokens": [1, 128]}, "head", "the token 128, the draft has a vocabulary of 128"),
        (
            2,
            {"vocab_size": 50, "tokens": [1, 2]},
            "head",
            "a tokenizer of 50 tokens, the draft has a vocabulary of 128",
        ),
        (2, {"tokens": [1, 2]}, "head3", "an EAGLE-3 head"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be(
    size: int, ranking: dict[str, Any], head: str, cause: str, models: dict[str, str], tmp_path: Path
) -> None:
    """Before the model loads."""
    assert cause in refused(with_draft_vocab(size, ranking, models, tmp_path, head=head))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({}, None),
        ({"draft_lm_head_quantization": None}, None),
        ({"draft_lm_head_quantization": "fp8"}, "leave one of them out"),
        ({"draft_model_config": SimpleNamespace(quantization="awq")}, "those of head are quantized already (awq)"),
        ({"method": "mtp", "draft_model_config": SimpleNamespace(quantization="fp8")}, None),  # the target's
    ],
)
def test_weights_that_draft_quantization_cannot_round(given: dict[str, Any], cause: str | None) -> None:
    of_head: dict[str, Any] = {"draft_model_config": SimpleNamespace(quantization=None)}
    config = {"method": "eagle", "model": "head"} | of_head | given
    asked: Literal["fp8"] | None
    for asked, expected in (("fp8", cause), (None, None)):
        settings = Settings(config["method"], Options(draft_quantization=asked))
        with pytest.raises(EagleMRV2Error, match=re.escape(expected)) if expected else nullcontext():
            check_translated(SimpleNamespace(**config), settings)


def test_bad_options_of_nobody(models: dict[str, str]) -> None:
    stock = ask(models, "eagle", additional_config={"eagle_mrv2": {"typo": 1}})
    assert settings_in(stock.create_engine_config()) is None


def test_draft_that_is_a_whole_model(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 32}))
    arguments = ask(models)
    arguments.speculative_config["model"] = str(tmp_path)
    assert "is a whole model and no EAGLE or MTP head" in refused(arguments)


def test_unsupported_release(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    message = refused(ask(models))
    assert "does not support vLLM 0.34.0" in message
    assert f"supported are {releases.supported()};" in message
    assert settings_in(ask(models, "eagle").create_engine_config()) is None
    assert parse("--speculative-config", '{"method": "eagle"}').speculative_config == {"method": "eagle"}


def test_missing_symbol(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.v1.worker.gpu.attn_utils.build_slot_mappings_by_layer")
    message = refused(ask(models))
    assert "vllm.v1.worker.gpu.attn_utils:build_slot_mappings_by_layer is missing" in message
    assert "more" not in message
    assert settings_in(ask(models, "eagle").create_engine_config()) is None


OF_A_SIZE = SimpleNamespace(
    model="target",
    max_model_len=64,
    hf_config=None,
    hf_text_config=None,
    compute_hash=lambda: "draft",
    get_hidden_size=lambda: 64,
    get_vocab_size=lambda: 128,
)


def test_a_draft_that_vllm_refuses(models: dict[str, str], tmp_path: Path) -> None:
    """vLLM's own words, which go on for a page."""
    config = {**CHECKPOINTS["head"], "architectures": ["NoneForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ask(models, "eagle_mrv2:eagle")
    arguments.speculative_config["model"] = str(tmp_path)
    message = refused(arguments)
    assert f"vLLM refuses the draft {tmp_path} for method=eagle" in message
    assert "NoneForCausalLM" in message
    assert len(message) < 400


def test_mtp_forced_on_a_target_without(models: dict[str, str]) -> None:
    arguments = ask(models, speculative_config={"method": "eagle_mrv2:mtp", "num_speculative_tokens": 1})
    assert "vLLM refuses the draft in the target for method=mtp" in refused(arguments)


# What does not fit


@pytest.mark.parametrize(("tokens", "fits"), [(63, True), (64, False), (100, False)])
def test_more_draft_tokens_than_the_context_holds(tokens: int, fits: bool, models: dict[str, str]) -> None:
    arguments = ask(models)
    arguments.speculative_config["num_speculative_tokens"] = tokens
    if fits:
        assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options())
    else:
        assert f"num_speculative_tokens={tokens} does not fit into a context of 64 tokens" in refused(arguments)


@pytest.mark.parametrize(
    ("head", "changed", "says"),
    [
        ("head", {"hidden_size": 32}, "with hidden states of size 32, and"),
        ("head3", {"hidden_size": 32}, "with hidden states of size 32, and"),
        ("head3", {"hidden_size": 32, "target_hidden_size": 64}, None),
        ("head3", {"target_hidden_size": 32}, "with hidden states of size 32, and"),
        ("head", {"vocab_size": 256}, "for a vocabulary of 256 tokens, and"),
        ("head3", {"vocab_size": 64}, "for a vocabulary of 64 tokens, and"),
        ("head", {"vocab_size": 127}, None),  # one vocabulary, padded otherwise
        ("head3", {"draft_vocab_size": 128}, None),
    ],
)
def test_a_head_of_another_target(
    head: str, changed: dict[str, Any], says: str | None, models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CHECKPOINTS[head], **changed}))
    arguments = ask({**models, "other": str(tmp_path)}, head="other")
    if says is None:
        assert settings_in(arguments.create_engine_config()) is not None
        return
    message = refused(arguments)
    assert says in message
    assert f"{models['target']} has {64 if 'size 32' in message else 128}; give the head of this target" in message


def test_arguments_that_are_changed_between_two_uses(models: dict[str, str]) -> None:
    arguments = ask(models)
    arguments.create_engine_config()
    arguments.additional_config = {"eagle_mrv2": {"draft_quantization": "fp8"}}
    settings = settings_in(arguments.create_engine_config())
    assert settings == Settings("eagle", Options(draft_quantization="fp8"))
    arguments.speculative_config["enforce_eager"] = True
    settings = settings_in(arguments.create_engine_config())
    assert settings == Settings("eagle", Options(draft_quantization="fp8"), enforce_eager=True)
    arguments.additional_config = {"eagle_mrv2": {"nonsense": 1}}
    assert "unknown option 'nonsense'" in refused(arguments)


@pytest.mark.parametrize("model", ["target.gguf", "s3://bucket/target"])
def test_a_target_whose_configuration_is_read_later(model: str, tmp_path: Path) -> None:
    """A GGUF file would be read as a whole."""
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")

    class Unread(Reader):
        def config(self, model: str, revision: str | None = None) -> Any:
            raise AssertionError(model)

    arguments: Any = SimpleNamespace(model=model if "://" in model else str(file), revision=None)
    assert one_model.split(arguments, {"model": "head"}, Unread()) == {"model": "head"}


def test_a_draft_that_is_loaded_in_another_way(models: dict[str, str]) -> None:
    if releases.installed_version() < Version("0.31"):
        pytest.skip("vLLM loads a draft as its target")
    arguments = ask(models, load_format="auto")
    arguments.speculative_config["draft_load_config"] = {"load_format": "dummy"}
    assert settings_in(arguments.create_engine_config()) is not None


def test_a_folder_without_weights(models: dict[str, str], tmp_path: Path) -> None:
    assert f"the folder {models['head']} holds no weights" in refused(ask(models, load_format="auto"))
    (tmp_path / "config.json").write_text(json.dumps(CHECKPOINTS["head"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    arguments = ask({**models, "head": str(tmp_path)}, load_format="auto")
    assert settings_in(arguments.create_engine_config()) == Settings("eagle", Options())


def test_a_head_of_mistrals(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``params.json`` and nothing else, in the words of Mistral's own format."""
    # vLLM would start a process to look at the class of the model.
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())
    params: dict[str, Any] = {
        "dim": 64,
        "n_layers": 1,
        "head_dim": 32,
        "hidden_dim": 128,
        "n_heads": 2,
        "n_kv_heads": 2,
    }
    params |= {"norm_eps": 1e-5, "vocab_size": 128, "rope_theta": 1e4, "max_position_embeddings": 64}
    (tmp_path / "params.json").write_text(json.dumps(params))
    save_file({"eagle_linear.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    for method in ("eagle", "eagle_mrv2"):
        config = ask({**models, "head": str(tmp_path)}, method).create_engine_config()
        assert config.speculative_config.method == "eagle"
        assert (settings_in(config) is None) is (method == "eagle")


# A speculators checkpoint as the only model


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], str]:
    """Puts models, of which there is the configuration, into a cache of the hub's; offline they have names."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False)

    def put(name: str, config: dict[str, Any]) -> str:
        repository = tmp_path / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("a" * 40)
        (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
        (repository / "snapshots" / ("a" * 40) / "config.json").write_text(json.dumps(config))
        return name

    return put


def speculators(target: str, kind: str = "eagle3") -> dict[str, Any]:
    layer = {key: value for key, value in LLAMA.items() if key != "architectures"}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "draft_vocab_size": 64,
        "mask_token_id": 1,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": target},
        },
        "transformer_layer_config": {**layer, "num_hidden_layers": 1},
    }


@pytest.mark.parametrize(("given", "tokens"), [({}, 5), ({"num_speculative_tokens": 2}, 2)])
def test_a_checkpoint_that_names_its_target(
    given: dict[str, Any], tokens: int, hub: Callable[[str, dict[str, Any]], str]
) -> None:
    head = hub("some/head", speculators(hub("some/target", LLAMA)))
    arguments = EngineArgs(model=head, **COMMON, speculative_config={"method": "eagle_mrv2", **given})
    for _ in range(2):
        config = arguments.create_engine_config()
        assert settings_in(config) == Settings("eagle3", Options())
        assert "target" in config.model_config.model
        assert "head" in config.speculative_config.model
        assert config.speculative_config.num_speculative_tokens == tokens
    stock = EngineArgs(model=head, **COMMON).create_engine_config()
    assert settings_in(stock) is None
    assert stock.speculative_config.method == "eagle3"
    assert (stock.model_config.model, stock.speculative_config.model) == (
        config.model_config.model,
        config.speculative_config.model,
    )


def test_a_checkpoint_that_is_given_twice_offline(hub: Callable[[str, dict[str, Any]], str]) -> None:
    """There vLLM has replaced the name of the model by its folder."""
    target = hub("some/target", LLAMA)
    head, other = (hub(name, speculators(target)) for name in ("some/head", "some/other"))
    twice = {"method": "eagle_mrv2", "model": head, "num_speculative_tokens": 2}
    config = EngineArgs(model=head, speculative_config=twice, load_format="dummy").create_engine_config()
    assert settings_in(config) is not None
    assert "names its own target" in refused(EngineArgs(model=other, speculative_config=twice))


def test_a_checkpoint_that_names_its_target_beside_another_draft(
    hub: Callable[[str, dict[str, Any]], str], models: dict[str, str]
) -> None:
    head = hub("some/head", speculators(hub("some/target", LLAMA)))
    assert "is a draft that names its own target, and" in refused(ask(models, model=head))


def test_a_checkpoint_of_another_kind_that_names_its_target(hub: Callable[[str, dict[str, Any]], str]) -> None:
    head = hub("some/head", speculators(hub("some/target", LLAMA), "peagle"))
    arguments = EngineArgs(model=head, **COMMON, speculative_config={"method": "eagle_mrv2"})
    assert "is a P-EAGLE head" in refused(arguments)


def test_a_checkpoint_that_vllm_cannot_take_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**speculators("t"), "speculators_config": {}}))
    arguments = EngineArgs(model=str(tmp_path), **COMMON, speculative_config={"method": "eagle_mrv2"})
    assert "vLLM cannot take target and draft from" in refused(arguments)


def test_a_draft_by_the_targets_own_name(hub: Callable[[str, dict[str, Any]], str]) -> None:
    """vLLM replaces the target's name by its place in the cache, and leaves the draft's as it is."""
    target = hub("some/glm", CHECKPOINTS["mtp"])
    for model in ({}, {"model": target}):
        given = {"method": "eagle_mrv2", "num_speculative_tokens": 1, **model}
        config = EngineArgs(model=target, **COMMON, speculative_config=given).create_engine_config()
        assert settings_in(config) == Settings("mtp", Options())


def engine_that_reads(speculative: Any) -> Any:
    """Arguments, asked for with our method, of an engine whose vLLM makes this of the speculative configuration."""

    vars(speculative).setdefault("target_model_config", SimpleNamespace(max_model_len=64))
    draft = SimpleNamespace(hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace(), compute_hash=lambda: "draft")
    vars(speculative).setdefault("draft_model_config", draft)

    class Arguments:
        model, revision, tokenizer, additional_config, load_format = "target", None, None, None, "auto"
        trust_remote_code, config_format, hf_token = False, "auto", None
        replacement: dict[str, Any] | None = None  # what vLLM puts in the place of the configuration

        def __init__(self) -> None:
            self.speculative_config = {"method": "eagle_mrv2:mtp", "model": "deepseek", "num_speculative_tokens": 1}

        def create_speculative_config(self) -> Any:
            assert self.speculative_config == {"method": "mtp", "model": "deepseek", "num_speculative_tokens": 1}
            return speculative

        def create_engine_config(self) -> Any:
            if self.replacement is not None:
                self.speculative_config = self.replacement
            model = SimpleNamespace(served_model_name="target")
            speculative = self.create_speculative_config()
            return SimpleNamespace(speculative_config=speculative, additional_config={}, model_config=model)

        @staticmethod
        def add_cli_args(parser: Any) -> Any:
            return parser

    wrap(Arguments, "create_engine_config", engine_args.translated_first)
    wrap(Arguments, "create_speculative_config", engine_args.settings_attached)
    speculative.__dict__.update(num_speculative_tokens=1, draft_model_config=OF_A_SIZE, target_model_config=OF_A_SIZE)
    return Arguments()


def test_a_draft_that_vllm_reads_as_we_do() -> None:
    read = SimpleNamespace(
        method="mtp", model="deepseek", use_gemma4_mtp=lambda: False, use_multi_module_mtp=lambda: False
    )
    assert settings_in(engine_that_reads(read).create_engine_config()) == Settings("mtp", Options())
    older = SimpleNamespace(method="mtp", model="deepseek")  # a release that knows neither
    assert settings_in(engine_that_reads(older).create_engine_config()) == Settings("mtp", Options())


def test_a_draft_that_vllm_reads_otherwise() -> None:
    """Where vLLM changes the method all the same, our marker must not ride on it."""
    misled = SimpleNamespace(method="eagle", model="deepseek")
    arguments = engine_that_reads(misled)
    for _ in range(2):
        message = refused(arguments)
        assert "vLLM reads the draft deepseek as method=eagle" in message
        assert "family mtp" in message
        assert "rename its folder" in message
        assert settings_of(misled) is None


def test_a_draft_whose_folder_misleads_vllm(models: dict[str, str]) -> None:
    arguments = ask(models, "eagle_mrv2:mtp")
    arguments.speculative_config["model"] = "/m/eagle-deepseek"
    message = refused(arguments)
    assert "vLLM takes the MTP draft /m/eagle-deepseek for another kind because 'eagle-' stands in its path" in message


OTHER_SPECULATORS = [
    ("use_gemma4_mtp", "has a Gemma 4 MTP head"),
    ("use_multi_module_mtp", "has several MTP modules"),
]


@pytest.mark.parametrize(("predicate", "kind"), OTHER_SPECULATORS)
def test_a_draft_that_vllm_has_another_speculator_for(predicate: str, kind: str) -> None:
    read = SimpleNamespace(method="mtp", model="deepseek", **{predicate: lambda: True})
    arguments = engine_that_reads(read)
    for _ in range(2):
        message = refused(arguments)
        assert f"the draft deepseek {kind}" in message
        assert "use method=mtp instead of eagle_mrv2" in message
        assert settings_of(read) is None


def speculative_config_of(model_type: str, modules: int, tokens: int) -> SpeculativeConfig:
    """vLLM's own, as its predicates see it: making one in full takes a draft of that architecture."""
    config = object.__new__(SpeculativeConfig)
    hf_config = SimpleNamespace(model_type=model_type, num_nextn_predict_layers=modules)
    vars(config).update(
        method="mtp",
        model="draft",
        num_speculative_tokens=tokens,
        draft_model_config=SimpleNamespace(hf_config=hf_config),
    )
    return config


@pytest.mark.parametrize(
    ("model_type", "modules", "tokens", "predicate"),
    [
        ("gemma4_mtp", 1, 3, "use_gemma4_mtp"),
        ("deepseek_mtp", 2, 3, "use_multi_module_mtp"),
        ("deepseek_mtp", 2, 1, None),
        ("deepseek_mtp", 1, 3, None),
    ],
)
def test_the_predicates_of_the_installed_vllm(
    model_type: str, modules: int, tokens: int, predicate: str | None
) -> None:
    config, settings = speculative_config_of(model_type, modules, tokens), Settings("mtp", Options())
    if predicate is None:
        check_translated(config, settings)
        return
    if not hasattr(SpeculativeConfig, predicate):
        pytest.skip(f"this release has no {predicate}")
    with pytest.raises(EagleMRV2Error, match=f"the draft draft {dict(OTHER_SPECULATORS)[predicate]}.* use method=mtp"):
        check_translated(config, settings)


@pytest.mark.skipif(
    "not hasattr(SpeculativeConfig, 'use_multi_module_mtp')", reason="this release has no speculator for MTP modules"
)
@pytest.mark.parametrize("model", [{}, {"model": ""}], ids=["no model", "empty model"])
def test_several_mtp_modules_in_the_target(model: dict[str, str], models: dict[str, str]) -> None:
    def several(method: str, tokens: int) -> EngineArgs:
        speculative = {"method": method, "num_speculative_tokens": tokens, **(model if method != "mtp" else {})}
        return ask(models, model=models["mtp"], speculative_config=speculative)

    message = refused(several("eagle_mrv2", 2))
    assert f"the draft {models['mtp']} has several MTP modules" in message
    assert "use method=mtp instead of eagle_mrv2" in message
    assert settings_in(several("mtp", 2).create_engine_config()) is None
    # One draft token takes one module, which is ours to run.
    assert settings_in(several("eagle_mrv2", 1).create_engine_config()) == Settings("mtp", Options())


def test_a_configuration_that_vllm_drops() -> None:
    """Our settings must not be lost in silence."""
    arguments = engine_that_reads(SimpleNamespace(method="mtp", model="deepseek"))
    arguments.replacement = {"method": "mtp", "model": "deepseek", "num_speculative_tokens": 1}
    assert "vLLM replaced the speculative configuration" in refused(arguments)


# The command line


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def parse(*arguments: str) -> Any:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(arguments))


HEAD = "HEAD"  # stands for the path of the head
FORMS = {
    "short": ["--speculative-config", "method=eagle_mrv2,model=HEAD,num_speculative_tokens=3"],
    "short, with =": ["--speculative-config=method=eagle_mrv2,model=HEAD,num_speculative_tokens=3"],
    "short, with a forced family": ["-sc", "method=eagle_mrv2:eagle,model=HEAD,num_speculative_tokens=3"],
    "short, with an underscore": ["--speculative_config", "method=eagle_mrv2,model=HEAD,num_speculative_tokens=3"],
    "JSON": ["--speculative-config", '{"method": "eagle_mrv2", "model": "HEAD", "num_speculative_tokens": 3}'],
    "short, otherwise spelled": ["-sc", "method=Eagle_MRV2,model=HEAD,num_speculative_tokens=3"],
    "JSON, otherwise spelled": ["-sc", '{"method": "EAGLE-mrv2", "model": "HEAD", "num_speculative_tokens": "3"}'],
    "dotted": [
        "--speculative-config.method",
        "eagle_mrv2",
        "--speculative-config.model",
        "HEAD",
        "--speculative-config.num_speculative_tokens",
        "3",
    ],
}
if "spec_method" in EngineArgs.__dataclass_fields__:
    FORMS["--spec-method"] = ["--spec-method", "eagle_mrv2", "--spec-model", "HEAD", "--spec-tokens", "3"]
    FORMS["--spec-method, forced"] = ["--spec-method", "eagle_mrv2:eagle", "--spec-model", "HEAD", "--spec-tokens", "3"]
    FORMS["--spec-method, otherwise spelled"] = [
        "--spec-method",
        "Eagle-MRV2",
        "--spec-model",
        "HEAD",
        "--spec-tokens",
        "3",
    ]
    FORMS["--spec-tokens beside"] = ["-sc", "method=eagle_mrv2,model=HEAD", "--spec-tokens", "3"]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_command_line(form: list[str], models: dict[str, str], parser: FlexibleArgumentParser) -> None:
    common = ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-model-len", "64"]
    common += ["--load-format", "dummy"]
    written = [argument.replace(HEAD, models["head"]) for argument in form]
    parsed = parser.parse_args(["--model", models["target"], *common, *written])
    config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    assert settings_in(config) == Settings("eagle", Options())
    assert config.speculative_config.model == models["head"]
    assert config.speculative_config.num_speculative_tokens == 3


@pytest.mark.parametrize(
    "given",
    [
        {"method": "eagle", "model": "a=b,c=d", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4},
        {},
    ],
)
def test_json_of_other_methods_is_as_given(given: dict[str, Any], parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--speculative-config", json.dumps(given)]).speculative_config == given
    assert parser.parse_args([]).speculative_config is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method=eagle_mrv2,/m", "'/m' in --speculative-config is not key=value"),
        ("method=eagle_mrv2,model=/m,model=/n", "'model' stands twice in --speculative-config"),
        ("method=eagle,model=/m", "method=eagle,model=/m"),
        ("{", "{"),
    ],
)
def test_what_cannot_be_read_stops_the_command(
    text: str, says: str, parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-config", text])
    error = capsys.readouterr().err.splitlines()[-1]
    assert says in error
    assert "argument --speculative-config" in error


@pytest.mark.skipif("spec_method" not in EngineArgs.__dataclass_fields__, reason="this release has no --spec-method")
def test_spec_method_takes_no_other_new_names(parser: FlexibleArgumentParser) -> None:
    assert parser.parse_args(["--spec-method", "eagle"]).spec_method == "eagle"
    with pytest.raises(SystemExit):
        parser.parse_args(["--spec-method", "eagle_mrv3"])


# The patches themselves

WRAPPED = ("create_engine_config", "create_speculative_config", "add_cli_args")


def test_registering_again_is_harmless(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: getattr(EngineArgs, name) for name in WRAPPED}
    decides = VllmConfig.__dict__["use_v2_model_runner"]
    register()
    monkeypatch.setattr(patches, "_installed", False)  # as in a process that lost sight of the first time
    register()

    for name, wrapped in before.items():
        assert getattr(EngineArgs, name) is wrapped
        assert not hasattr(wrapped._eagle_mrv2_original, "_eagle_mrv2_original")
    assert VllmConfig.__dict__["use_v2_model_runner"] is decides
    assert not hasattr(decides.fget._eagle_mrv2_original, "_eagle_mrv2_original")
    assert settings_in(ask(models).create_engine_config()) is not None


def make_speculator(config: VllmConfig) -> Any:
    from vllm.v1.worker.gpu.spec_decode import init_speculator

    # Later releases hand on the settings states, which an EAGLE speculator does not look at.
    further = [None] * (init_speculator._eagle_mrv2_original.__code__.co_argcount - 2)
    return init_speculator(config, torch.device("cpu"), *further)


@pytest.mark.parametrize("head", ["head", "head3"])
def test_the_class_of_the_speculator(head: str, models: dict[str, str]) -> None:
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

    families: dict[str, Family] = {"head": "eagle", "head3": "eagle3"}
    family = families[head]
    stock = make_speculator(ask(models, family, head).create_engine_config())
    assert type(stock) is EagleSpeculator

    ours = make_speculator(ask(models, "eagle_mrv2", head).create_engine_config())
    assert isinstance(ours, EagleSpeculator)
    assert type(ours.drafter.adapter).__module__ == releases.installed_release().adapter
    assert ours.drafter.settings == Settings(family, Options())


def test_the_model_runner_calls_our_init_speculator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports the function by name; imported before us, it holds the stock one."""
    from vllm.v1.worker.gpu import model_runner, spec_decode

    assert hasattr(model_runner.init_speculator, "_eagle_mrv2_original")
    monkeypatch.setattr(model_runner, "init_speculator", spec_decode.init_speculator._eagle_mrv2_original)
    monkeypatch.setattr(patches, "_installed", False)
    register()
    assert hasattr(model_runner.init_speculator, "_eagle_mrv2_original")
