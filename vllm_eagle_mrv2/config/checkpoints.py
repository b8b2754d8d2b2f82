"""Reads a checkpoint: its configuration, both as stored and as vLLM interprets it, and its tensor names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from vllm_eagle_mrv2.errors import EagleMRV2Error

_READS_FILES = ("auto", "hf", "safetensors", "mistral", "pt")
"""vLLM load formats that read the files of a folder as published."""
_MTP_LAYERS = "n_predict"  # vLLM's name for their number, whatever the checkpoint calls it


@dataclass(frozen=True)
class Reader:
    """Reads the configurations of local folders and hub models; the fields mirror vLLM's engine arguments."""

    trust_remote_code: bool = False
    config_format: str = "auto"
    hf_token: bool | str | None = None

    def config(self, model: str, revision: str | None = None) -> Mapping[str, Any]:
        """``config.json`` as stored or, where there is none, vLLM's translation of Mistral's ``params.json``.

        Raises:
            EagleMRV2Error: the configuration cannot be read.
        """
        from transformers import PretrainedConfig

        config: object
        try:
            config, _ = PretrainedConfig.get_config_dict(model, revision=revision, token=self.hf_token)
        except (OSError, ValueError) as error:
            return self._mistral(model, revision) or _unreadable(model, error)
        except (TypeError, AttributeError):  # transformers fails on some JSON that is not an object
            config = None
        if not isinstance(config, dict):
            raise EagleMRV2Error(f"config.json of {model} is not a JSON object; download the checkpoint again.")
        return config or self._mistral(model, revision) or _unreadable(model, "it has no config.json")

    def draft_config(self, model: str, revision: str | None = None) -> Any:
        """The configuration that vLLM gives a draft, with its own override for drafts stored inside targets.

        Raises:
            EagleMRV2Error: vLLM cannot read the configuration.
        """
        from vllm.config.speculative import SpeculativeConfig

        return self._by_vllm(model, revision, SpeculativeConfig.hf_config_override)

    def target_config(self, model: str, revision: str | None = None) -> Any:
        """The configuration that vLLM gives a target.

        Raises:
            EagleMRV2Error: vLLM cannot read the configuration.
        """
        return self._by_vllm(model, revision)

    def has_mtp_layers(self, model: str, revision: str | None = None) -> bool:
        """Whether the installed vLLM finds MTP layers in a checkpoint.

        Raises:
            EagleMRV2Error: vLLM cannot read the configuration.
        """
        return is_mtp(self.draft_config(model, revision))

    def _by_vllm(self, model: str, revision: str | None, override: Any = None) -> Any:
        from vllm.transformers_utils.config import get_config

        try:
            return get_config(
                model,
                self.trust_remote_code,
                revision,
                config_format=self.config_format,
                hf_overrides_fn=override,
                token=self.hf_token,
            )
        except Exception as error:  # anything that vLLM, transformers or the checkpoint's own code raises
            _unreadable(model, error)

    def _mistral(self, model: str, revision: str | None) -> Mapping[str, Any] | None:
        try:
            read: dict[str, Any] = self._by_vllm(model, revision).to_dict()
        except EagleMRV2Error:
            return None
        return read


def is_stored(model: str) -> bool:
    """Whether a model lies in object storage, from which vLLM fetches it later."""
    return "://" in model


def is_mtp(draft_config: Any) -> bool:
    """Whether vLLM drafts with a model as MTP, judging by its configuration from `Reader.draft_config`."""
    from vllm.config.speculative import MTPModelTypes

    return draft_config.model_type in get_args(MTPModelTypes) and getattr(draft_config, _MTP_LAYERS, None) != 0


def check_weights(model: str, load_format: str) -> None:
    """Refuse a local folder in which vLLM would find no weights.

    Raises:
        EagleMRV2Error: with the cause and the remedy.
    """
    folder = Path(model)
    if load_format in _READS_FILES and folder.is_dir() and not any(map(_is_of_weights, folder.iterdir())):
        raise EagleMRV2Error(f"the folder {model} holds no weights; download the draft model again.")


def tensor_names(model: str) -> frozenset[str] | None:
    """Names of the tensors in a local safetensors checkpoint; None where there is no such file.

    Raises:
        EagleMRV2Error: a file is not safetensors despite its name, for example a git-lfs pointer.
    """
    folder = Path(model)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise EagleMRV2Error(
                f"{index} is not an index of a checkpoint ({error!r}); download the draft model again."
            ) from error
        return frozenset(weight_map)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return None
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="np") as checkpoint:
                names.update(checkpoint.keys())
        except (SafetensorError, OSError) as error:
            raise EagleMRV2Error(
                f"{file} is not a complete safetensors file ({error}); download the draft model again."
            ) from error
    return frozenset(names)


def _is_of_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".gguf")


def _unreadable(model: str, error: object) -> NoReturn:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error)).rstrip(".:")
    raise EagleMRV2Error(
        f"the configuration of {model} cannot be read ({reason}); check the path, the download, and whether the model "
        "needs trust_remote_code."
    ) from (error if isinstance(error, Exception) else None)
