"""``vllm-eagle-mrv2 bench``: measures the stock speculator and ``eagle_mrv2`` in turn on your vLLM, model and prompts.

For each K both engines are live and take turns, so changes in the machine's speed affect both (`cli.bench.engines`).
Decoding is greedy, and a ratio is given only if both engines did the same work (`cli.bench.types`).

Exit codes: 0, every K and batch size has its ratio; 1, a ratio is refused, or an engine failed; 2, the bench could not
be started as asked.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.cli.bench.engines import MAX_NUM_SEQS, Comparison, Subject, shape_subject
from vllm_eagle_mrv2.cli.bench.report import BenchReport, draw, print_report, to_json
from vllm_eagle_mrv2.cli.bench.shapes import Shape
from vllm_eagle_mrv2.cli.bench.types import Row, Started
from vllm_eagle_mrv2.cli.demo.pair import PAIR, load_prompts, require_vllm
from vllm_eagle_mrv2.cli.doctor.command import version_of
from vllm_eagle_mrv2.cli.errors import CommandError, print_error
from vllm_eagle_mrv2.cli.progress import Track, progress
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.method import METHOD, detect_family
from vllm_eagle_mrv2.config.options import OPTIONS_KEY, parse_options
from vllm_eagle_mrv2.errors import EagleMRV2Error

_ROUNDS, _ROUNDS_ON_CPU = 15, 3
_TOKENS, _TOKENS_ON_CPU = 256, 32
_PLAIN_WIDTH = 160


class Family(str, Enum):
    """Kind of the draft head."""

    eagle = "eagle"
    eagle3 = "eagle3"
    mtp = "mtp"


class Against(str, Enum):
    """What ``eagle_mrv2`` is compared with."""

    stock = "stock"
    ours = "ours"


def bench(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(metavar="TARGET", help="Target model; without it the demo pair.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="HEAD", help="Its head; not for MTP inside the target.")] = None,
    family: Annotated[Family | None, typer.Option(help="Kind of head, instead of what its checkpoint says.")] = None,
    shape: Annotated[Shape | None, typer.Option(help="Random weights in this shape, no checkpoint.")] = None,
    k: Annotated[
        list[int], typer.Option("-k", "--num-speculative-tokens", min=1, help="Draft tokens an iteration: 3 5 7.")
    ] = [3],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Requests at once: 1 8 32.")] = [1],  # noqa: B006
    against: Annotated[
        Against, typer.Option(help="stock's speculator, or ours without the behaviours of --disable.")
    ] = Against.stock,
    disable: Annotated[
        list[Behaviour] | None,
        typer.Option(metavar="NAME", help="Behaviours of ours to switch off; doctor names them."),
    ] = None,
    option: Annotated[str, typer.Option(metavar="JSON", help="Options of eagle_mrv2.")] = "{}",
    engine: Annotated[str, typer.Option(metavar="JSON", help="Further LLM(...) arguments for both engines.")] = "{}",
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Measurements of each engine (default 15; on a CPU 3).")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens to generate for each request (default 256; on a CPU 32).")
    ] = None,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="End texts at their end of sequence.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(dir_okay=False, exists=True, help='A prompt a line, or JSON lines with "prompt".')
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="As in vLLM (default 4096; for the demo pair 512).")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help="Of each of the two engines (default 0.42).")
    ] = None,
    json_output: Annotated[
        str | None, typer.Option("--json", metavar="PATH|-", help="Write all figures; - prints them instead.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw them; needs matplotlib.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on stderr.")] = False,
) -> None:
    """Measure eagle_mrv2 against the stock speculator: iteration time, tokens per second, latencies, acceptance.

    Two live engines take turns; the ratio of their times is refused unless they did the same work.
    """
    errors = Console(stderr=True)
    try:
        require_vllm()
        _check_outputs(json_output, plot)
        names = [one.value for one in disable or []]
        if against is Against.ours and not names:
            raise CommandError("--against ours needs --disable, the behaviours that the other engine lacks.", 2)
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(
                subject=_subject(Path(folder), model, draft, family, shape, prompts, max_model_len, max(batch)),
                against_ours=against is Against.ours,
                options=_options(option, names),
                disable=names,
                overrides=_json_object("--engine", engine),
                max_num_seqs=max(MAX_NUM_SEQS, *batch),
                gpu_memory_utilization=gpu_memory_utilization,
                ignore_eos=not stop_at_eos,
                verbose=verbose,
            )
            with progress(errors, live=not verbose, quiet=False) as track:
                report = _run(comparison, k, batch, rounds, tokens, track)
    except CommandError as error:
        if json_output == "-":
            typer.echo(json.dumps({"error": str(error)}))
        print_error(errors, error)
        raise typer.Exit(error.exit_code) from None
    _show(report, context.params, json_output, plot)
    if report.error:
        print_error(errors, report.error)
    raise typer.Exit(0 if report.passed else 1)


# The request


def _check_outputs(json_output: str | None, plot: Path | None) -> None:
    for option, path in (("--json", json_output), ("--plot", plot)):
        if path is not None and path != "-" and not Path(path).resolve().parent.is_dir():
            raise CommandError(f"{option} {path}: there is no such folder; make it first.", 2)
    if plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'vllm-eagle-mrv2[plot]'.", 2)
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix.removeprefix(".") not in formats:
        raise CommandError(f"--plot {plot}: give a name that ends in one of {', '.join(formats)}.", 2)


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option} is not JSON ({error}): {text}", 2) from None
    if not isinstance(value, dict):
        raise CommandError(f"{option} must be a JSON object, such as '{{\"name\": 1}}', not {text}", 2)
    return value


def _options(text: str, disable: list[str]) -> dict[str, Any]:
    options = _json_object("--option", text)
    if "disable" in options:
        raise CommandError("--option takes no disable: use --disable NAME.", 2)
    try:
        parse_options({OPTIONS_KEY: options | {"disable": disable}})
    except EagleMRV2Error as error:
        raise CommandError(str(error), 2) from None
    return options


def _subject(
    folder: Path,
    model: str | None,
    draft: str | None,
    family: Family | None,
    shape: Shape | None,
    prompts: Path | None,
    max_model_len: int | None,
    largest_batch: int,
) -> Subject:
    """The models that the options name.

    Raises:
        CommandError: options exclude each other, the prompts cannot be read, or the head has no known family.
    """
    length = {} if max_model_len is None else {"max_model_len": max_model_len}
    if shape is not None:
        if model or draft or prompts:
            raise CommandError("--shape has random weights: leave out --model, --draft and --prompts.", 2)
        if family is Family.mtp:
            raise CommandError("--shape has heads of the families eagle and eagle3 only.", 2)
        made = shape_subject(folder, shape, (family or Family.eagle).value, largest_batch)
        made.arguments.update(length)
        return made
    texts = _read_prompts(prompts) if prompts else load_prompts()
    if model is None:
        if draft is not None or family is Family.mtp:
            raise CommandError("--draft and --family mtp need --model, the target of that head.", 2)
        name = (family or Family.eagle).value
        arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 2**30, **length}
        return Subject(
            f"demo pair, {name}", str(PAIR / "target"), str(PAIR / name), name, texts, arguments, offline=True
        )
    try:
        name = family.value if family else detect_family(draft, model)
    except EagleMRV2Error as error:
        raise CommandError(str(error), 2) from None
    title = f"{model} with {draft}, {name}" if draft else f"{model}, {name}"
    return Subject(title, model, draft, name, texts, {"max_model_len": 4096, **length})


def _read_prompts(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
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


# The measurement


def _run(
    comparison: Comparison, ks: list[int], batches: list[int], rounds: int | None, tokens: int | None, track: Track
) -> BenchReport:
    """Measure every K and batch size; if an engine fails, the rows measured before it are kept.

    Raises:
        CommandError: an engine failed before any row was measured.
    """
    rows: list[Row] = []
    started: Started | None = None
    failed: str | None = None
    try:
        for k in ks:
            track(f"K={k}, start of the engines", 1)
            with comparison.engines(k) as pair:
                started = pair.started
                on_cpu = started.device == "cpu"
                how_often = rounds or (_ROUNDS_ON_CPU if on_cpu else _ROUNDS)
                max_tokens = tokens or (_TOKENS_ON_CPU if on_cpu else _TOKENS)
                for size in batches:
                    on_round = track(f"K={k}, batch {size}", how_often)
                    rows.append(pair.compare(size, how_often, max_tokens, on_round))
    except CommandError as error:
        if started is None or not rows:
            raise
        failed = str(error)
    assert started is not None
    versions = {
        METHOD: __version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton", "pytorch-triton"),
    }
    return BenchReport(title=comparison.subject.title, versions=versions, started=started, rows=rows, error=failed)


def _show(report: BenchReport, options: dict[str, Any], json_output: str | None, plot: Path | None) -> None:
    text = json.dumps(to_json(report) | {"options": options}, indent=1, default=str)
    if json_output == "-":
        typer.echo(text)
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=_PLAIN_WIDTH))
        if json_output:
            Path(json_output).write_text(text + "\n", encoding="utf-8")
    if plot:
        draw(report, plot)
