"""The real pair of pairs/smollm2, whose target comes from the package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import engine, held_out_prompts

pytestmark = [pytest.mark.engine, pytest.mark.package]

PERPLEXITY = 52.30
"""Of the held-out prompts of the demo pair, where transformers loads the GGUF file itself, in float32."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def target(cache: Path) -> Path:
    from vllm_eagle_mrv2_smollm2 import PairError, prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        try:
            return Path(prepare().target)
        except PairError as error:
            pytest.skip(str(error))


@torch.inference_mode()
def test_its_weights_are_those_of_the_file(target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(target)("\n".join(held_out_prompts(16)), return_tensors="pt").input_ids
    assert float(model(tokens, labels=tokens).loss.exp()) == pytest.approx(PERPLEXITY, rel=0.01)


def test_it_answers(target: Path) -> None:
    from vllm import SamplingParams

    question = {"role": "user", "content": "What is the capital of France? Answer briefly."}
    with engine(None, model=str(target)) as llm:
        (answer,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    assert answer.outputs[0].text == "The capital of France is Paris."


def test_the_demo_runs_it(target: Path, cache: Path) -> None:
    command = [str(Path(sys.executable).with_name("vllm-eagle-mrv2")), "demo", "--json", "--pair", "smollm2"]
    done = subprocess.run(
        [*command, "--num-prompts", "2", "--max-tokens", "16"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["family"], report["num_speculative_tokens"], report["outputs_match_baseline"]) == ("eagle3", 5, True)
    assert all(output["text"] for output in report["outputs"])
