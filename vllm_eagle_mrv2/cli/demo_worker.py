"""One engine of the demo, in its own process: ``python -m vllm_eagle_mrv2.cli.demo_worker EVENTS_FD < job.json``.

Every engine of the demo gets a process of its own, so that none inherits another's memory, graphs or counters.  The
`Job` comes in on stdin.  What happens goes out on the given file descriptor, one JSON object a line: ``{"tokens": n}``
while it generates, then ``{"result": Measurement}`` or ``{"error": text}``.  stdout and stderr are vLLM's log.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from vllm_eagle_mrv2.cli.demo_types import Job, Measurement

PROMPT_ROOM = 256
"""Tokens that the longest prompt may have, so that the KV cache need not hold the checkpoint's whole context."""
WARM_UP_TOKENS = 8
_COUNTERS = "vllm:spec_decode_num_"


def measure(job: Job, on_progress: Callable[[int], None]) -> Measurement:
    """Start an engine, warm it up, and measure one greedy generation of all prompts at once.

    Args:
        job: what to run.
        on_progress: called with the number of tokens generated so far.
    """
    import vllm
    from vllm.platforms import current_platform

    llm = vllm.LLM(
        model=job.model,
        speculative_config=job.speculative_config,
        dtype=job.dtype,
        max_model_len=PROMPT_ROOM + job.max_tokens,
        max_num_seqs=len(job.prompts),
        gpu_memory_utilization=job.gpu_memory_utilization,
        enforce_eager=current_platform.is_cpu(),
        enable_prefix_caching=False,  # or the warm-up would do the prefills of the measured generation
        disable_log_stats=False,
        seed=0,
    )
    _generate(llm, job.prompts, min(job.max_tokens, WARM_UP_TOKENS), lambda tokens: None)
    on_progress(0)
    before = _spec_decode_counters(llm)
    began = time.perf_counter()
    outputs, iterations = _generate(llm, job.prompts, job.max_tokens, on_progress)
    seconds = time.perf_counter() - began
    counters = {
        name: [now - then for now, then in zip(values, before.get(name, [0] * len(values)), strict=True)]
        for name, values in _spec_decode_counters(llm).items()
    }
    return Measurement(
        vllm_version=vllm.__version__,
        device=current_platform.device_type,
        device_name=current_platform.get_device_name() or current_platform.device_type,
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        texts=[output.outputs[0].text for output in outputs],
        seconds=seconds,
        iterations=iterations,
        num_drafts=sum(counters.get("drafts", [])),
        num_draft_tokens=sum(counters.get("draft_tokens", [])),
        num_accepted_tokens=sum(counters.get("accepted_tokens", [])),
        num_accepted_tokens_per_pos=counters.get("accepted_tokens_per_pos", []),
        **_speculator_classes(llm),
    )


def _generate(
    llm: Any, prompts: list[str], max_tokens: int, on_progress: Callable[[int], None]
) -> tuple[list[Any], int]:
    """The outputs of the prompts in their order, and how many iterations of the engine they took."""
    from vllm import SamplingParams

    engine, tokenizer = llm.llm_engine, llm.get_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        # The form that LLM.generate itself hands on; generate() would report a request only when it is finished.
        engine.add_request(str(index), {"type": "token", "prompt_token_ids": tokenizer.encode(prompt)}, params)
    latest: dict[int, Any] = {}
    iterations = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        iterations += bool(outputs)
        latest.update({int(output.request_id): output for output in outputs})
        on_progress(sum(len(output.outputs[0].token_ids) for output in latest.values()))
    return [latest[index] for index in range(len(prompts))], iterations


def _spec_decode_counters(llm: Any) -> dict[str, list[int]]:
    """vLLM's counters of speculative decoding, each as a list: one value, or one for each draft position."""
    return {
        metric.name.removeprefix(_COUNTERS): list(metric.values) if hasattr(metric, "values") else [metric.value]
        for metric in llm.get_metrics()
        if metric.name.startswith(_COUNTERS)
    }


def _speculator_classes(llm: Any) -> dict[str, Any]:
    """Which classes drafted, found in the engine of this process."""
    engine = llm.llm_engine.engine_core.engine_core
    speculator = engine.model_executor.driver_worker.worker.model_runner.speculator
    if speculator is None:
        return {}
    managers = [value for value in vars(speculator).values() if _is_graph_manager(value)]
    return {
        "speculator_class": _class_name(speculator),
        "graph_manager_classes": [_class_name(manager) for manager in managers],
        # Hosts of other packages are built of this one's classes too.
        "is_eagle_mrv2": any(base.__module__.startswith("vllm_eagle_mrv2.") for base in type(speculator).__mro__),
    }


def _is_graph_manager(value: object) -> bool:
    return any(base.__name__ == "CudaGraphManager" for base in type(value).__mro__)


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def one_line(error: BaseException) -> str:
    """An error as one line; vLLM's validation errors span several and end in a link."""
    text = str(error).partition("For further information")[0]
    return " ".join(text.split()) or type(error).__name__


def main() -> int:
    """Run the job on stdin and send its events to the file descriptor in the first argument."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8") as events:

        def send(event: dict[str, object]) -> None:
            events.write(json.dumps(event) + "\n")

        try:
            measurement = measure(Job.model_validate_json(sys.stdin.read()), lambda tokens: send({"tokens": tokens}))
        except Exception as error:
            traceback.print_exc()
            send({"error": one_line(error)})
            return 1
        send({"result": measurement.model_dump()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
