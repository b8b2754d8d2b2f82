"""Live engines that differ only in the speculator, measured in turn."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.bench.shapes import OWN_HEAD_PLUGIN, Shape, kv_cache_bytes, write_configs, write_own_head
from vllm_eagle_mrv2.cli.bench.types import Batch, Job, Round, Row, Started
from vllm_eagle_mrv2.cli.engine_process import EngineProcess, environment
from vllm_eagle_mrv2.cli.errors import CommandError
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.options import OPTIONS_KEY

AnyRow = TypeVar("AnyRow")
WARM_UP_TOKENS = 32
MAX_NUM_SEQS = 64
"""``max_num_seqs`` of all engines unless a batch is larger; the sizes of captured graphs follow from it."""
CORES = 4
"""CPU cores for each GPU of an engine: as many as its threads keep busy."""
FIXED_KV_CACHE = "kv_cache_memory_bytes"


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


def shape_subject(
    folder: Path, shape: Shape, family: str, prompts: list[list[int]], tokens_in_flight: int = 0
) -> Subject:
    """A subject with random weights in a published shape; its configurations are written into ``folder``.

    Args:
        tokens_in_flight: of all requests at a time; the KV cache has room for them.
    """
    target, draft = write_configs(folder, shape, family)
    arguments = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 8192,  # as vLLM serves on an H100 or H200
        FIXED_KV_CACHE: max(4 * 2**30, kv_cache_bytes(shape, tokens_in_flight)),
    }
    title = f"shape {shape.value}, {family}, random weights"
    plugins = {OWN_HEAD_PLUGIN: write_own_head(folder / "plugins")} if family == "eagle3" else {}
    return Subject(title, target, draft, family, prompts, arguments, offline=True, plugins=plugins)


@dataclass(frozen=True)
class Setup:
    """An engine of ``eagle_mrv2``, and how it is set up."""

    subject: Subject
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``eagle_mrv2``."""
    acceptance: Sequence[float] = ()
    """Share of drafts that are accepted at random up to each position, at least K of them; the model's own if empty."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """The user's own ``LLM`` arguments for all engines."""
    max_num_seqs: int = MAX_NUM_SEQS
    gpu_memory_utilization: float | None = None
    ignore_eos: bool = True
    verbose: bool = False
    worker: str = "vllm_eagle_mrv2.cli.bench.worker"
    """The module that an engine's process runs."""

    @property
    def chooses_length(self) -> bool:
        """Whether ``eagle_mrv2`` chooses the number of draft tokens at run time."""
        return self.options.get("draft_length") == "auto"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the engines."""
        return (METHOD,)

    @contextmanager
    def engines(self, k: int) -> Iterator[Engines]:
        """The live engines, which draft ``k`` tokens.

        Raises:
            CommandError: one of them does not start.
        """
        jobs, started = self.jobs(k), []
        with ExitStack() as stack:
            processes = [
                stack.enter_context(self._process(name, job.method)) for name, job in zip(self.names, jobs, strict=True)
            ]
            # An engine that sizes its KV cache by the free memory must start while no other engine allocates.
            alone = FIXED_KV_CACHE not in jobs[0].arguments | jobs[0].overrides
            for process, job in zip(processes, jobs, strict=True):
                process.send(job)
                if alone:
                    started.append(process.receive())
            if not alone:
                started = [process.receive() for process in processes]
            engines = Engines(k, self.names, tuple(processes), Started.model_validate(started[0]), self.chooses_length)
            if len(processes) > 1 and engines.started.device != "cpu":
                self._share_cores(*processes)
            yield engines
            for process in processes:
                process.finish()

    def measured(
        self, ks: Sequence[int], rows_of: Callable[[Engines], Iterable[AnyRow]], on_start: Callable[[int], object]
    ) -> tuple[Started, list[AnyRow], str | None]:
        """Measure with every K; return where, the rows, and what ended the measurement after some of them.

        Raises:
            CommandError: an engine failed before any row was measured.
        """
        rows: list[AnyRow] = []
        started: Started | None = None
        failed: str | None = None
        try:
            for k in ks:
                on_start(k)
                with self.engines(k) as engines:
                    started = engines.started
                    for row in rows_of(engines):
                        rows.append(row)
        except (CommandError, KeyboardInterrupt) as error:
            if not rows:
                raise
            failed = str(error) or "interrupted"
        assert started is not None
        return started, rows, failed

    def _share_cores(self, *engines: EngineProcess) -> None:
        """Restrict engines that run in turn to the same few cores, so that neither gets better ones.

        Without this, two identical engines differed by several per cent when an iteration was bound by the CPU.
        """
        gpus = math.prod(int(self.overrides.get(f"{way}_parallel_size", 1)) for way in ("tensor", "pipeline"))
        cores = sorted(os.sched_getaffinity(0))[-CORES * gpus :]
        for engine in engines:
            engine.keep_to(cores)

    def _process(self, name: str, method: str | None) -> EngineProcess:
        return EngineProcess(self.worker, name, self._environment(name, method), self.verbose)

    def _environment(self, name: str, method: str | None) -> dict[str, str]:
        """The environment of an engine."""
        variables = environment(method, **({"HF_HUB_OFFLINE": "1"} if self.subject.offline else {}))
        return variables | self.subject.environment(variables)

    def jobs(self, k: int) -> tuple[Job, ...]:
        """The jobs of the engines."""
        return (self.job(k, f"{METHOD}:{self.subject.family}", self.options),)

    def job(self, k: int, method: str, options: dict[str, Any], further: Mapping[str, Any] = {}) -> Job:
        """The job of an engine that drafts ``k`` tokens with a method.

        Args:
            options: of ``eagle_mrv2``.
            further: for the speculative configuration.
        """
        overrides = dict(self.overrides)
        speculative = {**overrides.pop("speculative_config", {}), "method": method, "num_speculative_tokens": k}
        if self.subject.draft is not None:
            speculative["model"] = self.subject.draft
        if self.acceptance:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_rates"] = list(self.acceptance[:k])
        speculative.update(further)
        if options:
            overrides["additional_config"] = {**overrides.get("additional_config", {}), OPTIONS_KEY: options}
        fixed = FIXED_KV_CACHE in self.subject.arguments | overrides
        arguments = {
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization or (0.1 if fixed else 0.84 / len(self.names)),
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
class Comparison(Setup):
    """The two sides to compare, and how their engines are set up."""

    against_ours: bool = False
    """Compare with ``eagle_mrv2`` without the behaviours in ``disable``, instead of with the stock speculator."""
    before: Path | None = None
    """Folder of another version of this package, whose ``eagle_mrv2`` is the one to compare with."""
    stock_speculative: dict[str, Any] = field(default_factory=dict)
    """What to add to the speculative configuration of the stock speculator."""
    disable: list[str] = field(default_factory=list)
    control: bool = False
    """Start the engine to compare against twice, to see by how much two equal engines differ."""
    baseline: bool = False
    """Start an engine without speculation, too."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the engines."""
        against, ours = self._names
        again, baseline = (f"{against} again",), ("no speculation",)
        return (against, *(again if self.control else ()), *(baseline if self.baseline else ()), ours)

    @property
    def _names(self) -> tuple[str, str]:
        if self.before is not None:
            return (f"{METHOD} of {self.before.name}", METHOD)
        reduced = f"{METHOD} without {', '.join(self.disable)}" if self.disable else METHOD
        return (reduced, METHOD) if self.against_ours else ("stock", reduced)

    def jobs(self, k: int) -> tuple[Job, ...]:
        """The jobs of the engines."""
        ours = f"{METHOD}:{self.subject.family}"
        reduced = self.options | ({"disable": self.disable} if self.disable else {})
        if self.against_ours or self.before is not None:
            against, last = self.job(k, ours, reduced), self.job(k, ours, self.options)
        else:
            against, last = self.job(k, self.subject.family, {}, self.stock_speculative), self.job(k, ours, reduced)
        baseline = against.model_copy(update={"speculative_config": None})
        return (against, *((against,) if self.control else ()), *((baseline,) if self.baseline else ()), last)

    def _environment(self, name: str, method: str | None) -> dict[str, str]:
        variables = super()._environment(name, method)
        if name != METHOD and self.before is not None:
            variables["PYTHONPATH"] = _ahead_of_path(variables, str(self.before.resolve()))
        return variables


