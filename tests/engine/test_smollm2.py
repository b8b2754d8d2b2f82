"""The real target that tools/smollm2.py makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripts import script
from support import engine, held_out_prompts

pytestmark = pytest.mark.engine

PERPLEXITY = 52.30
"""Of the held-out prompts of the demo pair, where transformers loads the GGUF file itself, in float32."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    smollm2 = script("smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.convert(smollm2.fetch(folder), folder / "target")
    return Path(folder / "target")


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
