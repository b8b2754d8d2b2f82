"""Live engines that differ only in the speculator, measured in turn."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common.engine_process import EngineProcess, ended_like_ctrl_c, environment
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.cli.common.subject import FIXED_KV_CACHE, Subject
from vllm_eagle_mrv2.cli.common.types import Job, Started
from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.config.options import OPTIONS_KEY

AnyRow = TypeVar("AnyRow")
Method = tuple[str | None, dict[str, Any]]
"""What an engine drafts with, None for no speculation, and its options of ``eagle_mrv2``."""
MAX_NUM_SEQS = 64
"""``max_num_seqs`` of all engines unless a batch is larger; the sizes of captured graphs follow from it."""
CORES = 4
"""CPU cores for each GPU of an engine: as many as its threads keep busy."""


@dataclass(frozen=True)
class Setup:
    """An engine of ``eagle_mrv2``, and how it is set up."""

    subject: Subject
    worker: str
    """The module that an engine's process runs."""
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

    @property
    def chooses_length(self) -> bool:
        """Whether ``eagle_mrv2`` chooses the number of draft tokens at run time."""
        return self.options.get("draft_length") == "auto"

    @property
    def ours(self) -> str:
        """The method of ``eagle_mrv2`` for the subject's head."""
        return f"{METHOD}:{self.subject.family}"

    @property
    def methods(self) -> dict[str, Method]:
        """The methods of the engines, by their names."""
        return {METHOD: (self.ours, self.options)}

    @contextmanager
    def engines(self, k: int) -> Iterator[Engines]:
        """The live engines, which draft ``k`` tokens.

        Raises:
            CommandError: one of them does not start.
        """
        jobs, started = self.jobs(k), []
        with ended_like_ctrl_c(), ExitStack() as stack:
            processes = {name: stack.enter_context(self._process(name, job.method)) for name, job in jobs.items()}
            # An engine that sizes its KV cache by the free memory must start while no other engine allocates.
            alone = any(FIXED_KV_CACHE not in job.arguments | job.overrides for job in jobs.values())
            for name, process in processes.items():
                process.send(jobs[name])
                if alone:
                    started.append(process.receive())
            if not alone:
                started = [process.receive() for process in processes.values()]
            engines = Engines(k, processes, Started.model_validate(started[0]), self.chooses_length)
            if len(processes) > 1 and engines.started.device != "cpu":
                self._share_cores(*processes.values())
            yield engines
            for process in processes.values():
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

    def jobs(self, k: int) -> dict[str, Job]:
        """The jobs of the engines, by their names."""
        return {name: self.job(k, *method) for name, method in self.methods.items()}

    def job(self, k: int, method: str | None, options: dict[str, Any]) -> Job:
        """The job of an engine that drafts ``k`` tokens with a method and options of ``eagle_mrv2``."""
        overrides = dict(self.overrides)
        speculative = {**overrides.pop("speculative_config", {}), "method": method, "num_speculative_tokens": k}
        if self.subject.draft is not None:
            speculative["model"] = self.subject.draft
        if self.acceptance:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_rates"] = list(self.acceptance[:k])
        if options:
            overrides["additional_config"] = {**overrides.get("additional_config", {}), OPTIONS_KEY: options}
        fixed = FIXED_KV_CACHE in self.subject.arguments | overrides
        arguments = {
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization or (0.1 if fixed else 0.84 / len(self.methods)),
            "enable_prefix_caching": False,  # or a round would reuse the prefills of the previous one
            "disable_log_stats": False,
            "seed": 0,
            **self.subject.arguments,
        }
        return Job(
            model=self.subject.model,
            speculative_config=None if method is None else speculative,
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
    disable: list[str] = field(default_factory=list)
    control: bool = False
    """Start the engine to compare against twice, to see by how much two equal engines differ."""
    baseline: bool = False
    """Start an engine without speculation, too."""

    @property
    def sides(self) -> tuple[tuple[str, Method], tuple[str, Method]]:
        """Name and method of the engine to compare against, and of ours."""
        name = f"{METHOD} without {', '.join(self.disable)}" if self.disable else METHOD
        reduced = (self.ours, self.options | ({"disable": self.disable} if self.disable else {}))
        if self.against_ours:
            return (name, reduced), (METHOD, (self.ours, self.options))
        return ("stock", (self.subject.family, {})), (name, reduced)

    @property
    def methods(self) -> dict[str, Method]:
        """The methods of the engines, by their names."""
        (against, its), (name, ours) = self.sides
        again: dict[str, Method] = {f"{against} again": its} if self.control else {}
        baseline: dict[str, Method] = {"no speculation": (None, {})} if self.baseline else {}
        return {against: its, **again, **baseline, name: ours}


@dataclass(frozen=True)
class Engines:
    """Live engines: first the one to compare against, last ``eagle_mrv2``."""

    k: int
    processes: Mapping[str, EngineProcess]
    """By the engines' names."""
    started: Started
    chooses_length: bool = False
    """Whether ``eagle_mrv2`` chooses the number of draft tokens at run time, up to ``k``."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the engines."""
        return tuple(self.processes)

    def in_turn(
        self, jobs: Sequence[BaseModel], on_round: Callable[[int], None] = lambda done: None
    ) -> list[list[Any]]:
        """The answers of each engine to each job: every round a job, of each engine while the others idle.

        Raises:
            CommandError: an engine failed.
        """
        return in_turn([process.ask for process in self.processes.values()], jobs, on_round)


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
