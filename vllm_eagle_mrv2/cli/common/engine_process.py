"""Runs an engine in its own process: the command's side, and the main loop of the worker's side.

Each engine has its own process and inherits no memory, graphs or counters of another.  Jobs arrive on the worker's
stdin, one JSON object per line.  Events leave on a separate pipe: for each job any number of ``{"tokens": n}`` during
generation, then ``{"result": ...}`` or ``{"error": text}``.  stdout and stderr carry vLLM's log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.config import kill_switch
from vllm_eagle_mrv2.config.method import is_ours

OnTokens = Callable[[int], None]
_SHUTDOWN_SECONDS = 30
# If an engine core or one of its workers dies, the error that arrives here only refers to the log.
_POINTER = "root cause"
_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception): .*")


def environment(method: str | None, **defaults: str) -> dict[str, str]:
    """The environment of a worker whose engine drafts with ``method``, on Model Runner V2.

    Args:
        method: the method in the speculative configuration; None for no speculation.
        defaults: variables to set unless the environment sets them already.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not needed for greedy decoding, and it compiles for minutes
        **defaults,
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "PYTHONSAFEPATH": "1",  # ignores a folder named vllm in the working directory
    }
    if is_ours(method):
        del variables["VLLM_USE_V2_MODEL_RUNNER"]  # eagle_mrv2 selects it by itself
        variables.pop(kill_switch.VARIABLE, None)  # or the stock method would run under the name eagle_mrv2
    return variables


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise `KeyboardInterrupt`: engines would otherwise outlive the command."""
    before = {one: signal.signal(one, signal.default_int_handler) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class EngineProcess:
    """A worker's process as a context manager, which ends all its processes on exit."""

    def __init__(self, module: str, name: str, variables: dict[str, str], verbose: bool) -> None:
        """Start ``python -m module``.

        Args:
            module: a module that calls `serve` when it is run.
            name: the name of the engine in messages: "the engine with ... failed".
            variables: the environment of the process.
            verbose: show vLLM's log on stderr.
        """
        self._name, self._verbose = name, verbose
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        source, sink = os.pipe()
        self._events = os.fdopen(source, encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(sink)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr if verbose else self._log,
            stderr=sys.stderr if verbose else self._log,
            pass_fds=(sink,),
            env=variables,
            start_new_session=True,
            text=True,
        )
        os.close(sink)
        # Engine cores are separate processes that hold the pipe open; they are ended after their worker.
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, exception: object, *_: object) -> None:
        self.finish()
        if exception is None:
            self._reaper.join(_SHUTDOWN_SECONDS)
        self._kill()
        self._reaper.join()
        self._events.close()
        self._log.close()

    def send(self, job: BaseModel) -> None:
        """Send a job to the worker without waiting for its result."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` reports the cause
            self._process.stdin.write(job.model_dump_json() + "\n")
            self._process.stdin.flush()

    def receive(self, on_tokens: OnTokens = lambda tokens: None) -> Any:
        """Wait for the result of the earliest unanswered job; return the fields of the worker's answer.

        Raises:
            CommandError: the engine failed; the message gives the cause as far as the log tells it.
        """
        for line in self._events:
            event = json.loads(line)
            if "tokens" in event:
                on_tokens(event["tokens"])
            elif "result" in event:
                return event["result"]
            else:
                raise self._failure(str(event["error"]))
        raise self._failure(None)

    def ask(self, job: BaseModel, on_tokens: OnTokens = lambda tokens: None) -> Any:
        """Send a job and wait for its result."""
        self.send(job)
        return self.receive(on_tokens)

    def keep_to(self, cores: Collection[int]) -> None:
        """Restrict all processes and threads of the engine, and those that they start later, to these cores."""
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    for thread in process.threads():
                        with suppress(ProcessLookupError):
                            os.sched_setaffinity(thread.id, cores)

    def finish(self) -> None:
        """Tell the worker that there are no more jobs."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _reap(self) -> None:
        self._process.wait()
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _failure(self, reason: str | None) -> CommandError:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        if reason is None:
            self._reaper.join(_SHUTDOWN_SECONDS)
            last_words = f"; its log ends in: {lines[-1]}" if lines else ""
            reason = _ending(self._process.returncode) + last_words
        elif _POINTER in reason:
            causes = [found[0] for line in lines if _POINTER not in line and (found := _ERROR_LINE.search(line))]
            reason = causes[-1] if causes else reason
        hint = "" if self._verbose else " (--verbose shows vLLM's log)"
        return CommandError(f"the engine with {self._name} failed: {reason}{hint}", 1)


def _ending(status: int | None) -> str:
    if status is None:
        return "it closed its pipe"
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


# The worker's side


def serve(answer: Callable[[str, OnTokens], BaseModel]) -> int:
    """Answer jobs from stdin until there are no more or one fails; write events to the descriptor in ``argv[1]``.

    Args:
        answer: (JSON of a job, callback for the number of tokens generated so far) -> result of the job.
    """
    with os.fdopen(int(sys.argv[1]), "w", buffering=1, encoding="utf-8") as events:

        def send(event: dict[str, object]) -> None:
            events.write(json.dumps(event) + "\n")

        for line in sys.stdin:
            try:
                result = answer(line, lambda tokens: send({"tokens": tokens}))
            except Exception as error:
                traceback.print_exc()
                send({"error": one_line(error)})
                return 1
            send({"result": result.model_dump()})
    return 0


def one_line(error: BaseException) -> str:
    """An error as one line; vLLM's validation errors span several and end in a link."""
    text = str(error).partition("For further information")[0]
    return " ".join(text.split()) or type(error).__name__
