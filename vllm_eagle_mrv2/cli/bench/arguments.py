"""The options that the measuring commands have in common, and what they ask for."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.cli.bench.engines import Subject, shape_subject
from vllm_eagle_mrv2.cli.bench.shapes import Shape
from vllm_eagle_mrv2.cli.demo.pair import PAIR, load_prompts
from vllm_eagle_mrv2.cli.doctor.command import quiet, version_of
from vllm_eagle_mrv2.cli.errors import CommandError
from vllm_eagle_mrv2.config.checkpoints import Reader
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.heads import detect_family
from vllm_eagle_mrv2.config.options import OPTIONS_KEY, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error


class Family(str, Enum):
    """Kind of the draft head."""

    eagle = "eagle"
    eagle3 = "eagle3"
    mtp = "mtp"


Model = Annotated[str | None, typer.Option(metavar="TARGET", help="Target model; without it the demo pair.")]
Draft = Annotated[str | None, typer.Option(metavar="HEAD", help="Its head; not for MTP inside the target.")]
HeadFamily = Annotated[Family | None, typer.Option(help="Kind of head, instead of what its checkpoint says.")]
RandomShape = Annotated[Shape | None, typer.Option(help="Random weights in this shape, no checkpoint.")]
DraftTokens = Annotated[
    list[int], typer.Option("-k", "--num-speculative-tokens", min=1, help="Draft tokens an iteration: 3 5 7.")
]
Options = Annotated[str, typer.Option(metavar="JSON", help="Options of eagle_mrv2.")]
EngineArguments = Annotated[
    str, typer.Option(metavar="JSON", help="Further arguments for the engines, as for LLM(...).")
]
Prompts = Annotated[
    Path | None, typer.Option(dir_okay=False, exists=True, help='A prompt a line, or JSON lines with "prompt".')
]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="As in vLLM (default 4096; for the demo pair 512).")]
GpuMemory = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, help="gpu_memory_utilization of each engine (default: an equal share)."),
]
JsonOutput = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write all figures; - prints them instead.")
]
Plot = Annotated[Path | None, typer.Option(dir_okay=False, help="Draw them; needs matplotlib.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on stderr.")]


def check_outputs(json_output: str | None, plot: Path | None) -> None:
    """Raise `CommandError` if the results cannot be written where they are asked for."""
    for option, path in (("--json", json_output), ("--plot", plot)):
        if path is None or path == "-":
            continue
        file = Path(path).resolve()
        if not file.parent.is_dir():
            raise CommandError(f"{option} {path}: there is no such folder; make it first.", 2)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise CommandError(f"{option} {path}: this cannot be written; give a file that can.", 2)
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'vllm-eagle-mrv2[plot]'.", 2)
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix.removeprefix(".") not in formats:
        raise CommandError(f"--plot {plot}: give a name that ends in one of {', '.join(formats)}.", 2)


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object that an option gives; `CommandError` if it is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option} is not JSON ({error}): {text}", 2) from None
    if not isinstance(value, dict):
        raise CommandError(f"{option} must be a JSON object, such as '{{\"name\": 1}}', not {text}", 2)
    return value


def method_options(text: str, disable: list[str]) -> dict[str, Any]:
    """The options of ``eagle_mrv2`` in ``--option``; `CommandError` if it rejects them."""
    options = json_object("--option", text)
    if "disable" in options:
        raise CommandError("--option takes no disable: use --disable NAME of bench.", 2)
    try:
        parse_options({OPTIONS_KEY: options | {"disable": disable}})
    except EagleMRV2Error as error:
        raise CommandError(str(error), 2) from None
    return options


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
    family: Family | None,
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
        if family is Family.mtp:
            raise CommandError("--shape has heads of the families eagle and eagle3 only.", 2)
        made = shape_subject(folder, shape, (family or Family.eagle).value, *of_shape)
        made.arguments.update(length)
        return made
    texts = read_prompts(prompts) if prompts else load_prompts()
    if model is None:
        if draft is not None or family is Family.mtp:
            raise CommandError("--draft and --family mtp need --model, the target of that head.", 2)
        name = (family or Family.eagle).value
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


def versions() -> dict[str, str | None]:
    """The versions that a measurement depends on, beside vLLM's."""
    return {
        METHOD: __version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton", "pytorch-triton"),
    }
