"""Checks from configurations alone whether a deployment will draft with ``eagle_mrv2`` on the installed vLLM.

The check calls the engine's own functions, so it refuses the same things with the same messages.  vLLM makes the whole
engine configuration if it can on this machine; otherwise only the configurations of target and draft are read.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.cli.doctor.report import DeploymentReport, DoctorReport, PathReport
from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.engine_arguments import take_settings
from vllm_eagle_mrv2.config.families import METHOD, Family
from vllm_eagle_mrv2.config.heads import check_fit
from vllm_eagle_mrv2.config.vllm_errors import first_sentence, refused_by_vllm
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.plugin import register
from vllm_eagle_mrv2.releases.draft_paths import attends_by_ours, draft_paths

_FLOAT32 = 4


@dataclass(frozen=True)
class Deployment:
    """A target and a draft to serve, and the engine arguments that matter for the check."""

    target: str
    draft: str | None
    num_speculative_tokens: int
    max_num_seqs: int | None = None
    """None for vLLM's default for a server on this machine."""
    probabilistic: bool = False
    trust_remote_code: bool = False

    def engine_args(self, version: Version, *, drafts: bool = True) -> Any:
        """vLLM's ``EngineArgs`` of the deployment; they load nothing.

        Args:
            version: the installed release.
            drafts: whether to include the draft.
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
    """Check a deployment and add the findings to the report.

    Args:
        report: the report of a vLLM on which ``eagle_mrv2`` runs.
        deployment: the deployment to check.
        version: the installed release.
    """
    register()
    found = report.deployment = DeploymentReport(
        target=deployment.target, draft=deployment.draft, num_speculative_tokens=deployment.num_speculative_tokens
    )
    try:
        arguments = deployment.engine_args(version)
    except Exception as error:  # vLLM may raise anything for a target's name
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
    """The draft's family, also of a deployment that is refused for another reason or cannot run on this machine."""
    try:
        settings = take_settings(arguments, releases.installed)
    except EagleMRV2Error:
        return None
    return None if settings is None else settings.family


def _not_served(deployment: Deployment, error: Exception) -> str:
    return f"vLLM does not serve {deployment.target} here: {first_sentence(error)}."


def _blame(report: DoctorReport, deployment: Deployment, version: Version, error: Exception) -> None:
    """Report whether the draft or the target is at fault if vLLM cannot make a configuration of both.

    The machine may be the reason if the target alone fails too: for example, a CPU has no kernels for FP8 weights.
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
    """The part of vLLM's ``ModelConfig`` that the checks need, read from a model's configuration alone."""

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
        settings = take_settings(arguments, releases.installed)
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
    except (AttributeError, AssertionError, TypeError, ValueError) as error:  # from unusual names and sizes
        report.notes.append(f"whether the draft fits its target could not be told ({first_sentence(error)}).")


def _check_architecture(draft: _Shape, family: Family) -> None:
    """Refuse a draft if vLLM has no head for its target's architecture, as vLLM does for an engine's configuration."""
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
    """Bytes of the stored draft logits in float32; from 0.28 on, an option stores them in the head's dtype."""
    return max_num_seqs * num_draft_tokens * vocabulary * _FLOAT32
