"""Two live engines that differ only in the speculator, measured in turn."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_eagle_mrv2.cli.bench.shapes import OWN_HEAD_PLUGIN, Shape, token_prompts, write_configs, write_own_head
from vllm_eagle_mrv2.cli.bench.types import Batch, Job, Round, Row, Started
from vllm_eagle_mrv2.cli.engine_process import EngineProcess, environment
from vllm_eagle_mrv2.config.method import METHOD
from vllm_eagle_mrv2.config.options import OPTIONS_KEY

WARM_UP_TOKENS = 32
MAX_NUM_SEQS = 64
"""``max_num_seqs`` of both engines unless a batch is larger; the sizes of captured graphs follow from it."""
CORES = 4
"""CPU cores for each GPU of an engine: as many as its threads keep busy."""
_FIXED_KV_CACHE = "kv_cache_memory_bytes"


def _ahead_of_path(variables: Mapping[str, str], *folders: str) -> str:
    """``PYTHONPATH`` with these folders first."""
    return os.pathsep.join([*folders, *filter(None, [variables.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Subject:
    """The models to measure, with their prompts and engine arguments."""

    title: str
    model: str
    draft: str | None
    """Path or hub name of the head; None for an MTP head inside the target."""
    family: str
    prompts: list[str] | list[list[int]]
    arguments: dict[str, Any]
    """Arguments for ``LLM``."""
    offline: bool = False
    plugins: dict[str, str] = field(default_factory=dict)
    """vLLM plugins that the engines load in addition to the installed ones: name -> folder."""

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that the plugins change."""
        if not self.plugins:
            return {}
        changed = {"PYTHONPATH": _ahead_of_path(variables, *self.plugins.values())}
        if "VLLM_PLUGINS" in variables:
            changed["VLLM_PLUGINS"] = ",".join([variables["VLLM_PLUGINS"], *self.plugins])
        return changed


def shape_subject(folder: Path, shape: Shape, family: str, largest_batch: int) -> Subject:
    """A subject with random weights in a published shape; its configurations are written into ``folder``."""
    target, draft = write_configs(folder, shape, family)
    arguments = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        _FIXED_KV_CACHE: 4 * 2**30,
    }
    title = f"shape {shape.value}, {family}, random weights"
    plugins = {OWN_HEAD_PLUGIN: write_own_head(folder / "plugins")} if family == "eagle3" else {}
    prompts = token_prompts(largest_batch)
    return Subject(title, target, draft, family, prompts, arguments, offline=True, plugins=plugins)


