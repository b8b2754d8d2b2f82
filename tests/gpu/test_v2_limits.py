"""What Model Runner V2 does not serve is refused, and a deployment is looked at, by the release's own configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from packaging.version import Version
from release_under_test import release
from support import PAIR

from vllm_eagle_mrv2.config.method import settings_of
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.plugin import register


@pytest.mark.parametrize(
    ("arguments", "what", "served_from"),
    [
        ({"enable_return_routed_experts": True}, "capture of routed experts", "0.28"),
        ({"enable_prompt_embeds": True}, "prompt embeddings", "0.29"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode raw_logits", "0.26"),
    ],
)
def test_what_the_release_lacks(arguments: dict[str, Any], what: str, served_from: str) -> None:
    register()
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "eagle_mrv2", "model": str(PAIR / "eagle"), "num_speculative_tokens": 3}
    asked = EngineArgs(model=str(PAIR / "target"), max_model_len=256, speculative_config=speculative, **arguments)
    if release < Version(served_from):
        with pytest.raises(EagleMRV2Error, match=f"^method=eagle_mrv2 runs on Model Runner V2, .* {what}"):
            asked.create_engine_config()
    elif "enable_return_routed_experts" not in arguments:  # which later releases refuse for models without experts
        assert settings_of(asked.create_engine_config().speculative_config) is not None


def test_a_deployment() -> None:
    """By the command, in a process of its own."""
    pair = ["--model", str(PAIR / "target"), "--draft", str(PAIR / "eagle3"), "-k", "3", "--max-num-seqs", "8"]
    code = "from vllm_eagle_mrv2.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", *pair, "--probabilistic", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = json.loads(done.stdout)
    assert (report["reason"], report["family"]) == (None, "eagle3")
    assert report["deployment"]["checked"] == "engine"
    vocabulary = json.loads((PAIR / "target" / "config.json").read_text())["vocab_size"]
    assert report["deployment"]["draft_logits_bytes"] == 8 * 3 * vocabulary * 4
