"""``vllm-eagle-mrv2 bench``: measures the stock speculator and ``eagle_mrv2`` in turn on your vLLM, model and prompts.

For each K both engines are live and take turns, so changes in the machine's speed affect both (`cli.common.engines`).
Decoding is greedy, and a ratio is given only if both engines did the same work (`cli.bench.types`).

Exit codes: 0, every K and batch size has its ratio; 1, a ratio is refused, or an engine failed; 2, the bench could not
be started as asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_eagle_mrv2.cli.bench.measurement import WORKER, measure
from vllm_eagle_mrv2.cli.bench.report import BenchReport
from vllm_eagle_mrv2.cli.bench.types import Row
from vllm_eagle_mrv2.cli.common import arguments
from vllm_eagle_mrv2.cli.common.engines import MAX_NUM_SEQS, Comparison, Engines
from vllm_eagle_mrv2.cli.common.errors import CommandError, reported
from vllm_eagle_mrv2.cli.common.installed import require_vllm, versions
from vllm_eagle_mrv2.cli.common.progress import Track, progress
from vllm_eagle_mrv2.cli.common.shapes import PROMPT_TOKENS, token_prompts
from vllm_eagle_mrv2.cli.common.subject import ShapeRequests, subject_of
from vllm_eagle_mrv2.config.behaviours import Behaviour

_ROUNDS, _ROUNDS_ON_CPU = 15, 3
_TOKENS, _TOKENS_ON_CPU = 256, 32


class Against(str, Enum):
    """What ``eagle_mrv2`` is compared with."""

    stock = "stock"
    ours = "ours"


def bench(
    context: typer.Context,
    model: arguments.Model = None,
    draft: arguments.Draft = None,
    family: arguments.HeadFamily = None,
    shape: arguments.RandomShape = None,
    k: arguments.DraftTokens = [3],  # noqa: B006
    batch: Annotated[list[int], typer.Option(min=1, help="Requests at once: 1 8 32.")] = [1],  # noqa: B006
    against: Annotated[
        Against, typer.Option(help="stock's speculator, or ours without the behaviours of --disable.")
    ] = Against.stock,
    disable: Annotated[
        list[Behaviour] | None,
        typer.Option(metavar="NAME", help="Behaviours of ours to switch off; doctor names them."),
    ] = None,
    option: arguments.MethodOptions = "{}",
    engine: arguments.EngineArguments = "{}",
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Measurements of each engine (default 15; on a CPU 3).")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens to generate for each request (default 256; on a CPU 32).")
    ] = None,
    stop_at_eos: arguments.StopAtEos = False,
    prompts: arguments.Prompts = None,
    max_model_len: arguments.MaxModelLen = None,
    gpu_memory_utilization: arguments.GpuMemory = None,
    json_output: arguments.JsonOutput = None,
    plot: arguments.Plot = None,
    verbose: arguments.Verbose = False,
) -> None:
    """Measure eagle_mrv2 against the stock speculator: iteration time, tokens per second, latencies, acceptance.

    Two live engines take turns; the ratio of their times is refused unless they did the same work.
    """
    errors = Console(stderr=True)
    with reported(errors, as_json=json_output == "-"):
        require_vllm()
        arguments.check_outputs(json_output, plot)
        names = [one.value for one in disable or []]
        if against is Against.ours and not names:
            raise CommandError("--against ours needs --disable, the behaviours that the other engine lacks.", 2)
        most = max(batch)
        of_shape = ShapeRequests(token_prompts(most), most * (PROMPT_TOKENS + (tokens or _TOKENS)))
        overrides = arguments.json_object("--engine", engine)
        arguments.check_in_flight("--batch", most, overrides)
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(
                subject=subject_of(
                    Path(folder), model, draft, family, shape, prompts, max_model_len, overrides, of_shape
                ),
                worker=WORKER,
                against_ours=against is Against.ours,
                options=arguments.method_options(option, names),
                disable=names,
                overrides=overrides,
                max_num_seqs=max(MAX_NUM_SEQS, *batch),
                gpu_memory_utilization=gpu_memory_utilization,
                ignore_eos=not stop_at_eos,
                verbose=verbose,
            )
            with progress(errors, live=not verbose, quiet=False) as track:
                report = _run(comparison, k, batch, rounds, tokens, track)
    report.end(context.params, json_output, plot, errors)


# The measurement


def _run(
    comparison: Comparison, ks: list[int], batches: list[int], rounds: int | None, tokens: int | None, track: Track
) -> BenchReport:
    """Measure every K and batch size; if an engine fails, the rows measured before it are kept.

    Raises:
        CommandError: an engine failed before any row was measured.
    """

    def rows_of(pair: Engines) -> Iterator[Row]:
        on_cpu = pair.started.device == "cpu"
        how_often = rounds or (_ROUNDS_ON_CPU if on_cpu else _ROUNDS)
        max_tokens = tokens or (_TOKENS_ON_CPU if on_cpu else _TOKENS)
        for size in batches:
            yield measure(pair, size, how_often, max_tokens, track(f"K={pair.k}, batch {size}", how_often))

    started, rows, failed = comparison.measured(ks, rows_of, lambda k: track(f"K={k}, start of the engines", 1))
    return BenchReport(title=comparison.subject.title, versions=versions(), started=started, rows=rows, error=failed)
