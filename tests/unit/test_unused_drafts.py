"""Which batches have drafts that nobody can use, on states like those of vLLM's runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packaging.version import Version

pytest.importorskip("vllm")

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.patches import model_runner
from vllm_eagle_mrv2.patches.model_runner import keep_longest_lengths, mark_sessions
from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter, drafts_unused

from .stock import ASKED, K, stock_speculator

ROWS = 8
# Tokens of the prompt, those that a prefill has to run over (more after a preemption), tokens to generate at most, and
# those that have run when the batch has.
CHUNK = (20, 20, 50, 12)
LAST_CHUNK = (20, 20, 50, 20)
ONLY_TOKEN = (20, 20, 1, 20)
RESUMED_CHUNK = (20, 30, 50, 25)
RESUMED_FOR_ITS_LAST = (20, 30, 11, 30)
RESUMED = (20, 30, 12, 30)
DECODE = (20, 20, 50, 24)


class Sampler:
    """Takes requests as that of 0.20 and 0.22 does."""

    def __init__(self) -> None:
        self.added: list[int] = []

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.added.append(req_idx)


def states_and_batch(*requests: tuple[int, int, int, int]) -> tuple[Any, Any]:
    states = SimpleNamespace(max_num_reqs=ROWS, prefill_len=SimpleNamespace(np=np.zeros(ROWS, dtype=np.int32)))
    sampler = Sampler()
    keep_longest_lengths(states, sampler)
    rows: NDArray[np.int32] = np.arange(ROWS, dtype=np.int32)[::-1][: len(requests)]
    for row, (prompt, prefill, most, _) in zip(rows, requests, strict=True):
        states.prefill_len.np[row] = prefill
        sampler.add_request(int(row), prompt, SimpleNamespace(max_tokens=most))
    assert sampler.added == rows.tolist()
    reached = [reached for *_, reached in requests]
    batch = SimpleNamespace(
        num_reqs=len(requests),
        num_draft_tokens=0,
        idx_mapping_np=rows,
        seq_lens_cpu_upper_bound=torch.tensor([*reached, 0, 0], dtype=torch.int32),  # padded
    )
    return states, batch


@pytest.mark.parametrize(
    ("requests", "unused"),
    [
        ([CHUNK], True),
        ([LAST_CHUNK], False),
        ([ONLY_TOKEN], True),
        ([RESUMED_CHUNK], True),
        ([RESUMED_FOR_ITS_LAST], True),
        ([RESUMED], False),
        ([DECODE], False),
        ([CHUNK, ONLY_TOKEN, RESUMED_CHUNK, RESUMED_FOR_ITS_LAST], True),
        ([CHUNK, DECODE], False),
        ([LAST_CHUNK, CHUNK], False),
    ],
)
def test_what_nobody_can_use(requests: list[tuple[int, int, int, int]], unused: bool) -> None:
    states, batch = states_and_batch(*requests)
    assert drafts_unused(batch, states) is unused


class Requests:
    """The runner's states, as far as requests come and go."""

    def __init__(self) -> None:
        self.max_num_reqs = ROWS
        self.req_id_to_index: dict[str, int] = {}

    def add_request(self, req_id: str, **of_request: Any) -> None:
        self.req_id_to_index[req_id] = next(row for row in range(ROWS) if row not in self.req_id_to_index.values())

    def remove_request(self, req_id: str) -> int | None:
        return self.req_id_to_index.pop(req_id, None)


@pytest.mark.parametrize(("release", "known"), [("0.30.0", False), ("0.31.0", True)])
def test_the_end_of_a_session_may_not_be_known(release: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler may go by other ``max_tokens`` than the runner was given."""
    monkeypatch.setattr(releases, "installed_version", lambda: Version(release))
    requests: Any = Requests()
    mark_sessions(requests)
    once = requests.add_request
    mark_sessions(requests)  # the KV cache is made twice
    assert requests.add_request == once
    for req_id in ("gone", "once", "session"):
        requests.remove_request(req_id)  # as the runner does before it adds any
        requests.add_request(req_id=req_id)
    assert requests.remove_request("gone") == 0
    requests.add_request(req_id="new")
    states, batch = states_and_batch(ONLY_TOKEN)
    if not known:
        states.sessions = requests.sessions
        batch.idx_mapping_np[:] = requests.req_id_to_index["once"]
        states.prefill_len.np[:], states.max_seq_len[:] = 20, 21
    assert drafts_unused(batch, states)
    requests.remove_request("session")
    requests.add_request(req_id="session")
    assert hasattr(requests, "sessions") is not known
    if not known:
        assert requests.sessions.nonzero()[0].tolist() == [requests.req_id_to_index["session"]]
        batch.idx_mapping_np[:] = requests.req_id_to_index["session"]
    assert drafts_unused(batch, states) is known


def test_a_preempted_session_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed_version", lambda: Version("0.30.0"))
    monkeypatch.setattr(model_runner, "_SESSIONS", 1)
    requests: Any = Requests()
    mark_sessions(requests)
    for number in range(1 + ROWS):
        requests.add_request(req_id=str(number))
        for _ in range(2 - (number == 1)):
            requests.remove_request(str(number))
            requests.add_request(req_id=str(number))
        requests.remove_request(str(number))
    for req_id, session in (("1", True), ("new", False), ("0", False), (str(ROWS), True)):
        requests.remove_request(req_id)
        requests.add_request(req_id=req_id)
        assert requests.sessions[requests.req_id_to_index[req_id]] == session, req_id


def test_no_request_is_too_long() -> None:
    """An error here would end the engine."""
    states, _ = states_and_batch((20, 20, 2**31 - 1, 24))
    assert states.max_seq_len.max() == 20 + 2**31 - 1


def test_releases_that_keep_the_lengths_are_left_alone() -> None:
    states, sampler = SimpleNamespace(max_seq_len="stock's"), Sampler()
    keep_longest_lengths(states, sampler)
    assert states.max_seq_len == "stock's"
    assert "add_request" not in vars(sampler)
    keep_longest_lengths(SimpleNamespace(), None)  # a stage of a pipeline that samples nothing


@pytest.mark.parametrize(
    ("how", "verified", "dummy_run", "drafted"),
    [
        ({}, 0, False, 0),
        ({}, 0, True, K),
        ({}, K, False, K),
        ({"dp_size": 2}, 0, False, K),
        ({"disable": Behaviour.SKIP_UNUSED_DRAFTS}, 0, False, K),
    ],
    ids=["a chunk", "a dummy run", "drafts verified", "ranks that would wait", "off"],
)
def test_what_the_loop_is_asked_for(how: dict[str, Any], verified: int, dummy_run: bool, drafted: int) -> None:
    stock = stock_speculator(dp_size=how.get("dp_size", 1))
    adapter = ReleaseAdapter(stock, Options(disable=frozenset({how["disable"]} if "disable" in how else ())), ASKED)
    adapter.req_states, batch = states_and_batch(CHUNK)
    of_the_device = ("num_tokens", "num_tokens_after_padding", "input_ids", "positions", "query_start_loc", "seq_lens")
    vars(batch).update(dict.fromkeys((*of_the_device, "idx_mapping")), num_draft_tokens=verified)
    hidden: Any = None
    assert adapter.read(batch, None, None, hidden, None, *[hidden] * 6, dummy_run=dummy_run).num_draft_tokens == drafted
