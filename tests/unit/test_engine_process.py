"""The process around an engine, with workers that need no vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from vllm_eagle_mrv2.cli.common import engine_process
from vllm_eagle_mrv2.cli.common.engine_process import EngineProcess, ended_like_ctrl_c, environment
from vllm_eagle_mrv2.cli.common.errors import CommandError

Start = Callable[[str], EngineProcess]


class Number(BaseModel):
    value: int


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a worker whose ``answer(job, on_tokens)`` has the given body."""
    monkeypatch.setattr(engine_process, "_SHUTDOWN_SECONDS", 5)
    checkout = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(checkout), os.environ.get("PYTHONPATH", "")]))

    def begin(body: str) -> EngineProcess:
        (tmp_path / "a_worker.py").write_text(
            "import os, subprocess, sys\n"
            "from pydantic import BaseModel\n"
            "from vllm_eagle_mrv2.cli.common.engine_process import serve\n"
            "class Number(BaseModel):\n"
            "    value: int\n"
            "def answer(job, on_tokens):\n"
            f"    value = Number.model_validate_json(job).value\n    {body}\n"
            "sys.exit(serve(answer))\n"
        )
        return EngineProcess("a_worker", "a test", environment("eagle"), verbose=False)

    return begin


def is_gone(pid: int) -> bool:
    for _ in range(50):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":  # ended; init has yet to take note
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_answers_one_job_after_another(start: Start) -> None:
    seen: list[int] = []
    with start("on_tokens(7); return Number(value=value + 1)") as process:
        assert [process.ask(Number(value=one), seen.append) for one in (1, 5)] == [{"value": 2}, {"value": 6}]
    assert seen == [7, 7]


def test_an_error_is_one_line(start: Start) -> None:
    with pytest.raises(CommandError) as failed, start(r"raise ValueError('no\n such  thing')") as process:
        process.ask(Number(value=1))
    assert str(failed.value) == "the engine with a test failed: no such thing (--verbose shows vLLM's log)"
    assert failed.value.exit_code == 1


def test_an_end_without_a_word(start: Start) -> None:
    with (
        pytest.raises(CommandError, match="exit status 3; its log ends in: farewell"),
        start("print('farewell', flush=True); os._exit(3)") as process,
    ):
        process.ask(Number(value=1))


def test_the_cause_is_looked_up_in_the_log(start: Start) -> None:
    body = (
        "print('(EngineCore pid=1) ERROR ValueError: too little memory', flush=True); "
        "raise RuntimeError('Engine core failed. See root cause above.')"
    )
    with pytest.raises(CommandError, match="failed: ValueError: too little memory"), start(body) as process:
        process.ask(Number(value=1))


@pytest.mark.parametrize("end", ["return Number(value=child.pid)", "print(child.pid, flush=True); os._exit(1)"])
def test_nothing_outlives_it(start: Start, end: str) -> None:
    """A process of the engine's holds the pipe open; the command neither waits for it nor leaves it behind."""
    body = f"child = subprocess.Popen(['sleep', '300'], close_fds=False); {end}"
    began = time.monotonic()
    try:
        with start(body) as process:
            pid = process.ask(Number(value=1))["value"]
    except CommandError as failed:
        pid = int(str(failed).split("ends in: ")[1].split()[0])
    assert is_gone(pid)
    assert time.monotonic() - began < 20


def test_all_of_an_engine_keeps_to_the_cores(start: Start) -> None:
    body = (
        "import threading; thread = threading.Thread(target=__import__('time').sleep, args=(9,), daemon=True); "
        "thread.start(); child = subprocess.Popen(['sleep', '9']); return Number(value=child.pid)"
    )
    core = min(os.sched_getaffinity(0))
    with start(body) as process:
        child = process.ask(Number(value=1))["value"]
        process.keep_to([core])
        worker = int(Path(f"/proc/{child}/stat").read_text().split()[3])
        threads = [int(thread.name) for pid in (worker, child) for thread in Path(f"/proc/{pid}/task").iterdir()]
        assert len(threads) >= 3
        assert [os.sched_getaffinity(thread) for thread in threads] == [{core}] * len(threads)


def test_a_broken_command_leaves_nothing(start: Start) -> None:
    pids: list[int] = []

    def interrupted(process: EngineProcess) -> None:
        pids.append(process.ask(Number(value=1))["value"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), start("return Number(value=os.getpid())") as process:
        interrupted(process)
    assert is_gone(*pids)


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_leaves_nothing(ends: signal.Signals, start: Start) -> None:
    before, pids = signal.getsignal(ends), []

    def ended(process: EngineProcess) -> None:
        pids.append(process.ask(Number(value=1))["value"])
        os.kill(os.getpid(), ends)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c(), start("return Number(value=os.getpid())") as process:
        ended(process)
    assert is_gone(*pids)
    assert signal.getsignal(ends) is before


@pytest.mark.parametrize(
    ("method", "forced"), [(None, "1"), ("eagle", "1"), ("eagle_mrv2", None), ("eagle_mrv2:eagle3", None)]
)
def test_ours_selects_the_runner_by_itself(
    method: str | None, forced: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("EAGLE_MRV2_DISABLE", "1")
    variables = environment(method, HF_HUB_OFFLINE="1")
    assert variables.get("VLLM_USE_V2_MODEL_RUNNER") == forced
    assert ("EAGLE_MRV2_DISABLE" in variables) == (forced is not None), "what is called ours is ours"
    assert variables["HF_HUB_OFFLINE"] == "0"