@dataclass(frozen=True)
class Comparison:
    """The two sides to compare, and how their engines are set up."""

    subject: Subject
    against_ours: bool = False
    """Compare with ``eagle_mrv2`` without the behaviours in ``disable``, instead of with the stock speculator."""
    before: Path | None = None
    """Folder of another version of this package, whose ``eagle_mrv2`` is the one to compare with."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``eagle_mrv2``."""
    stock_speculative: dict[str, Any] = field(default_factory=dict)
    """What to add to the speculative configuration of the stock speculator."""
    disable: list[str] = field(default_factory=list)
    overrides: dict[str, Any] = field(default_factory=dict)
    """The user's own ``LLM`` arguments for both engines."""
    max_num_seqs: int = MAX_NUM_SEQS
    gpu_memory_utilization: float | None = None
    ignore_eos: bool = True
    verbose: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two sides."""
        if self.before is not None:
            return (f"{METHOD} of {self.before.name}", METHOD)
        reduced = f"{METHOD} without {', '.join(self.disable)}" if self.disable else METHOD
        return (reduced, METHOD) if self.against_ours else ("stock", reduced)

    @contextmanager
    def engines(self, k: int) -> Iterator[EnginePair]:
        """Two live engines that draft ``k`` tokens.

        Raises:
            CommandError: one of them does not start.
        """
        jobs = self.jobs(k)
        methods = [str(job.speculative_config["method"]) for job in jobs]
        with self._process(0, methods[0]) as first, self._process(1, methods[1]) as second:
            first.send(jobs[0])
            # An engine that sizes its KV cache by the free memory must start while no other engine allocates.
            alone = _FIXED_KV_CACHE not in jobs[0].arguments | jobs[0].overrides
            started = first.receive() if alone else None
            second.send(jobs[1])
            started = started or first.receive()
            second.receive()
            pair = EnginePair(k, self.names, (first, second), Started.model_validate(started))
            if pair.started.device != "cpu":
                self._share_cores(first, second)
            yield pair
            for process in (first, second):
                process.finish()

    def _share_cores(self, *engines: EngineProcess) -> None:
        """Restrict engines that run in turn to the same few cores, so that neither gets better ones.

        Without this, two identical engines differed by several per cent when an iteration was bound by the CPU.
        """
        gpus = math.prod(int(self.overrides.get(f"{way}_parallel_size", 1)) for way in ("tensor", "pipeline"))
        cores = sorted(os.sched_getaffinity(0))[-CORES * gpus :]
        for engine in engines:
            engine.keep_to(cores)

    def _process(self, side: int, method: str) -> EngineProcess:
        variables = environment(method, **({"HF_HUB_OFFLINE": "1"} if self.subject.offline else {}))
        variables |= self.subject.environment(variables)
        if side == 0 and self.before is not None:
            variables["PYTHONPATH"] = _ahead_of_path(variables, str(self.before.resolve()))
        return EngineProcess("vllm_eagle_mrv2.cli.bench.worker", self.names[side], variables, self.verbose)

    def jobs(self, k: int) -> tuple[Job, Job]:
        """The jobs of both engines."""
        ours = f"{METHOD}:{self.subject.family}"
        reduced = self.options | ({"disable": self.disable} if self.disable else {})
        if self.against_ours or self.before is not None:
            return self.job(k, ours, reduced), self.job(k, ours, self.options)
        stock = self.job(k, self.subject.family, {})
        stock.speculative_config.update(self.stock_speculative)
        return stock, self.job(k, ours, reduced)

    def job(self, k: int, method: str, options: dict[str, Any]) -> Job:
        """The job of an engine that drafts ``k`` tokens with a method; ``options`` are those of ``eagle_mrv2``."""
        overrides = dict(self.overrides)
        speculative = {**overrides.pop("speculative_config", {}), "method": method, "num_speculative_tokens": k}
        if self.subject.draft is not None:
            speculative["model"] = self.subject.draft
        if options:
            overrides["additional_config"] = {**overrides.get("additional_config", {}), OPTIONS_KEY: options}
        fixed = _FIXED_KV_CACHE in self.subject.arguments
        arguments = {
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization or (0.1 if fixed else 0.42),
            "enable_prefix_caching": False,  # or a round would reuse the prefills of the previous one
            "disable_log_stats": False,
            "seed": 0,
            **self.subject.arguments,
        }
        return Job(
            model=self.subject.model,
            speculative_config=speculative,
            arguments=arguments,
            overrides=overrides,
            prompts=self.subject.prompts,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class EnginePair:
    """Two live engines: first the one to compare against, then ``eagle_mrv2``."""

    k: int
    names: tuple[str, str]
    processes: tuple[EngineProcess, EngineProcess]
    started: Started

    def compare(
        self, batch: int, rounds: int, max_tokens: int, on_round: Callable[[int], None] = lambda done: None
    ) -> Row:
        """Measure a batch size: each engine once a round, alternating which goes first, while the other idles.

        Raises:
            CommandError: an engine failed.
        """
        for process in 2 * self.processes:
            process.ask(Batch(size=batch, max_tokens=min(max_tokens, WARM_UP_TOKENS)))
        taken: tuple[list[Round], list[Round]] = ([], [])
        for number in range(rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                measured = self.processes[side].ask(Batch(size=batch, max_tokens=max_tokens))
                taken[side].append(Round.model_validate(measured))
            on_round(number + 1)
        return Row(k=self.k, batch=batch, names=self.names, against=taken[0], eagle_mrv2=taken[1])
