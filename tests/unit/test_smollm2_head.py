"""The prompts for SmolLM2 and the training of its head, without SmolLM2."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scripts import script

pytestmark = pytest.mark.any_release

SHAPE = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return script("train_smollm2_head")


@pytest.fixture
def target(training: ModuleType, tmp_path: Path) -> Path:
    """A folder with a target of random weights."""
    torch.manual_seed(0)
    demo = script("train_demo_pair")
    shape = demo.Shape(**SHAPE)
    config = demo.llama_config(shape, "LlamaForCausalLM", bos_token_id=7, eos_token_id=8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {f"model.{name}": weight for name, weight in demo.Target(shape).state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def test_prompts_of_every_kind() -> None:
    prompts = script("smollm2_prompts").prompts
    known, held_out = prompts(held_out=False), prompts(held_out=True)
    assert known == prompts(held_out=False)
    assert known.keys() == held_out.keys() == {"chat", "code", "editing", "prose"}
    for kind, texts in known.items():
        assert len(texts) > 400
        assert len(held_out[kind]) > 50
        assert not set(texts) & set(held_out[kind])


@pytest.mark.parametrize("kind", ["code", "editing", "prose"])
def test_no_text_is_held_out_and_trained_with(kind: str) -> None:
    """Whatever Python has them: editions differ in their texts, and the head may be trained and measured with two."""
    both = script("smollm2_prompts")
    assert not set(both.HELD_OUT_MODULES.split()) & set(both.training_modules())
    known, held_out = (
        {tuple(text.partition("\n\n")[2].split()[:12]) for text in both.prompts(held_out=which)[kind]} - {()}
        for which in (False, True)
    )
    assert not known & held_out


def test_words_are_misspelt_alike_every_time() -> None:
    misspelt = script("smollm2_prompts")._misspelt
    text = "Several numbers become different letters whenever somebody measures lengths " * 3
    assert misspelt(text) == misspelt(text) != text
    assert sorted(misspelt(text)) == sorted(text)


def test_windows_begin_with_a_conversation_and_count_its_answer(training: ModuleType) -> None:
    conversations = [([1, 2], [3]), ([4], [5]), ([6, 7], [8, 9])]
    tokens, counts = training.Windows(conversations, 6, torch.Generator().manual_seed(0)).draw(64)
    stream = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0]
    assert {tuple(window) for window in tokens.tolist()} == {tuple(stream[start : start + 6]) for start in (0, 3, 5)}
    for window, counted in zip(tokens.tolist(), counts.tolist(), strict=True):
        before_an_answer = [token in {2, 4, 7, 8} for token in window]
        assert counted == before_an_answer


def test_the_draft_vocabulary_is_what_answers_use_most(training: ModuleType) -> None:
    assert training.most_used([([2, 2, 2], [5, 5, 9]), ([2], [9, 9])], 2).tolist() == [5, 9]


def test_a_token_that_does_not_count_teaches_nothing() -> None:
    """Whatever the target makes of it."""
    pair = script("train_demo_pair")
    torch.manual_seed(0)
    shape = pair.Shape(vocab_size=16, hidden_size=16, intermediate_size=16, num_attention_heads=2, head_dim=8)
    target, head = pair.Target(shape), pair.Eagle3Head(shape, torch.arange(16))
    tokens, counts = torch.randint(16, (2, 12)), torch.zeros(2, 12, dtype=torch.bool)
    counts[:, :6] = True
    changed = tokens.clone()
    changed[:, 9:] = 3  # read by none of the predictions that count
    losses = [pair.head_loss(target, head, one, 2, counts) for one in (tokens, changed)]
    assert losses[0] == losses[1]
    assert pair.head_loss(target, head, tokens, 2, torch.zeros_like(counts)) == 0
    assert pair.head_loss(target, head, tokens, 2) != pair.head_loss(target, head, changed, 2)


@pytest.mark.slow
def test_a_head_learns_what_follows(training: ModuleType, target: Path, tmp_path: Path) -> None:
    """Of a target that repeats what it reads: its layers add nothing, its embedding is its head."""
    loaded = training.load_target(target, torch.device("cpu"))
    assert loaded.aux_layers == (2, 4, 5)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    torch.nn.init.normal_(loaded.embed_tokens.weight)
    for name, parameter in loaded.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
    numbers = torch.Generator().manual_seed(1)
    texts = [([one[0]], one[1:]) for one in torch.randint(24, (64, 24), generator=numbers).tolist()]
    sizes = {"draft_vocab": 24, "intermediate": 48, "length": 24, "batch": 8}
    options = argparse.Namespace(**sizes, steps=240, minutes=5.0)
    head = training.train_head(loaded, texts, options)
    rates = script("train_demo_pair").measure(loaded, head, [[3, 4], [5, 6]], new_tokens=8, depth=2)
    assert min(rates) > 0.9
    config = training.config_of(head, loaded, target)
    assert (config["draft_vocab_size"], config["num_hidden_layers"], config["eos_token_id"]) == (24, 1, 8)
    script("train_demo_pair").save_model(tmp_path / "head", head, config)
    assert load_file(tmp_path / "head" / "model.safetensors")["lm_head.weight"].shape == (24, 32)


def test_questions_that_the_target_asks_itself(training: ModuleType) -> None:
    """It goes on where a user would begin; what has no end, or was asked before, is left out."""
    pytest.importorskip("vllm")
    given: list[dict[str, list[int]]] = []

    class Tokenizer:
        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
            assert not tokenize
            return f"<system><user>{messages[0]['content']}<end>"

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert (text, add_special_tokens) == ("<system><user>", False)
            return [1, 2]

    class Engine:
        def get_tokenizer(self) -> Tokenizer:
            return Tokenizer()

        def generate(self, prompts: list[dict[str, list[int]]], params: Any) -> list[Any]:
            given.extend(prompts)
            assert params.seed is None  # or all would be the same
            said = [("Why? ", "stop"), ("How", "length"), ("Why?", "stop"), ("What?", "stop")]
            return [SimpleNamespace(outputs=[SimpleNamespace(text=one, finish_reason=how)]) for one, how in said]

    assert training.own_questions(Engine(), 4) == ["Why?", "What?"]
    assert given == [{"prompt_token_ids": [1, 2]}] * 4


def test_what_gates_of_lookup_accept() -> None:
    gates = script("lookup_gates")
    text = [5, 6, 7, 8, 9, 1, 5, 6, 7]  # and goes on with 8, 9, 1, 5
    follows, wrong, half = [8, 9, 1, 5, 6], [2, 2, 2, 2, 2], [8, 2, 2, 2, 2]
    assert gates.what_follows(text, 3, 5) == [8, 9, 1, 5, 6]
    assert gates.what_follows(text, 7, 5) == [6, 7, 6, 7, 6]  # the text repeats itself
    assert gates.what_follows(text, 8, 5) == 5 * [7]
    assert list(gates.earlier_matches(text, 2)) == [(3, 3)]
    assert gates.gate(3, 3)(text, wrong, follows) == follows
    assert gates.gate(4, 3)(text, wrong, follows) == wrong
    assert gates.gate(4, 3)(text, half, follows) == follows
    assert gates.gate(4, 4)(text, half, follows) == half
    assert gates.best(text, wrong, follows) == follows
    assert gates.best(text, wrong, wrong) == wrong
    drafts = [wrong] * 20
    drafts[7] = half  # for the tenth token
    answer = gates.Answer(text[:-1], [7, *follows], drafts)
    assert gates.accepted_length([answer], gates.alone) == 5 / 4
    assert gates.accepted_length([answer], gates.gate(4, 3)) == 5
