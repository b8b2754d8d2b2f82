"""The models to measure, as the options name them, with their prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_eagle_mrv2.cli.common.arguments import FamilyName
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.installed import quiet
from vllm_eagle_mrv2.cli.common.pair import PAIR, load_prompts
from vllm_eagle_mrv2.cli.common.shapes import OWN_HEAD_PLUGIN, Shape, kv_cache_bytes, write_configs, write_own_head
from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.heads import detect_family
from vllm_eagle_mrv2.errors import EagleMRV2Error

FIXED_KV_CACHE = "kv_cache_memory_bytes"


@dataclass(frozen=True)
class Subject:
    """The models to measure, with their prompts and engine arguments."""

    title: str
    model: str
    draft: str | None
    """Path or hub name of the head; None for an MTP head inside the target."""
    family: str
    prompts: list[str] | list[list[int]]
    arguments: dict[str, Any]
    """Arguments for ``LLM``."""
    offline: bool = False
    plugins: dict[str, str] = field(default_factory=dict)
    """vLLM plugins that the engines load in addition to the installed ones: name -> folder."""

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that the plugins change."""
        if not self.plugins:
            return {}
        changed = {"PYTHONPATH": ahead_of_path(variables, *self.plugins.values())}
        if "VLLM_PLUGINS" in variables:
            changed["VLLM_PLUGINS"] = ",".join([variables["VLLM_PLUGINS"], *self.plugins])
        return changed


def shape_subject(
    folder: Path, shape: Shape, family: str, prompts: list[list[int]], tokens_in_flight: int = 0
) -> Subject:
    """A subject with random weights in a published shape; its configurations are written into ``folder``.

    Args:
        tokens_in_flight: of all requests at a time; the KV cache has room for them.
    """
    target, draft = write_configs(folder, shape, family)
    arguments = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,  # as vLLM serves on an H100 or H200
        FIXED_KV_CACHE: max(4 * 2**30, kv_cache_bytes(shape, tokens_in_flight)),
    }
    title = f"shape {shape.value}, {family}, random weights"
    plugins = {OWN_HEAD_PLUGIN: write_own_head(folder / "plugins")} if family == "eagle3" else {}
    return Subject(title, target, draft, family, prompts, arguments, offline=True, plugins=plugins)


class ShapeRequests(NamedTuple):
    """What a model with random weights is asked for."""

    prompts: list[list[int]]
    """Token ids."""
    tokens_in_flight: int = 0
    """Of all requests at a time; the KV cache has room for them."""


def subject_of(
    folder: Path,
    model: str | None,
    draft: str | None,
    family: FamilyName | None,
    shape: Shape | None,
    prompts: Path | None,
    max_model_len: int | None,
    overrides: Mapping[str, Any],
    of_shape: ShapeRequests,
) -> Subject:
    """The models that the options name.

    Args:
        overrides: the engines' arguments in ``--engine``.
        of_shape: requests for random weights.

    Raises:
        CommandError: options exclude each other, the prompts cannot be read, or the head has no known family.
    """
    length = {} if max_model_len is None else {"max_model_len": max_model_len}
    if shape is not None:
        if model or draft or prompts:
            raise CommandError("--shape has random weights: leave out --model, --draft and --prompts.", 2)
        if family is FamilyName.mtp:
            raise CommandError("--shape has heads of the families eagle and eagle3 only.", 2)
        made = shape_subject(folder, shape, (family or FamilyName.eagle).value, *of_shape)
        made.arguments.update(length)
        return made
    texts = read_prompts(prompts) if prompts else load_prompts()
    if model is None:
        if draft is not None or family is FamilyName.mtp:
            raise CommandError("--draft and --family mtp need --model, the target of that head.", 2)
        name = (family or FamilyName.eagle).value
        arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 2**30, **length}
        return Subject(
            f"demo pair, {name}", str(PAIR / "target"), str(PAIR / name), name, texts, arguments, offline=True
        )
    name = family.value if family else _family_of(draft, model, overrides)
    title = f"{model} with {draft}, {name}" if draft else f"{model}, {name}"
    return Subject(title, model, draft, name, texts, {"max_model_len": 4096, **length})


def _family_of(draft: str | None, model: str, overrides: Mapping[str, Any]) -> str:
    reader = Reader(
        bool(overrides.get("trust_remote_code")), overrides.get("config_format", "auto"), overrides.get("hf_token")
    )
    revision = overrides.get("speculative_config", {}).get("revision")
    try:
        with quiet():  # vLLM's log would be in the JSON of --json -
            return detect_family(draft, model, revision, reader)
    except EagleMRV2Error as error:
        raise CommandError(str(error), 2) from None


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file, one a line; `CommandError` if there are none."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--prompts {file} cannot be read ({error}).", 2) from None
    if not lines:
        raise CommandError(f"--prompts {file} has no line with a prompt.", 2)
    if not lines[0].lstrip().startswith("{"):
        return lines
    try:
        prompts = [json.loads(line)["prompt"] for line in lines]
        if all(isinstance(prompt, str) and prompt for prompt in prompts):
            return prompts
    except (ValueError, KeyError, TypeError):
        pass
    raise CommandError(f'--prompts {file}: a line is no JSON object with a text "prompt".', 2)


def ahead_of_path(variables: Mapping[str, str], *folders: str) -> str:
    """``PYTHONPATH`` with these folders first."""
    return os.pathsep.join([*folders, *filter(None, [variables.get("PYTHONPATH")])])
