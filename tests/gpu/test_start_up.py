"""What an engine says at its start that it does, and what it then counts."""

from __future__ import annotations

from typing import Any

import pytest
from support import engine, greedy, held_out_prompts, recorded_log

from vllm_eagle_mrv2.telemetry.counters import PATHS, read_counts

IN_GRAPHS = ("one_draft_graph", "row_products", "two_stage_argmax")


@pytest.mark.parametrize("eager", [False, True])
def test_what_is_active_is_said_and_counted(eager: bool) -> None:
    speculative: dict[str, Any] = {"enforce_eager": True} if eager else {}
    compilation = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    with recorded_log() as log, engine("eagle_mrv2", speculative=speculative, compilation_config=compilation) as llm:
        before = dict(read_counts())[0].phases
        greedy(llm, held_out_prompts(1), 24)
        counts = dict(read_counts())[0]
    assert before == dict.fromkeys(PATHS, 0), "passes to warm up"
    assert counts.draft_length == 3
    took = {path for path, count in counts.phases.items() if count}
    (line,) = (line for line in log if "drafts on vLLM" in line)
    warned = [line for line in log if "without CUDA graphs" in line]
    if eager:
        assert took == {"eager"}
        assert ", draft decode graphs NONE," in line
        assert "draft_enforce_eager" in line
        assert "one_draft_graph" not in line
        assert len(warned) == 1
    else:
        assert took == {"one_graph", "fused"}  # the latter after the prompt
        assert ", draft decode graphs FULL_DECODE_ONLY," in line
        assert all(behaviour in line for behaviour in IN_GRAPHS)
        assert not warned
