"""``vllm-eagle-mrv2 tune``: measures how many draft tokens pay at each number of requests in flight.

One engine of ``eagle_mrv2`` chooses its number of draft tokens at run time (``draft_length: auto``).  Rounds that leave
the choice to it alternate with rounds in which each number is held, with the same requests (`cli.tune.settings`).

Exit codes: 0, everything was measured; 1, a round was too short, or the engine failed; 2, the command could not be
started as asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_eagle_mrv2.cli.common import arguments
from vllm_eagle_mrv2.cli.common.engines import MAX_NUM_SEQS, Engines, Setup
from vllm_eagle_mrv2.cli.common.errors import CommandError, reported
from vllm_eagle_mrv2.cli.common.installed import require_vllm, versions
from vllm_eagle_mrv2.cli.common.load.traffic import USUAL_PROMPTS, WORKER, Traffic, random_prompts
from vllm_eagle_mrv2.cli.common.progress import Track, progress
from vllm_eagle_mrv2.cli.common.subject import FIXED_KV_CACHE, ShapeRequests, subject_of
from vllm_eagle_mrv2.cli.common.types import Started
from vllm_eagle_mrv2.cli.tune.report import TuneReport
from vllm_eagle_mrv2.cli.tune.settings import measure
from vllm_eagle_mrv2.cli.tune.types import TuneRow
from vllm_eagle_mrv2.config.draft_lengths import why_not_chosen
from vllm_eagle_mrv2.config.families import METHOD

_LEVELS, _LEVELS_ON_CPU = (1, 4, 16, 64), (1, 4)
_ROUNDS, _ROUNDS_ON_CPU = 5, 1


def tune(
    context: typer.Context,
    model: arguments.Model = None,
    draft: arguments.Draft = None,
    family: arguments.HeadFamily = None,
    shape: arguments.RandomShape = None,
    k: Annotated[int, typer.Option("-k", "--num-speculative-tokens", min=1, help="The most draft tokens to try.")] = 5,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests in flight (default 1 4 16 64; on a CPU 1 4).")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Measurements of each number (default 5; on a CPU 1).")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests a round (default up to 4 for each in flight).")
    ] = None,
    prompt_tokens: arguments.PromptTokens = USUAL_PROMPTS,
    output_tokens: arguments.OutputTokens = (64, 256),
    temperature: arguments.Temperature = 0.0,
    top_p: arguments.TopP = 1.0,
    acceptance: arguments.Acceptance = None,
    option: arguments.MethodOptions = "{}",
    engine: arguments.EngineArguments = "{}",
    stop_at_eos: arguments.StopAtEos = False,
    prompts: arguments.Prompts = None,
    max_model_len: arguments.MaxModelLen = None,
    gpu_memory_utilization: arguments.GpuMemory = None,
    json_output: arguments.JsonOutput = None,
    plot: arguments.Plot = None,
    verbose: arguments.Verbose = False,
) -> None:
    """Find out how many draft tokens pay at each number of requests in flight, and print them as vLLM's setting.

    One live engine drafts each number in turn, and as many as it chooses by itself, for the same requests.
    """
    errors = Console(stderr=True)
    with reported(errors, as_json=json_output == "-"):
        require_vllm()
        arguments.check_outputs(json_output, plot)
        levels = sorted(set(concurrency or []))
        shares = arguments.shares_of(acceptance, shape, k)
        arguments.check_range("--prompt-tokens", *prompt_tokens)
        arguments.check_range("--output-tokens", *output_tokens)
        overrides = _overrides(engine, levels)
        with tempfile.TemporaryDirectory() as folder:
            of_shape = ShapeRequests(random_prompts(prompt_tokens))
            subject = subject_of(Path(folder), model, draft, family, shape, prompts, max_model_len, overrides, of_shape)
            if shape is not None:
                del subject.arguments[FIXED_KV_CACHE]  # the only engine takes what its requests in flight need
            setup = Setup(
                subject=subject,
                options=_options(option),
                acceptance=shares,
                overrides=overrides,
                max_num_seqs=max([MAX_NUM_SEQS, *levels]),
                gpu_memory_utilization=gpu_memory_utilization,
                ignore_eos=not stop_at_eos,
                verbose=verbose,
                worker=WORKER,
            )
            traffic = Traffic(output_tokens, temperature, top_p, requests)
            with progress(errors, live=not verbose, quiet=False) as track:
                started, rows, failed = _run(setup, k, levels, traffic, rounds, track)
    report = TuneReport(
        title=subject.title,
        versions=versions(),
        started=started,
        error=failed,
        speculative=_speculative(setup, family, draft=None if shape else subject.draft),
        max_num_seqs=_most_requests(setup),
        rows=rows,
    )
    report.end(context.params, json_output, plot, errors)


def _options(text: str) -> dict[str, Any]:
    """The options of the engine: those of ``--option``, and the number of draft tokens that can be held."""
    options = arguments.method_options(text, [])
    if "draft_length" in options:
        raise CommandError("--option takes no draft_length: tune measures auto beside each number.", 2)
    return options | {"draft_length": "auto"}


def _overrides(text: str, levels: Sequence[int]) -> dict[str, Any]:
    """The arguments of ``--engine``; `CommandError` if with them numbers of draft tokens could not be compared."""
    overrides = arguments.json_object("--engine", text)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(**overrides.get("speculative_config", {})),
        parallel_config=SimpleNamespace(
            data_parallel_size=overrides.get("data_parallel_size", 1),
            pipeline_parallel_size=overrides.get("pipeline_parallel_size", 1),
            tensor_parallel_size=overrides.get("tensor_parallel_size", 1),
            distributed_executor_backend=overrides.get("distributed_executor_backend"),
        ),
        kv_transfer_config=overrides.get("kv_transfer_config"),
        model_config=SimpleNamespace(is_moe=True, is_hybrid=False),  # nothing is known of the model yet
    )
    reason = why_not_chosen(config)
    if reason is not None:
        cause = reason.partition(";")[0]
        raise CommandError(f"tune varies the number of draft tokens, and --engine keeps it from that: {cause}.", 2)
    arguments.check_in_flight("--concurrency", max(levels, default=0), overrides)
    return overrides


def _speculative(setup: Setup, family: arguments.FamilyName | None, draft: str | None) -> dict[str, Any]:
    """The speculative configuration of a server with these models, without its numbers of draft tokens."""
    given: dict[str, Any] = setup.overrides.get("speculative_config", {})
    method = METHOD if family is None else f"{METHOD}:{family.value}"
    return given | {"method": method} | ({} if draft is None else {"model": draft})


def _most_requests(setup: Setup) -> int:
    """The largest batch size of the engine."""
    return int(setup.overrides.get("max_num_seqs", setup.max_num_seqs))


def _run(
    setup: Setup, k: int, levels: Sequence[int], traffic: Traffic, rounds: int | None, track: Track
) -> tuple[Started, list[TuneRow], str | None]:
    """Measure every level; return where, the rows, and what ended the measurement after some of them.

    Raises:
        CommandError: the engine failed before any row was measured.
    """

    def rows_of(engines: Engines) -> Iterator[TuneRow]:
        on_cpu = engines.started.device == "cpu"
        how_often = rounds or (_ROUNDS_ON_CPU if on_cpu else _ROUNDS)
        usual = [level for level in (_LEVELS_ON_CPU if on_cpu else _LEVELS) if level <= _most_requests(setup)]
        for level in levels or usual:
            yield measure(engines, level, traffic, how_often, track(f"{level} in flight", how_often))

    return setup.measured([k], rows_of, lambda k: track("start of the engine", 1))
