"""``vllm-eagle-mrv2 bench-load``: measures the stock speculator and ``eagle_mrv2`` under continuous load.

Requests come and go, so most iterations mix prefills with decodes, as on a server.  All engines are live and take turns
with the same requests (`cli.common.engines`).  Two of them are stock's: a row has a verdict if they
agree, and a difference is none that equal engines may have (`cli.bench_load.types`).

Exit codes: 0, every row has a verdict, or its control was left out; 1, in one two engines of the same kind differ too
much, a round was too short or requests waited, or an engine failed; 2, the bench could not be started as asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_eagle_mrv2.cli.bench_load.measurement import measure
from vllm_eagle_mrv2.cli.bench_load.report import LoadReport
from vllm_eagle_mrv2.cli.bench_load.types import LoadRow
from vllm_eagle_mrv2.cli.common import arguments
from vllm_eagle_mrv2.cli.common.engines import MAX_NUM_SEQS, Comparison, Engines
from vllm_eagle_mrv2.cli.common.errors import reported
from vllm_eagle_mrv2.cli.common.installed import require_vllm, versions
from vllm_eagle_mrv2.cli.common.load.traffic import USUAL_PROMPTS, WORKER, Traffic, random_prompts
from vllm_eagle_mrv2.cli.common.load.types import Level
from vllm_eagle_mrv2.cli.common.progress import Track, progress
from vllm_eagle_mrv2.cli.common.subject import ShapeRequests, subject_of

_ROUNDS, _ROUNDS_ON_CPU = 9, 2


def bench_load(
    context: typer.Context,
    model: arguments.Model = None,
    draft: arguments.Draft = None,
    family: arguments.HeadFamily = None,
    shape: arguments.RandomShape = None,
    k: arguments.DraftTokens = [3],  # noqa: B006
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in flight, each replaced as it ends: 1 8 64 (default 8).")
    ] = None,
    rate: Annotated[
        list[float] | None, typer.Option(min=0.001, help="Requests a second, however many are in flight: 2 4 8.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Measurements of each engine (default 9; on a CPU 2).")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests a round (default up to 4 for each in flight; 30 s at a rate)."),
    ] = None,
    prompt_tokens: arguments.PromptTokens = USUAL_PROMPTS,
    output_tokens: arguments.OutputTokens = (64, 256),
    temperature: arguments.Temperature = 0.0,
    top_p: arguments.TopP = 1.0,
    acceptance: arguments.Acceptance = None,
    option: arguments.MethodOptions = "{}",
    engine: arguments.EngineArguments = "{}",
    control: Annotated[
        bool, typer.Option(help="Start a second engine with stock's method, to see what a difference is worth.")
    ] = True,
    baseline: Annotated[bool, typer.Option("--baseline", help="Start an engine without speculation, too.")] = False,
    stop_at_eos: arguments.StopAtEos = False,
    prompts: arguments.Prompts = None,
    max_model_len: arguments.MaxModelLen = None,
    gpu_memory_utilization: arguments.GpuMemory = None,
    json_output: arguments.JsonOutput = None,
    plot: arguments.Plot = None,
    verbose: arguments.Verbose = False,
) -> None:
    """Measure eagle_mrv2 against the stock speculator under load: throughput, latencies, and whether they differ.

    Requests with prompts and outputs of mixed lengths come and go; live engines take turns with the same ones.
    """
    errors = Console(stderr=True)
    with reported(errors, as_json=json_output == "-"):
        require_vllm()
        arguments.check_outputs(json_output, plot)
        shares = arguments.shares_of(acceptance, shape, max(k))
        arguments.check_range("--prompt-tokens", *prompt_tokens)
        arguments.check_range("--output-tokens", *output_tokens)
        levels = [Level(concurrency=one) for one in concurrency or ([] if rate else [8])]
        levels += [Level(rate=one) for one in rate or []]
        traffic = Traffic(output_tokens, temperature, top_p, requests)
        most = max(level.concurrency or MAX_NUM_SEQS for level in levels)
        of_shape = ShapeRequests(random_prompts(prompt_tokens), most * traffic.tokens_of_a_request(prompt_tokens))
        overrides = arguments.json_object("--engine", engine)
        arguments.check_in_flight("--concurrency", max(level.concurrency or 0 for level in levels), overrides)
        with tempfile.TemporaryDirectory() as folder:
            comparison = Comparison(
                subject=subject_of(
                    Path(folder), model, draft, family, shape, prompts, max_model_len, overrides, of_shape
                ),
                options=arguments.method_options(option, []),
                acceptance=shares,
                overrides=overrides,
                max_num_seqs=max(MAX_NUM_SEQS, *(level.concurrency or 0 for level in levels)),
                gpu_memory_utilization=gpu_memory_utilization,
                ignore_eos=not stop_at_eos,
                verbose=verbose,
                control=control,
                baseline=baseline,
                worker=WORKER,
            )
            with progress(errors, live=not verbose, quiet=False) as track:
                report = _run(comparison, k, levels, traffic, rounds, track)
    report.end(context.params, json_output, plot, errors)


def _run(
    comparison: Comparison, ks: list[int], levels: list[Level], traffic: Traffic, rounds: int | None, track: Track
) -> LoadReport:
    """Measure every K and level; if an engine fails, the rows measured before it are kept.

    Raises:
        CommandError: an engine failed before any row was measured.
    """

    def rows_of(engines: Engines) -> Iterator[LoadRow]:
        how_often = rounds or (_ROUNDS_ON_CPU if engines.started.device == "cpu" else _ROUNDS)
        for level in levels:
            on_round = track(f"K={engines.k}, {level}", how_often)
            yield measure(engines, level, traffic, how_often, on_round)

    started, rows, failed = comparison.measured(ks, rows_of, lambda k: track(f"K={k}, start of the engines", 1))
    return LoadReport(title=comparison.subject.title, versions=versions(), started=started, rows=rows, error=failed)