@dataclass(frozen=True)
class Engines:
    """Live engines: first the one to compare against, last ``eagle_mrv2``."""

    k: int
    names: tuple[str, ...]
    processes: tuple[EngineProcess, ...]
    started: Started
    chooses_length: bool = False
    """Whether ``eagle_mrv2`` chooses the number of draft tokens at run time, up to ``k``."""

    def compare(
        self, batch: int, rounds: int, max_tokens: int, on_round: Callable[[int], None] = lambda done: None
    ) -> Row:
        """Measure a batch size with two engines.

        Raises:
            CommandError: an engine failed.
        """
        for process in 2 * self.processes:
            process.ask(Batch(size=batch, max_tokens=min(max_tokens, WARM_UP_TOKENS)))
        jobs = rounds * [Batch(size=batch, max_tokens=max_tokens)]
        against, ours = ([Round.model_validate(one) for one in taken] for taken in self.in_turn(jobs, on_round))
        first, last = self.names
        return Row(k=self.k, batch=batch, names=(first, last), against=against, eagle_mrv2=ours)

    def in_turn(
        self, jobs: Sequence[BaseModel], on_round: Callable[[int], None] = lambda done: None
    ) -> list[list[Any]]:
        """The answers of each engine to each job: every round a job, of each engine while the others idle.

        Raises:
            CommandError: an engine failed.
        """
        return in_turn([process.ask for process in self.processes], jobs, on_round)


def in_turn(
    asked: Sequence[Callable[[BaseModel], Any]],
    jobs: Sequence[BaseModel],
    on_round: Callable[[int], None] = lambda done: None,
) -> list[list[Any]]:
    """The answers of each of those asked to each job: every round a job, of one after the other.

    The order alternates, so that none always goes first.
    """
    answers: list[list[Any]] = [[] for _ in asked]
    order = list(range(len(asked)))
    for number, job in enumerate(jobs, start=1):
        order.reverse()
        for place in order:
            answers[place].append(asked[place](job))
        on_round(number)
    return answers
