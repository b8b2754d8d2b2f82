"""Whether one deployment will draft by ``eagle_mrv2`` on the installed vLLM, from configurations alone.

The engine's own functions are asked, so that what they refuse is refused here in the same words: vLLM makes the whole
configuration of the engine where it can here; where the target is not for this machine, target and draft are read.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from vllm_eagle_mrv2.cli.doctor.report import DeploymentReport, DoctorReport, PathReport
from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.families import METHOD, Family
from vllm_eagle_mrv2.config.heads import check_fit
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.patches.engine_args import first_sentence, refused_by_vllm, take_settings
from vllm_eagle_mrv2.plugin import register
from vllm_eagle_mrv2.releases.draft_paths import attends_by_ours, draft_paths

_FLOAT32 = 4


@dataclass(frozen=True)
class Deployment:
    """What is to be served."""

    target: str
    draft: str | None
    num_speculative_tokens: int
    max_num_seqs: int | None = None
    """None takes vLLM's own number for a server on this machine."""
    probabilistic: bool = False
    trust_remote_code: bool = False

    def engine_args(self, version: Version, *, drafts: bool = True) -> Any:
        """vLLM's ``EngineArgs``; nothing is loaded by them.

        Args:
            version: the installed release.
            drafts: False leaves the draft out.
        """
        from vllm.engine.arg_utils import EngineArgs

        speculative: dict[str, Any] = {"method": METHOD, "num_speculative_tokens": self.num_speculative_tokens}
        if self.draft is not None:
            speculative["model"] = self.draft
        if self.probabilistic:
            sampling = "draft_sample_method" if version >= Version("0.22") else "rejection_sample_method"
            speculative[sampling] = "probabilistic"
        limits = {} if self.max_num_seqs is None else {"max_num_seqs": self.max_num_seqs}
        return EngineArgs(
            model=self.target,
            skip_tokenizer_init=True,
            load_format="dummy",
            trust_remote_code=self.trust_remote_code,
            speculative_config=speculative if drafts else None,
            **limits,
        )


def examine_deployment(report: DoctorReport, deployment: Deployment, version: Version) -> None:
    """Look at a deployment and put what is found into the report.

    Args:
        report: of a vLLM on which ``eagle_mrv2`` runs.
        deployment: what is to be served.
        version: the installed release.
    """
    register()
    found = report.deployment = DeploymentReport(
        target=deployment.target,
        draft=deployment.draft,
        num_speculative_tokens=deployment.num_speculative_tokens,
    )
    try:
        arguments = deployment.engine_args(version)
    except Exception as error:  # whatever vLLM finds wrong with the target's name, in whatever way
        report.problems.append(_not_served(deployment, error))
        return
    try:
        config = _engine_config(arguments)
    except EagleMRV2Error as refusal:
        report.problems.append(str(refusal))
    except Exception as error:  # as above
        _blame(report, deployment, version, error)
    else:
        found.checked = "engine"
        _describe(found, config, version)
    report.family = _family(arguments)


def _engine_config(arguments: Any) -> Any:
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    return arguments.create_engine_config(usage)


def _family(arguments: Any) -> Family | None:
    """Also of a deployment that is refused for something else, or that is not for this machine."""
    try:
        settings = take_settings(arguments)
    except EagleMRV2Error:
        return None
    return None if settings is None else settings.family


def _not_served(deployment: Deployment, error: Exception) -> str:
    return f"vLLM does not serve {deployment.target} here: {first_sentence(error)}."


def _blame(report: DoctorReport, deployment: Deployment, version: Version, error: Exception) -> None:
    """Tell whether the draft or the target is at fault when vLLM makes no configuration of the two.

    What keeps the target alone from being served here may be this machine: a CPU has no kernels for FP8 weights.
    """
    from vllm.platforms import current_platform

    try:
        _engine_config(deployment.engine_args(version, drafts=False))
    except Exception as alone:  # as above
        if current_platform.is_cuda_alike():
            report.problems.append(_not_served(deployment, alone))
            return
        report.notes.append(
            f"vLLM makes no configuration of {deployment.target} on this machine ({first_sentence(alone)}), "
            "so only the configurations of target and draft were looked at."
        )
        _check_models(report, deployment, version)
    else:
        report.problems.append(f"vLLM refuses this draft: {first_sentence(error)}.")


