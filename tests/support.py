"""Real engines for the tests: the demo pair on the installed vLLM, in this process."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

PAIR = Path(str(files("vllm_eagle_mrv2"))) / "demo_pair"
DEPLOY = Path(__file__).parents[1] / "deploy"


def has_cuda() -> bool:
    """Whether this machine can run the GPU tests."""
    import torch

    return torch.cuda.is_available()


def held_out_prompts(count: int) -> list[str]:
    """Prompts that the demo pair was not trained on; they repeat with other endings cut where more are asked for."""
    texts: list[str] = json.loads((PAIR / "prompts.json").read_text())
    prompts = [text.rsplit(" ", cut)[0] for cut in range(1, 9) for text in texts]
    return prompts[:count]


@contextmanager
def small_heap() -> Iterator[None]:
    """Nobody collects what is there already; vLLM collects a dozen times an engine, half a second each."""
    gc.freeze()
    try:
        with patch.multiple(gc, freeze=DEFAULT, unfreeze=DEFAULT):
            yield
    finally:
        gc.unfreeze()  # the last engine is there already, which a test drops only when it has the next


def engine_arguments(
    method: str | None,
    *,
    family: str = "eagle",
    k: int = 3,
    speculative: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Arguments of a vLLM engine on the demo pair: ``method`` None, ``eagle``, ``eagle3`` or ``eagle_mrv2``."""
    arguments: dict[str, Any] = {
        "model": str(PAIR / "target"),
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "seed": 0,
        "disable_log_stats": False,
        # A test of ours compares drafting; cached prefixes would let one request feed another.
        "enable_prefix_caching": False,
    }
    if has_cuda():
        arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**30}
    else:
        arguments |= {"dtype": "float32", "kv_cache_memory_bytes": 2**26, "enforce_eager": True}
    if method is not None:
        arguments["speculative_config"] = {
            "method": method,
            "model": str(PAIR / family),
            "num_speculative_tokens": k,
            **(speculative or {}),
        }
    if options is not None:
        arguments["additional_config"] = {"eagle_mrv2": options}
    return arguments | overrides


@contextmanager
def same_runner(method: str | None) -> Iterator[None]:
    """Context in which stock's methods run on Model Runner V2; ours selects it by itself."""
    if method != "eagle_mrv2":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    try:
        yield
    finally:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)


@contextmanager
def engine(method: str | None, **arguments: Any) -> Iterator[Any]:
    """A vLLM engine with the `engine_arguments`."""
    from vllm import LLM
    from vllm.compilation import monitor
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    # 0.20 never lifts the ban on capturing that its first engine ends with.
    monitor.set_cudagraph_capturing_enabled(True)
    llm = None
    try:
        with small_heap(), same_runner(method):
            llm = LLM(**engine_arguments(method, **arguments))
            yield llm
    finally:
        if llm is not None:
            with suppress(AttributeError):  # 0.20 calls a shutdown that its V2 runner does not have
                llm.llm_engine.engine_core.shutdown()
        del llm
        if arguments.get("tensor_parallel_size", 1) == 1:  # workers of their own leave nothing here
            gc.collect()
            cleanup_dist_env_and_memory()


