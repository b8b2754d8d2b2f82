#!/usr/bin/env python3
"""Prints as one JSON object where the GPU time of the draft phase goes, and what an engine start costs.

    python3 benchmarks/draft_timeline.py eagle_mrv2 --shape 1b --steps 7 --batch 1

Runs one engine of the given method in this process, with random weights, and profiles greedy decode with CUDA
activities only, which does not slow down the host.  A marker kernel before and after ``propose`` bounds the draft
phase.  All times are medians over the iterations, in microseconds unless noted:

* ``phase_us``: from the start of the first draft kernel to the end of the last; ``idle_share``: the share of this time
  in which no kernel runs; ``kernels``: those of the middle phase;
* ``iteration_us``: from the start of one draft phase to the start of the next; ``iteration_busy_us``: the time in it in
  which kernels run; ``iteration_gaps_us``: the longest gaps between kernels, with the kernels before and after;
* ``verification_busy_us`` and ``verification_kernels``: likewise, of what runs between two draft phases;
* ``host_us``: host time of an iteration without a profiler: the runner's two halves, ``propose``, which is part of the
  second half, and ``get_output``, which waits for the GPU;
* ``host_functions_us``: the functions with the most own time on the host, under Python's profiler, which slows down all
  of them;
* ``compiled_s``: seconds for each Triton kernel that the engine's own thread compiled, with this package's kernels by
  variant.  vLLM 0.33 compiles several kernels at a time; the time of each then includes the others.

``--mixed`` profiles requests of mixed lengths that come and go, ``--batch`` of them in flight, with drafts accepted at
random: ``mixed`` has the figures of iterations that prefill a request too, ``decodes`` those of all others.  ``tokens``
are those of a batch; where two engines' differ, so do their times.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib
import json
import os
import pstats
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from ab_time import arrive, turn
from load_times import configure_head

from vllm_eagle_mrv2.cli.bench.measurement import WORKER
from vllm_eagle_mrv2.cli.common.arguments import ACCEPTANCE
from vllm_eagle_mrv2.cli.common.engine_process import environment
from vllm_eagle_mrv2.cli.common.engines import MAX_NUM_SEQS, Setup
from vllm_eagle_mrv2.cli.common.load.traffic import USUAL_PROMPTS, random_prompts
from vllm_eagle_mrv2.cli.common.shapes import Shape, token_prompts
from vllm_eagle_mrv2.cli.common.subject import shape_subject
from vllm_eagle_mrv2.config.families import METHOD

MARKER = "spin_kernel"
NAME_LENGTH = 100
MOST = 60  # functions in host_functions_us


class Event(NamedTuple):
    """One kernel, copy or fill on the GPU; times are in nanoseconds."""

    start: int
    end: int
    name: str


class Batch(NamedTuple):
    """What a draft phase is given."""

    prefills: bool
    """Whether it prefills a request."""
    tokens: int


def gaps(events: list[Event]) -> Iterator[tuple[int, Event, Event]]:
    """(nanoseconds, event before, event after) of each gap in which no event runs; events are sorted by start."""
    last = events[0]
    for event in events:
        if event.start > last.end:
            yield event.start - last.end, last, event
        last = max(last, event, key=lambda one: one.end)


def busy(events: list[Event]) -> int:
    """Nanoseconds in which at least one event runs; events are sorted by start."""
    return max(event.end for event in events) - events[0].start - sum(gap for gap, _, _ in gaps(events))


def phases_of(events: list[Event]) -> list[list[Event]]:
    """The events between the two markers of each draft phase."""
    phases: list[list[Event]] = []
    inside = False
    for event in events:
        if MARKER in event.name:
            inside = not inside
            if inside:
                phases.append([])
        elif inside:
            phases[-1].append(event)
    return phases


def summary(events: list[Event], batches: list[Batch]) -> dict[str, Any]:
    """The figures of the iterations except those at both ends, apart for those that prefill a request.

    Args:
        events: of the GPU, sorted by start.
        batches: of the draft phases.
    """
    phases = phases_of(events)
    assert len(phases) == len(batches), (len(phases), len(batches))
    found = [(phase, batch) for phase, batch in zip(phases, batches, strict=True) if phase][3:-3]
    iterations = [(a, b, batch) for (a, _), (b, batch) in pairwise(found)]
    figures = {
        kind: {"tokens": statistics.median(batch.tokens for _, _, batch in ones)}
        | figures_of(events, [(a, b) for a, b, _ in ones])
        for kind, prefills in (("mixed", True), ("decodes", False))
        if (ones := [one for one in iterations if one[2].prefills is prefills])
    }
    return figures if "mixed" in figures else figures["decodes"]


def figures_of(events: list[Event], pairs: list[tuple[list[Event], list[Event]]]) -> dict[str, Any]:
    """Medians over iterations, and the kernels of the middle one.

    Args:
        pairs: the events of the previous draft phase and of the iteration's own.
    """
    phases = [phase for _, phase in pairs]
    spans = [phase[-1].end - phase[0].start for phase in phases]
    working = [busy(phase) for phase in phases]
    middle = len(phases) // 2
    example = phases[middle]
    iterations = [[event for event in events if a[0].start <= event.start < b[0].start] for a, b in pairs]
    verifications = [
        [event for event in iteration if event.start >= a[-1].end and MARKER not in event.name]
        for (a, _), iteration in zip(pairs, iterations, strict=True)
    ]
    before = [*iterations[middle], example[0]]
    return {
        "iterations": len(phases),
        "iteration_busy_us": statistics.median(map(busy, iterations)) / 1e3,
        "iteration_us": statistics.median(b[0].start - a[0].start for a, b in pairs) / 1e3,
        "phase_us": statistics.median(spans) / 1e3,
        "busy_us": statistics.median(working) / 1e3,
        "idle_share": round(1 - statistics.median(b / s for b, s in zip(working, spans, strict=True)), 4),
        "largest_gaps_us": sorted((round((b.start - a.end) / 1e3, 1) for a, b in pairwise(example)), reverse=True)[:5],
        "iteration_gaps_us": sorted(
            ((gap / 1e3, a.name[:NAME_LENGTH], b.name[:NAME_LENGTH]) for gap, a, b in gaps(before)), reverse=True
        )[:8],
        "launches": len(example),
        "sequence": [
            [round((b.start - a.end) / 1e3, 1), round((b.end - b.start) / 1e3, 1), b.name[:NAME_LENGTH]]
            for a, b in pairwise(example)
        ],
        "kernels": kernels_of(example),
        "verification_busy_us": statistics.median(map(busy, verifications)) / 1e3,
        "verification_kernels": kernels_of(verifications[middle]),
    }


def kernels_of(events: list[Event]) -> dict[str, dict[str, Any]]:
    """How often each kernel runs and how long all its runs take, in microseconds; those that take most come first."""
    times: dict[str, list[int]] = {}
    for event in events:
        times.setdefault(event.name[:NAME_LENGTH], []).append(event.end - event.start)
    return {
        name: {"count": len(each), "us": round(sum(each) / 1e3, 1)}
        for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))
    }


def own_memory() -> int:
    """Bytes of GPU memory that this process holds, independent of other processes."""
    import torch

    nvml: Any = importlib.import_module("pynvml")  # torch.cuda.memory.list_gpu_processes needs it too
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    return next(int(process.usedGpuMemory) for process in processes if process.pid == os.getpid())


def record_capture(into: dict[str, Any]) -> None:
    """Record the time and the memory that the capture of all graphs takes."""
    runner: Any = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    capture_model = runner.capture_model

    def recorded(self: Any) -> int:
        before, began = own_memory(), time.perf_counter()
        size: int = capture_model(self)
        into["capture_s"] = round(time.perf_counter() - began, 2)
        into["graph_mib"] = round((own_memory() - before) / 2**20, 1)
        return size

    runner.capture_model = recorded


def record_compilations(into: dict[str, float]) -> None:
    """Record how long this thread compiles Triton kernels; nobody waits for compilations in other threads."""
    runtime: Any = importlib.import_module("triton").knobs.runtime
    thread, began = threading.get_ident(), 0.0

    def begins(*args: Any, **kwargs: Any) -> None:
        nonlocal began
        if threading.get_ident() == thread:
            began = time.perf_counter()

    def ends(*args: Any, fn: Any, repr: str, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            name = repr if fn.module.startswith("vllm_eagle_mrv2") else fn.name
            into[name] = round(into.get(name, 0.0) + time.perf_counter() - began, 3)

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begins, ends


@contextlib.contextmanager
def timed(owner: Any, name: str) -> Iterator[list[tuple[float, float]]]:
    """Record the start and the end of every call of a method, in seconds."""
    method = getattr(owner, name)
    calls: list[tuple[float, float]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = method(*args, **kwargs)
        calls.append((began, time.perf_counter()))
        return result

    with mock.patch.object(owner, name, call):
        yield calls


def host_times(runner: Any, output: Any, generate: Callable[[], Any]) -> dict[str, Any]:
    """Host time of an iteration in microseconds: medians of its parts, and the functions that take most.

    Args:
        output: the class of the object that the runner's second half returns.
    """
    parts = {"execute_model": runner, "sample_tokens": runner, "propose": runner.speculator, "get_output": output}
    with contextlib.ExitStack() as stack:
        calls = {name: stack.enter_context(timed(owner, name)) for name, owner in parts.items()}
        generate()
    lasts = {name: [ended - began for began, ended in each] for name, each in calls.items()}
    begins = [began for began, _ in calls["execute_model"]]
    lasts["iteration"] = [b - a for a, b in pairwise(begins)]
    with cProfile.Profile() as profile:
        generate()
    own = {
        f"{'/'.join(Path(file).parts[-2:])}:{line} {name}": round(own * 1e6 / len(begins), 1)
        for (file, line, name), (_, _, own, _, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    }
    most = sorted(own.items(), key=lambda item: -item[1])[:MOST]
    host = {name: round(statistics.median(each) * 1e6, 1) for name, each in lasts.items()}
    return {"host_us": host, "host_functions_us": dict(most)}


def mark_phases(speculator: Any, num_draft_tokens: int) -> list[Batch]:
    """Put a marker kernel before and after each draft phase; return the list that gets the batches."""
    import torch

    propose = speculator.propose
    batches: list[Batch] = []

    def marked(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = input_batch.num_scheduled_tokens[: input_batch.num_reqs]
        batches.append(Batch(int(scheduled.max()) > num_draft_tokens + 1, int(scheduled.sum())))
        torch.cuda._sleep(1)
        drafts = propose(input_batch, *args, **kwargs)
        torch.cuda._sleep(1)
        return drafts

    speculator.propose = marked
    return batches


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and profile it."""
    method = options.family if options.method == "stock" else f"{METHOD}:{options.family}"
    os.environ |= environment(method) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    import torch
    import vllm
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    found: dict[str, Any] = {"compiled_s": {}}
    record_capture(found)
    record_compilations(found["compiled_s"])
    with tempfile.TemporaryDirectory() as folder:
        prompts = random_prompts(USUAL_PROMPTS)[: 4 * options.batch] if options.mixed else token_prompts(options.batch)
        tokens = sum(len(prompt) + options.tokens for prompt in prompts[: options.batch])
        subject = shape_subject(Path(folder), options.shape, options.family, prompts, tokens)
        configure_head(subject, options.head)
        sys.path[:0] = subject.plugins.values()
        setup = Setup(
            subject=subject,
            worker=WORKER,
            overrides=options.engine,
            max_num_seqs=options.batch if options.mixed else MAX_NUM_SEQS,
            acceptance=ACCEPTANCE if options.mixed else (),
        )
        disabled = {"disable": options.disable} if options.disable else {}
        job = setup.job(options.steps, method, options.option | disabled)
        began = time.perf_counter()
        llm = vllm.LLM(
            **{"model": job.model, "speculative_config": job.speculative_config, **job.arguments, **job.overrides}
        )
        found["start_s"] = round(time.perf_counter() - began, 2)
    core: Any = llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    async_utils: Any = importlib.import_module("vllm.v1.worker.gpu.async_utils")
    draw = random.Random(0)
    params = [
        vllm.SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=draw.randint(options.tokens // 2, options.tokens) if options.mixed else options.tokens,
            ignore_eos=True,
            detokenize=False,
            seed=number + 1,
        )
        for number in range(len(prompts))
    ]
    inputs: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate() -> None:
        llm.generate(inputs, params, use_tqdm=False)

    with turn(options.together):
        generate()
        found |= host_times(runner, async_utils.AsyncOutput, generate)
        batches = mark_phases(runner.speculator, options.steps)
        generate()
        batches.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate()
            torch.cuda.synchronize()
    recorded: Any = profile.profiler
    events = sorted(
        Event(one.start_ns(), one.end_ns(), one.name())
        for one in recorded.kineto_results.events()
        if one.device_type() == DeviceType.CUDA
    )
    about = {
        "vllm": vllm.__version__,
        "method": options.method,
        **{name: getattr(options, name) for name in ("family", "steps", "batch", "mixed", "disable", "option")},
        **({"temperature": options.temperature, "top_p": options.top_p} if options.temperature else {}),
        "shape": options.shape.value,
    }
    return about | found | summary(events, batches)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("stock", METHOD))
    parser.add_argument("--shape", type=Shape, choices=list(Shape), metavar="{1b,3b,8b}", default=Shape.b1)
    parser.add_argument("--family", choices=("eagle", "eagle3"), default="eagle")
    parser.add_argument("--steps", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--mixed", action="store_true", help="requests that come and go")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--head", type=json.loads, default={}, help="as in benchmarks/load_times.py")
    parser.add_argument("--disable", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--engine", type=json.loads, default={}, help="further LLM(...) arguments, as JSON")
    parser.add_argument("--option", type=json.loads, default={}, help="options of eagle_mrv2, as JSON")
    parser.add_argument("--together", nargs=2, metavar=("N", "FOLDER"), help="as in benchmarks/ab_time.py")
    options = parser.parse_args()
    # The engine in this process logs to standard output, which must contain the result only.
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        try:
            print(json.dumps(measure(options)), file=results)
        finally:
            if options.together:
                arrive(options.together)


if __name__ == "__main__":
    main()