class _Shape:
    """What is asked of vLLM's ``ModelConfig``, read off a configuration alone."""

    def __init__(self, model: str, hf_config: Any) -> None:
        from vllm.transformers_utils.config import get_hf_text_config

        self.model, self.hf_config = model, hf_config
        self._text = get_hf_text_config(hf_config)
        self.max_model_len = int(getattr(self._text, "max_position_embeddings", sys.maxsize))

    def get_hidden_size(self) -> int:
        return int(self._text.hidden_size)

    def get_vocab_size(self) -> int:
        return int(self._text.vocab_size)


def _check_models(report: DoctorReport, deployment: Deployment, version: Version) -> None:
    found, arguments = report.deployment, deployment.engine_args(version)
    assert found is not None
    try:
        settings = take_settings(arguments)
        assert settings is not None
        reader, name = Reader(deployment.trust_remote_code), arguments.speculative_config.get("model")
        target = _Shape(arguments.model, reader.target_config(arguments.model))
        draft = target if name is None else _Shape(name, reader.draft_config(name))
        found.checked = "models"
        found.max_num_seqs = deployment.max_num_seqs
        found.draft_logits_bytes = None if deployment.probabilistic else 0
        if deployment.probabilistic and deployment.max_num_seqs is not None:
            sizes = (deployment.max_num_seqs, found.num_speculative_tokens, draft.get_vocab_size())
            found.draft_logits_bytes = _draft_logits(*sizes)
        _check_architecture(draft, settings.family)
        check_fit(
            SimpleNamespace(
                model=draft.model,
                method=settings.family,
                num_speculative_tokens=found.num_speculative_tokens,
                draft_model_config=draft,
                target_model_config=target,
            )
        )
    except EagleMRV2Error as refusal:
        report.problems.append(str(refusal))
    except (AttributeError, AssertionError, TypeError, ValueError) as error:  # of names and sizes that are unusual
        report.notes.append(f"whether the draft fits its target could not be told ({first_sentence(error)}).")


def _check_architecture(draft: _Shape, family: Family) -> None:
    """Refuse a draft for whose target vLLM has no such head, as it does itself in making the engine's configuration."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    config = draft.hf_config
    if family != "mtp" and not hasattr(config, "speculators_model_type") and config.model_type != "eagle":
        config = EAGLEConfig(config, method=family, model_type="eagle")
    if not set(config.architectures) & set(ModelRegistry.get_supported_archs()):
        reason = f"Model architectures {config.architectures} are not supported for now"
        raise refused_by_vllm(draft.model, family, reason)


def _describe(found: DeploymentReport, config: Any, version: Version) -> None:
    draft = config.speculative_config.draft_model_config
    found.max_num_seqs = int(config.scheduler_config.max_num_seqs)
    found.num_speculative_tokens = config.speculative_config.num_speculative_tokens
    found.draft_logits_bytes = 0
    methods = ("draft_sample_method", "rejection_sample_method")
    if "probabilistic" in (getattr(config.speculative_config, name, None) for name in methods):
        sizes = (found.max_num_seqs, found.num_speculative_tokens, draft.get_vocab_size())
        found.draft_logits_bytes = _draft_logits(*sizes)
    found.paths = [PathReport(backends=path.backends, path=path.path) for path in draft_paths(draft, version)]
    found.own_kernels = attends_by_ours(draft)


def _draft_logits(max_num_seqs: int, num_draft_tokens: int, vocabulary: int) -> int:
    """Bytes of the stored draft logits; options may store them in the head's dtype from 0.28 on, at half of that."""
    return max_num_seqs * num_draft_tokens * vocabulary * _FLOAT32
