"""``vllm-eagle-mrv2 demo``: the same prompts without speculation, with stock EAGLE and with ``eagle_mrv2``.

The three engines use the installed vLLM on Model Runner V2, each in its own process (`cli.demo.worker`).  Decoding is
greedy, so all three must give the same tokens.

This holds in float32 only, which the demo uses by default.  In half precision the target's logits depend on the shape
of the batch, and verifying K + 1 tokens has another shape than decoding one.  Where two tokens nearly tie, stock
speculation may also choose the other one.  If the GPU has no attention backend for float32, the demo runs in bfloat16,
and ``eagle_mrv2`` has to match either the stock speculative run or the run without speculation.

Exit codes: 0, the tokens match in this sense and the ``eagle_mrv2`` speculator drafted them; 1, they do not match, it
did not draft, or an engine failed; 2, the demo could not be started as asked.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_eagle_mrv2.cli.common.arguments import MethodOptions, method_options
from vllm_eagle_mrv2.cli.common.engine_process import EngineProcess, environment
from vllm_eagle_mrv2.cli.common.errors import CommandError, reported
from vllm_eagle_mrv2.cli.common.installed import require_vllm
from vllm_eagle_mrv2.cli.common.pair import PairName, load_pair
from vllm_eagle_mrv2.cli.common.progress import OnProgress, Track, progress
from vllm_eagle_mrv2.cli.demo.report import FamilyReport, print_reports, to_json
from vllm_eagle_mrv2.cli.demo.types import DemoJob, Measurement
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.options import OPTIONS_KEY

_NO_FLOAT32 = "No valid attention backend"


class Heads(str, Enum):
    """Which heads to run."""

    eagle = "eagle"
    eagle3 = "eagle3"
    both = "both"


class Dtype(str, Enum):
    """What to compute in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def demo(
    pair: Annotated[PairName, typer.Option(help="smollm2: of pairs/smollm2, with eagle3.")] = PairName.packaged,
    family: Annotated[Heads | None, typer.Option(help="Which head (default: eagle; for smollm2 eagle3).")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens an iteration, K (default: 3; for smollm2 5).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate for each prompt.")] = 64,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of the held-out prompts, as one batch.")] = 4,
    model: Annotated[str | None, typer.Option(metavar="PATH", help="Target model instead of the packaged one.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="PATH", help="EAGLE head instead of the packaged one.")] = None,
    option: MethodOptions = "{}",
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
    with reported(errors, as_json=json_output):
        require_vllm()
        families = _families(pair, family, model, draft)
        options = method_options(option, [])
        with errors.status("preparing the models"):
            chosen = load_pair(pair)
        job = DemoJob(
            model=model or str(chosen.target),
            speculative_config=None,
            prompts=chosen.prompts[:num_prompts],
            chat=chosen.chat,
            max_tokens=max_tokens,
            dtype=Dtype.float32.value if dtype is Dtype.auto else dtype.value,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        drafts = {name: draft or str(chosen.heads[name]) for name in families}
        k = num_speculative_tokens or chosen.num_speculative_tokens
        with progress(errors, live=not verbose, quiet=json_output) as track:
            reports = _run_all(job, drafts, k, options, track, verbose, fall_back=dtype is Dtype.auto)
    if json_output:
        typer.echo(json.dumps(to_json(reports), indent=2))
    else:
        print_reports(reports, Console())
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def _families(pair: PairName, family: Heads | None, model: str | None, draft: str | None) -> list[str]:
    if pair is PairName.smollm2:
        if model is not None or draft is not None:
            raise CommandError("--pair smollm2 has a target and a head: leave out --model and --draft.", 2)
        if family not in (None, Heads.eagle3):
            raise CommandError("--pair smollm2 has a head of the family eagle3 only: leave out --family.", 2)
        return ["eagle3"]
    family = family or Heads.eagle
    if model is not None and draft is None:
        raise CommandError("--model needs --draft, an EAGLE head that was trained for it.", 2)
    if draft is not None and family is Heads.both:
        raise CommandError("--draft is one head: say which with --family eagle or --family eagle3.", 2)
    return ["eagle", "eagle3"] if family is Heads.both else [family.value]


# The engines


def _run_all(
    job: DemoJob,
    drafts: dict[str, str],
    num_speculative_tokens: int,
    options: dict[str, Any],
    track: Track,
    verbose: bool,
    fall_back: bool,
) -> list[FamilyReport]:
    """Run the baseline once, and both methods for every family.

    Args:
        job: the baseline's job.
        drafts: family -> path of its head.
        num_speculative_tokens: K.
        options: of ``eagle_mrv2``.
        track: makes a progress bar.
        verbose: show vLLM's log on stderr.
        fall_back: whether to use bfloat16 if float32 has no attention backend.
    """

    def run(name: str, method: str | None = None, head: str | None = None) -> Measurement:
        config = {"method": method, "model": head, "num_speculative_tokens": num_speculative_tokens}
        changed = {
            "speculative_config": config if method else None,
            "additional_config": {OPTIONS_KEY: options} if method == METHOD else {},
        }
        on_tokens = track(name, len(job.prompts) * job.max_tokens)
        return _run_engine(job.model_copy(update=changed), on_tokens, verbose)

    try:
        baseline = run("without speculation")
    except CommandError as error:
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


def _run_engine(job: DemoJob, on_tokens: OnProgress, verbose: bool) -> Measurement:
    """Run one engine in its own process.

    Raises:
        CommandError: the engine failed.
    """
    method = job.speculative_config["method"] if job.speculative_config else None
    # By default Triton multiplies float32 in TF32, which would bring the near-ties back.
    variables = environment(method, HF_HUB_OFFLINE="1", TRITON_F32_DEFAULT="ieee")
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # keeps the engine in the worker's process, for inspection
    with EngineProcess("vllm_eagle_mrv2.cli.demo.worker", method or "no speculation", variables, verbose) as engine:
        return Measurement.model_validate(engine.ask(job, on_tokens))
