"""A bench engine in its own process (`cli.common.engine_process`): takes a `Job`, then gives a `Round` a `Batch`."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

from vllm_eagle_mrv2.cli.bench.types import Batch, Round
from vllm_eagle_mrv2.cli.common.draft_counters import counted_since, read_counters
from vllm_eagle_mrv2.cli.common.engine_process import serve
from vllm_eagle_mrv2.cli.common.types import Job
from vllm_eagle_mrv2.cli.common.worker import Worker, engine_arguments, percentile, started


class BenchEngine:
    """A live engine and the prompts that it is measured with."""

    def __init__(self, job: Job) -> None:
        """Start the engine."""
        import vllm

        self._llm = vllm.LLM(**engine_arguments(job))
        self._ignore_eos = job.ignore_eos
        self._prompts = [
            self._llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt for prompt in job.prompts
        ]
        self.started = started()

    def measure(self, batch: Batch) -> Round:
        """Generate greedily for the first prompts, all added at once, and time every output.

        The time to first token starts when the scheduler may begin with the batch.  The inter-token latency is the time
        between successive outputs of a request; n tokens that one iteration yields after a gap count gap / n each.

        Raises:
            ValueError: a prompt leaves no room in the context for the tokens to generate.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = [self._prompts[number % len(self._prompts)] for number in range(batch.size)]
        self._check_length(max(map(len, prompts)), batch.max_tokens)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=batch.max_tokens,
            ignore_eos=self._ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine, clock = self._llm.llm_engine, time.perf_counter
        before = read_counters()
        # The scheduler waits until it has all requests.  Otherwise every round would schedule them into different
        # batches, and in half precision the batch shape decides near-ties.
        self._llm.sleep(level=0)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"type": "token", "prompt_token_ids": prompt}, params)
        steps: list[tuple[float, list[Any]]] = []
        began = clock()
        self._llm.wake_up(tags=["scheduling"])
        while engine.has_unfinished_requests():
            outputs = engine.step()
            steps.append((clock(), outputs))
        seconds = clock() - began
        return Round(seconds=seconds, **counted_since(before), **_read_steps(steps, began, batch.size))

    def _check_length(self, longest: int, max_tokens: int) -> None:
        limit = self._llm.model_config.max_model_len
        if longest + max_tokens > limit:
            raise ValueError(
                f"the longest prompt has {longest} tokens, which with {max_tokens} to generate is more than the "
                f"context of {limit}; lower --tokens, shorten the prompts or raise --max-model-len"
            )


def _read_steps(steps: list[tuple[float, list[Any]]], began: float, size: int) -> dict[str, Any]:
    """Token ids and latencies of the requests, from the (time, outputs) of every step."""
    token_ids: list[list[int]] = [[] for _ in range(size)]
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(size)]
    for at, outputs in steps:
        for output in outputs:
            new, number = output.outputs[0].token_ids, int(output.request_id)
            token_ids[number] += new
            if new:
                arrivals[number].append((at, len(new)))
    gaps = [gap for request in arrivals for gap in inter_token_latencies(request)]
    firsts = [request[0][0] - began for request in arrivals]
    return {
        "token_ids": token_ids,
        "iterations": sum(1 for _, outputs in steps if outputs),
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "ttft_p50_ms": percentile(firsts, 50) * 1e3,
        "ttft_p99_ms": percentile(firsts, 99) * 1e3,
    }


def inter_token_latencies(arrivals: list[tuple[float, int]]) -> list[float]:
    """Inter-token latency in seconds of every token of a request after its first output.

    Args:
        arrivals: (time in seconds, new tokens) of each output.
    """
    return [(now - then) / tokens for (then, _), (now, tokens) in pairwise(arrivals) for _ in range(tokens)]


if __name__ == "__main__":
    sys.exit(serve(Worker(BenchEngine, Batch).answer))
