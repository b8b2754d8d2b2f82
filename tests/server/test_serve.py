"""``vllm serve`` as a user starts it: its own processes, HTTP, a signal to end it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from support import DEPLOY

import vllm_eagle_mrv2

pytestmark = [pytest.mark.engine, pytest.mark.server]

PAIR = Path(vllm_eagle_mrv2.__file__).parent / "demo_pair"
START_SECONDS = 400
STOP_SECONDS = 60
REQUEST_SECONDS = 180
SWITCHED_OFF = "EAGLE_MRV2_DISABLE=1: eagle_mrv2 is off, and stock vLLM drafts with method=eagle and the same head"
TAKE_OVER = re.compile(
    r"INFO .*\beagle_mrv2 \S+ drafts on vLLM .*, draft decode graphs NONE, .*, active beyond this release: "
)


class Server:
    """A running ``vllm serve``, alone in its process group."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log_file = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("vllm")), "serve", *arguments, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_SECONDS, trust_env=False)

    @property
    def log(self) -> str:
        """Everything that the server's processes have printed."""
        return self.log_file.read_text(errors="replace")

    def wait_until_healthy(self) -> None:
        """Return when /health answers; fail with the log's end where it never does."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            time.sleep(1)
        pytest.fail(f"the server did not start (exit status {self.process.poll()}):\n{self.log[-4000:]}")

    def complete(self, prompt: str) -> str:
        """A greedy completion in one piece."""
        answer = self.http.post("/v1/completions", json=self._request(prompt, stream=False))
        answer.raise_for_status()
        text: str = answer.json()["choices"][0]["text"]
        return text

    def stream(self, prompt: str) -> list[str]:
        """The pieces of a streamed greedy completion."""
        pieces: list[str] = []
        with self.http.stream("POST", "/v1/completions", json=self._request(prompt, stream=True)) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return pieces
                if data:
                    pieces.append(json.loads(data)["choices"][0]["text"])
        pytest.fail("the stream ended without [DONE]")

    @staticmethod
    def _request(prompt: str, stream: bool) -> dict[str, object]:
        return {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 32, "stream": stream}

    def metrics(self) -> str:
        """What a Prometheus server is told."""
        return self.http.get("/metrics").text

    def counter(self, name: str) -> float:
        """A counter of /metrics, summed over its labels."""
        samples = re.findall(rf"^vllm:{name}_total(?:{{.*}})? (\S+)$", self.metrics(), re.MULTILINE)
        assert samples, f"/metrics has no vllm:{name}_total"
        return sum(map(float, samples))

    def terminate(self) -> int:
        """SIGTERM to the server, as an init system sends it; the exit status. Fails where anything stays behind."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(STOP_SECONDS)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return status
            time.sleep(0.2)
        pytest.fail("processes of the server outlived it")

    def kill(self) -> None:
        """End every process of the server, whatever its state."""
        self.http.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)


StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair, in a folder whose path does not bring our name into a log."""
    return Path(shutil.copytree(PAIR, tmp_path_factory.mktemp("models") / "pair"))


@pytest.fixture
def start_server(pair: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Start a healthy server with a speculative configuration; it is gone after the test, whatever happened."""
    servers: list[Server] = []

    def start(speculative_config: str, **environment: str) -> Server:
        arguments = [
            str(pair / "target"),
            *("--speculative-config", speculative_config),
            *("--served-model-name", "demo"),
            *("--host", "127.0.0.1"),
            *("--dtype", "float32"),
            *("--max-model-len", "512"),
            *("--max-num-seqs", "8"),
            *("--gpu-memory-utilization", "0.3"),
            # vLLM's default is to kill its engine at once, whose death it then sometimes reports as an error.
            *("--shutdown-timeout", "20"),
            "--enforce-eager",
        ]
        inherited = {key: value for key, value in os.environ.items() if key != "VLLM_USE_V2_MODEL_RUNNER"}
        defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        server = Server(arguments, {**defaults, **inherited, **environment}, tmp_path / f"server-{len(servers)}.log")
        servers.append(server)
        server.wait_until_healthy()
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    texts: list[str] = json.loads((PAIR / "prompts.json").read_text())
    return texts[:3]


def check_drafts(server: Server, prompts: list[str]) -> None:
    """Three clients at once get what each gets alone in one piece, and drafts were made and accepted for it."""
    drafts, accepted = server.counter("spec_decode_num_drafts"), server.counter("spec_decode_num_accepted_tokens")
    with ThreadPoolExecutor(len(prompts)) as clients:
        streamed = list(clients.map(server.stream, prompts))
    assert all(len(pieces) > 1 for pieces in streamed)
    assert ["".join(pieces) for pieces in streamed] == [server.complete(prompt) for prompt in prompts]
    assert server.counter("spec_decode_num_drafts") > drafts
    assert server.counter("spec_decode_num_accepted_tokens") > accepted


