"""``vllm-eagle-mrv2 demo``: the same prompts without speculation, with stock EAGLE and with ``eagle_mrv2``.

The engines are the installed vLLM's, each in a process of its own (`demo_worker`), all on Model Runner V2.  Decoding is
greedy, so the three must give the same tokens.

They do so in float32 only, and float32 is what the demo asks for.  In half precision the target's logits depend on the
shape of the batch that they were computed in, and verifying K + 1 tokens is another shape than decoding one: where two
tokens nearly tie, stock speculation too may take the other.  So where the GPU has no attention backend for float32, the
demo runs in bfloat16, and there ``eagle_mrv2`` has to match the stock speculative run or the run without speculation.

Exit codes: 0, the tokens are equal in that sense and our speculator drafted them; 1, they are not, or it did not, or
an engine failed; 2, the demo could not be started as asked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from vllm_eagle_mrv2.cli.demo_report import FamilyReport, print_reports, to_json
from vllm_eagle_mrv2.cli.demo_types import Job, Measurement
from vllm_eagle_mrv2.method import METHOD

PAIR = Path(__file__).resolve().parent.parent / "demo_pair"
_NO_FLOAT32 = "No valid attention backend"
_SHUTDOWN_SECONDS = 30


class Family(str, Enum):
    """Which heads to run."""

    eagle = "eagle"
    eagle3 = "eagle3"
    both = "both"


class Dtype(str, Enum):
    """What to compute in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class DemoError(Exception):
    """One line for the user.  The exit code is 1 for an engine that failed, 2 for a demo that cannot start."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def demo(
    family: Annotated[Family, typer.Option(help="Which head drafts.")] = Family.eagle,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens an iteration (K).")] = 3,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate for each prompt.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of the held-out prompts, as one batch.")] = 4,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Target model instead of the packaged one.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="PATH", help="EAGLE head instead of the packaged one.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: float32 where there is attention for it.")] = Dtype.auto,
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.01, max=1.0, help="As in vLLM.")] = 0.3,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log on stderr.")] = False,
) -> None:
    """Show that eagle_mrv2 runs on the installed vLLM, gives the same tokens, and how well it drafts.

    Runs a small model three times: without speculation, with the stock method and with eagle_mrv2.
    Takes one to two minutes without a GPU.
    """
    errors = Console(stderr=True)
    try:
        families = _families(family, model, draft)
        job = Job(
            model=model or str(PAIR / "target"),
            speculative_config=None,
            prompts=_load_prompts()[:num_prompts],
            max_tokens=max_tokens,
            dtype=Dtype.float32.value if dtype is Dtype.auto else dtype.value,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        drafts = {name: draft or str(PAIR / name) for name in families}
        with _progress(errors, live=not verbose, quiet=json_output) as track:
            reports = _run_all(job, drafts, num_speculative_tokens, track, verbose, fall_back=dtype is Dtype.auto)
    except DemoError as error:
        if json_output:
            typer.echo(json.dumps({"error": str(error)}))
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(error.exit_code) from None
    if json_output:
        typer.echo(json.dumps(to_json(reports), indent=2))
    else:
        print_reports(reports, Console())
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def _families(family: Family, model: str | None, draft: str | None) -> list[str]:
    if importlib.util.find_spec("vllm") is None:
        raise DemoError("vLLM is not installed here: install a release that this package supports.", 2)
    if model is not None and draft is None:
        raise DemoError("--model needs --draft, an EAGLE head that was trained for it.", 2)
    if draft is not None and family is Family.both:
        raise DemoError("--draft is one head: say which with --family eagle or --family eagle3.", 2)
    return ["eagle", "eagle3"] if family is Family.both else [family.value]


def _load_prompts() -> list[str]:
    try:
        prompts: list[str] = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise DemoError(f"the packaged demo pair is missing ({error}); reinstall vllm-eagle-mrv2.", 2) from None
    return prompts


# The engines

OnTokens = Callable[[int], None]
Track = Callable[[str, int], OnTokens]
"""(name of a run, tokens that it will generate at most) -> what to call with the tokens generated so far."""


def _run_all(
    job: Job, drafts: dict[str, str], num_speculative_tokens: int, track: Track, verbose: bool, fall_back: bool
) -> list[FamilyReport]:
    """Run the baseline once and both methods for every family.

    Args:
        job: the job of the baseline.
        drafts: family -> path of its head.
        num_speculative_tokens: K.
        track: makes a progress bar.
        verbose: let vLLM's log through to stderr.
        fall_back: whether to go to bfloat16 where float32 has no attention backend.
    """

    def run(name: str, method: str | None = None, head: str | None = None) -> Measurement:
        config = {"method": method, "model": head, "num_speculative_tokens": num_speculative_tokens}
        on_tokens = track(name, len(job.prompts) * job.max_tokens)
        return _run_engine(
            job.model_copy(update={"speculative_config": config if method else None}), on_tokens, verbose
        )

    try:
        baseline = run("without speculation")
    except DemoError as error:
        if not (fall_back and _NO_FLOAT32 in str(error)):
            raise
        job = job.model_copy(update={"dtype": Dtype.bfloat16.value})
        baseline = run("without speculation, bfloat16")
    return [
        FamilyReport(
            family=family,
            dtype=job.dtype,
            num_speculative_tokens=num_speculative_tokens,
            max_tokens=job.max_tokens,
            prompts=job.prompts,
            baseline=baseline,
            stock=run(f"stock {family}", family, head),
            eagle_mrv2=run(f"{METHOD}, {family}", METHOD, head),
        )
        for family, head in drafts.items()
    ]


def _environment(config: dict[str, Any] | None) -> dict[str, str]:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # greedy decoding does not need it, and it compiles for minutes
        # Triton multiplies float32 in TF32 unless told otherwise, which brings the near-ties back.
        "TRITON_F32_DEFAULT": "ieee",
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the worker's own process, where it can be looked at
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "PYTHONSAFEPATH": "1",  # a folder named vllm in the working directory is not the installed vLLM
    }
    if config is not None and config["method"] == METHOD:
        del environment["VLLM_USE_V2_MODEL_RUNNER"]  # ours asks for it by itself
    return environment


def _run_engine(job: Job, on_tokens: OnTokens, verbose: bool) -> Measurement:
    """Run one engine in a process of its own; nothing of it is left afterwards.

    Raises:
        DemoError: the engine failed; the message ends in its last error line.
    """
    source, sink = os.pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log, os.fdopen(source) as events:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_eagle_mrv2.cli.demo_worker", str(sink)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr if verbose else log,
            stderr=sys.stderr if verbose else log,
            pass_fds=(sink,),
            env=_environment(job.speculative_config),
            start_new_session=True,
            text=True,
        )
        os.close(sink)
        try:
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(job.model_dump_json())
            outcome = _follow(events, on_tokens)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SHUTDOWN_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if isinstance(outcome, Measurement):
            return outcome
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
        last_words = f"; its log ends in: {lines[-1]}" if lines else ""
        reason = outcome or _ending(process.returncode) + last_words
    method = job.speculative_config["method"] if job.speculative_config else "no speculation"
    hint = "" if verbose else " (--verbose shows vLLM's log)"
    raise DemoError(f"the engine with {method} failed: {reason}{hint}", 1)


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _follow(events: IO[str], on_tokens: OnTokens) -> Measurement | str | None:
    """Read a worker's events up to its measurement or its error; None where it ended without either."""
    for line in events:
        event = json.loads(line)
        if "tokens" in event:
            on_tokens(event["tokens"])
        elif "result" in event:
            return Measurement.model_validate(event["result"])
        else:
            return str(event["error"])
    return None


# Progress


@contextmanager
def _progress(console: Console, live: bool, quiet: bool) -> Iterator[Track]:
    """Progress bars on a terminal; elsewhere one line as each engine starts, unless quiet."""
    if not (live and console.is_terminal):

        def announce(name: str, total: int) -> OnTokens:
            if not quiet:
                console.print(f"running {name} ...", highlight=False)
            return lambda tokens: None

        yield announce
        return

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as progress:

        def finish_all() -> None:
            for task in progress.tasks:  # a text may end before max_tokens
                progress.update(task.id, completed=task.total)

        def add(name: str, total: int) -> OnTokens:
            finish_all()
            bar = progress.add_task(name, total=None)  # pulses while the engine starts
            return lambda tokens: progress.update(bar, total=total, completed=tokens)

        yield add
        finish_all()
