"""One demo engine in its own process (`cli.common.engine_process`): answers a `DemoJob` with a `Measurement`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_eagle_mrv2.classes import class_path
from vllm_eagle_mrv2.cli.common.draft_counters import counted_since, read_counters
from vllm_eagle_mrv2.cli.common.engine_process import serve
from vllm_eagle_mrv2.cli.common.worker import started
from vllm_eagle_mrv2.cli.demo.types import DemoJob, Measurement

PROMPT_ROOM = 256
"""Maximum prompt length in tokens, so that the KV cache need not hold the checkpoint's whole context."""
WARM_UP_TOKENS = 8


def measure(job: DemoJob, on_progress: Callable[[int], None]) -> Measurement:
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
        additional_config=job.additional_config,
        dtype=job.dtype,
        max_model_len=PROMPT_ROOM + job.max_tokens,
        max_num_seqs=len(job.prompts),
        gpu_memory_utilization=job.gpu_memory_utilization,
        enforce_eager=current_platform.is_cpu(),
        enable_prefix_caching=False,  # or the measured generation would reuse the warm-up's prefills
        disable_log_stats=False,
        seed=0,
    )
    prompts = prompt_ids(llm.get_tokenizer(), job)
    _generate(llm, prompts, min(job.max_tokens, WARM_UP_TOKENS), lambda tokens: None)
    on_progress(0)
    before = read_counters()
    began = time.perf_counter()
    outputs, iterations = _generate(llm, prompts, job.max_tokens, on_progress)
    seconds = time.perf_counter() - began
    counted = counted_since(before)
    return Measurement(
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        texts=[output.outputs[0].text for output in outputs],
        seconds=seconds,
        iterations=iterations,
        **started().model_dump(),
        **counted,
        **_speculator_classes(llm),
    )


def prompt_ids(tokenizer: Any, job: DemoJob) -> list[list[int]]:
    """Token ids of the prompts; of requests to an assistant, up to where its answer begins."""
    if not job.chat:
        return [tokenizer.encode(prompt) for prompt in job.prompts]
    requests = [[{"role": "user", "content": prompt}] for prompt in job.prompts]
    template = tokenizer.apply_chat_template
    return [template(request, add_generation_prompt=True, return_dict=False) for request in requests]


def _generate(
    llm: Any, prompts: list[list[int]], max_tokens: int, on_progress: Callable[[int], None]
) -> tuple[list[Any], int]:
    """The outputs in the order of the prompts, and the number of engine iterations that they took."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index, prompt in enumerate(prompts):
        # The prompt form that LLM.generate uses; generate() itself would report a request only when it is finished.
        engine.add_request(str(index), {"type": "token", "prompt_token_ids": prompt}, params)
    latest: dict[int, Any] = {}
    iterations = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        iterations += bool(outputs)
        latest.update({int(output.request_id): output for output in outputs})
        on_progress(sum(len(output.outputs[0].token_ids) for output in latest.values()))
    return [latest[index] for index in range(len(prompts))], iterations


def _speculator_classes(llm: Any) -> dict[str, Any]:
    """The classes that draft in the engine of this process."""
    engine = llm.llm_engine.engine_core.engine_core
    speculator = engine.model_executor.driver_worker.worker.model_runner.speculator
    if speculator is None:
        return {}
    managers = [value for value in vars(speculator).values() if _is_graph_manager(value)]
    return {
        "speculator_class": class_path(type(speculator)),
        "graph_manager_classes": [class_path(type(manager)) for manager in managers],
        # Adapters of other packages also derive from this package's classes.
        "is_eagle_mrv2": any(base.__module__.startswith("vllm_eagle_mrv2.") for base in type(speculator).__mro__),
    }


def _is_graph_manager(value: object) -> bool:
    return any(base.__name__ == "CudaGraphManager" for base in type(value).__mro__)


if __name__ == "__main__":
    sys.exit(serve(lambda job, on_tokens: measure(DemoJob.model_validate_json(job), on_tokens)))