def runner_of(llm: Any) -> Any:
    """The model runner of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def speculator_of(llm: Any) -> Any:
    """The speculator of an in-process engine."""
    return runner_of(llm).speculator


def greedy(llm: Any, prompts: Sequence[str], max_tokens: int = 32, **sampling: Any) -> list[list[int]]:
    """Greedy token ids of every prompt."""
    from vllm import SamplingParams

    arguments = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    outputs = llm.generate(list(prompts), SamplingParams(**arguments), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def recorded_log() -> Iterator[list[str]]:
    """What our logger says meanwhile.

    A filter, since vLLM's loggers pass nothing on to caplog, and lose their handlers whenever vLLM configures them.
    """
    log: list[str] = []

    def listen(record: logging.LogRecord) -> bool:
        log.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.eagle_mrv2")
    logger.addFilter(listen)
    try:
        yield log
    finally:
        logger.removeFilter(listen)


@contextmanager
def recorded_slots(speculator: Any) -> Iterator[list[bool]]:
    """For each draft decode: whether every live request writes its keys and values where its position belongs."""
    from packaging.version import Version
    from release_under_test import release

    right: list[bool] = []
    loop, tables = speculator.drafter.loop, speculator.block_tables
    live = 0

    def propose(batch: Any, original: Any = loop.propose) -> Any:
        nonlocal live
        live = 0 if batch.dummy_run else batch.num_reqs
        return original(batch)

    def check() -> None:
        block_size = tables.block_sizes[0]
        for row in range(live):
            position = int(loop.buffers.positions[row])
            owned = tables.num_blocks.np[0, int(loop.buffers.idx_mapping[row])]
            if release < Version("0.23") and position // block_size >= owned:
                continue  # there a new request has no blocks yet for drafts beyond its prompt's last block
            block = int(tables.input_block_tables[0][row, position // block_size])
            right.append(int(tables.slot_mappings[0, row]) == block * block_size + position % block_size)

    adapter = speculator.drafter.adapter
    prefills, decodes = speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager

    def replay_decodes(descriptor: Any, original: Any = decodes.run_fullgraph) -> None:
        fused = adapter.refreshes_in_graph
        if not fused:
            check()
        original(descriptor)
        if fused:  # all steps ran; the buffers are those of the last, whose positions are not moved on
            check()

    def replay_prefill(descriptor: Any, original: Any = prefills.run_fullgraph) -> None:
        original(descriptor)
        if descriptor in loop.phase_graphs.descriptors:
            check()

    def decode(*args: Any, original: Any = loop.decode) -> None:
        check()
        original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "propose", propose)
        patch.setattr(loop, "decode", decode)
        patch.setattr(prefills, "run_fullgraph", replay_prefill)
        patch.setattr(decodes, "run_fullgraph", replay_decodes)
        yield right


def recorded_max_seq_lens(speculator: Any) -> set[int]:
    """The ``max_seq_len`` of every build that the draft's metadata builders make from now on; filled as they come."""
    seen: set[int] = set()
    for group in chain.from_iterable(speculator.attn_groups):
        builder = group.get_metadata_builder(0)

        def build(
            common_prefix_len: int, common_attn_metadata: Any, *args: Any, original: Any = builder.build, **kwargs: Any
        ) -> Any:
            seen.add(common_attn_metadata.max_seq_len)
            return original(common_prefix_len, common_attn_metadata, *args, **kwargs)

        builder.build = build
    return seen


class Acceptance:
    """What vLLM's own counters say of the drafts made between two readings."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._before = self._read()

    def _read(self) -> dict[str, list[float]]:
        read: dict[str, list[float]] = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode_"):
                values = getattr(metric, "values", None)
                read[metric.name.removeprefix("vllm:spec_decode_")] = (
                    list(values) if values is not None else [metric.value]
                )
        return read

    def _since(self, name: str) -> list[float]:
        now, before = self._read()[name], self._before.get(name, [])
        before = before or [0.0] * len(now)
        return [late - early for late, early in zip(now, before, strict=True)]

    @property
    def drafts(self) -> float:
        """Draft phases whose tokens were verified, counted once a request."""
        return self._since("num_drafts")[0]

    @property
    def length(self) -> float:
        """Mean tokens per verification: the bonus token and the accepted drafts."""
        return 1 + self._since("num_accepted_tokens")[0] / self.drafts

    @property
    def by_position(self) -> list[float]:
        """Share of drafts accepted at each position."""
        return [accepted / self.drafts for accepted in self._since("num_accepted_tokens_per_pos")]


def recorded_drafts(speculator: Any) -> list[list[int]]:
    """The draft tokens of each request and batch from now on; filled as they come."""
    drafts: list[list[int]] = []
    propose = speculator.drafter.loop.propose

    def proposing(batch: Any) -> Any:
        drafted = propose(batch)
        drafts.extend(drafted.tolist())
        return drafted

    speculator.drafter.loop.propose = proposing
    return drafts


def multiply_as_on_a_gpu(monkeypatch: Any) -> None:
    """Have vLLM multiply by ``F.linear``, as on an NVIDIA GPU, so that those products can become ours."""
    from vllm.model_executor.layers import linear as vllm_linear
    from vllm.model_executor.layers import utils, vocab_parallel_embedding

    from vllm_eagle_mrv2.draft_model import linear

    for module in (vllm_linear, utils, vocab_parallel_embedding):
        if hasattr(module, "dispatch_unquantized_gemm"):
            monkeypatch.setattr(module, "dispatch_unquantized_gemm", lambda *_: utils.default_unquantized_gemm)
    monkeypatch.setattr(linear, "_runs_kernels", lambda weight: True)


@contextmanager
def chosen_draft_lengths(numbers: Iterator[int]) -> Iterator[list[int]]:
    """Have the numbers of draft tokens of ``draft_length: auto`` come from here; yields those that were taken."""
    from vllm_eagle_mrv2.draft_length.chooser import DraftLength

    taken: list[int] = []

    def choose(self: DraftLength, requests: int) -> int:
        assert requests > 0
        self.length = next(numbers)
        taken.append(self.length)
        return self.length

    with patch.object(DraftLength, "choose", choose):
        yield taken


def random_draft_lengths(most: int, seed: int = 0) -> Iterator[int]:
    """Numbers of draft tokens from none to the most, one after the other at random."""
    draw = random.Random(seed)
    while True:
        yield draw.randint(0, most)