def phases(server: Server) -> dict[str, float]:
    """Draft phases by path, as /metrics has them."""
    found = re.findall(r'^vllm_eagle_mrv2_draft_phases_total{.*path="(\w+)"} (\S+)$', server.metrics(), re.MULTILINE)
    return {path: float(count) for path, count in found}


def check_metrics(server: Server) -> None:
    """The drafts' path and length are told, and dashboard and alert rules ask for nothing that is not there."""
    none = dict.fromkeys(phases(server), 0.0)
    assert phases(server) == {**none, "eager": phases(server)["eager"]}
    assert phases(server)["eager"] > 1
    assert re.search(
        r'^vllm_eagle_mrv2_draft_length{engine="0",model_name="demo"} 3.0$', server.metrics(), re.MULTILINE
    )
    assert re.search(
        r'^vllm_eagle_mrv2_info{.*family="eagle".*num_speculative_tokens="3"', server.metrics(), re.MULTILINE
    )
    told = set(re.findall(r"^([\w:]+)[ {]", server.metrics(), re.MULTILINE))
    asked = {name for file in DEPLOY.iterdir() for name in re.findall(r"\bvllm(?::|_eagle_mrv2_)\w+", file.read_text())}
    assert asked
    assert asked <= told


def check_ends_cleanly(server: Server) -> None:
    """SIGTERM ends the server as it ends a stock one: status 0, nothing left, nothing raised."""
    assert server.terminate() == 0
    # Stock vLLM's front end at times sees its engine leave first, and logs just this.
    assert server.log.count("Traceback (most recent call last)") == server.log.count("exceptions.EngineDeadError:")
    assert "vllm_eagle_mrv2/" not in server.log


def test_serves_eagle_mrv2(start_server: StartServer, pair: Path, prompts: list[str]) -> None:
    server = start_server(f"method=eagle_mrv2,model={pair / 'eagle'},num_speculative_tokens=3")
    assert set(phases(server).values()) == {0.0}, "what ran before the first request"
    check_drafts(server, prompts)
    check_metrics(server)
    assert len(TAKE_OVER.findall(server.log)) == 1
    check_ends_cleanly(server)


def test_leaves_a_stock_server_alone(start_server: StartServer, pair: Path, prompts: list[str]) -> None:
    config = {"method": "eagle", "model": str(pair / "eagle"), "num_speculative_tokens": 3}
    server = start_server(json.dumps(config), VLLM_USE_V2_MODEL_RUNNER="1")
    check_drafts(server, prompts)
    assert "Using V2 Model Runner" in server.log
    assert "eagle_mrv2" not in server.log + server.metrics()
    check_ends_cleanly(server)


def test_kill_switch(start_server: StartServer, pair: Path, prompts: list[str]) -> None:
    server = start_server(
        f"method=eagle_mrv2,model={pair / 'eagle'},num_speculative_tokens=3",
        EAGLE_MRV2_DISABLE="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
    )
    check_drafts(server, prompts)
    (warning, *others) = (line for line in server.log.splitlines() if "eagle_mrv2" in line and "args: " not in line)
    assert "WARNING" in warning
    assert SWITCHED_OFF in warning
    assert others == []
    check_ends_cleanly(server)


def test_without_the_plugin_vllm_refuses_the_method(pair: Path) -> None:
    """README quotes what it says."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(pair / "target"), "--speculative-config"]
    config = f"method=eagle_mrv2,model={pair / 'eagle'},num_speculative_tokens=3"
    refused = subprocess.run(
        [*command, config],
        env={**os.environ, "VLLM_PLUGINS": "lora"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert refused.returncode == 2
    assert f"argument --speculative-config/-sc: Value {config} cannot be converted to <function loads" in refused.stderr


def test_a_refusal_is_all_that_is_left_to_read(pair: Path) -> None:
    """No traceback above it, which nobody reads to its end."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(pair / "target")]
    command += ["--speculative-config", f"method=eagle_mrv2,model={pair / 'target'},num_speculative_tokens=3"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=START_SECONDS, env={**os.environ, **offline}, check=False
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"error: {pair / 'target'} is a whole model and no EAGLE or MTP head")
    assert "Traceback" not in ended.stdout + ended.stderr
