"""Train an EAGLE-3 head for SmolLM2-135M-Instruct on what the target itself writes.

    python -m vllm_eagle_mrv2_smollm2 --out FOLDER
    python tools/train_smollm2_head.py answers --target FOLDER/target --out FOLDER/texts.json
    python tools/train_smollm2_head.py train --target FOLDER/target --texts FOLDER/texts.json --out FOLDER/trained
    python tools/train_smollm2_head.py pack --head FOLDER/trained

`answers` has vLLM write the target's answers to the prompts of smollm2_prompts.py and to questions that it asks itself,
greedily and sampled, until `--minutes` are over; one engine leaves most of a GPU idle, and with `--engines 3` three
write a third each. `train` rolls the head out as it drafts (see train_demo_pair.py) in the answers, over a draft
vocabulary of the tokens that they use most, and prints the acceptance on held-out prompts by kind. `pack` puts the head
into the distribution pairs/smollm2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from smollm2_prompts import KINDS, Kind, prompts
from torch import Tensor
from train_demo_pair import Eagle3Head, Shape, Target, head_loss, llama_config, measure, save_model, train

DRAFT_VOCAB_SIZE = 12288
INTERMEDIATE_SIZE = 3072
"""Width of the head's MLP, twice the target's: a head of one layer has little else to learn with."""
LEARNING_RATE = 4e-3
DEPTH = 5
SAMPLED = (0.0, 0.7)
"""Temperatures of the answers to each prompt."""
PROMPTS_AT_A_TIME = 4096
"""The time is looked at between so many: thousands keep an engine's batch full."""
LONGEST_QUESTION = 96
"""Tokens of a question that the target asks itself; longer ones lose their thread."""


# The target's answers

Conversation = tuple[list[int], list[int]]
"""Token ids of a prompt, and of the target's answer."""


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a request to the assistant, up to where its answer begins."""
    message = [{"role": "user", "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return ids


def own_questions(llm: Any, count: int) -> list[str]:
    """What the target expects a user to ask: it writes the user's part of a conversation, at most ``count`` times.

    Source: Magpie (arXiv 2406.08464).
    """
    from vllm import SamplingParams

    tokenizer, mark = llm.get_tokenizer(), "QUESTION"
    message = [{"role": "user", "content": mark}]
    before = tokenizer.apply_chat_template(message, tokenize=False).partition(mark)[0]
    ids = tokenizer.encode(before, add_special_tokens=False)
    params = SamplingParams(temperature=0.8, max_tokens=LONGEST_QUESTION)
    asked = [one.outputs[0] for one in llm.generate(count * [{"prompt_token_ids": ids}], params)]
    return list(dict.fromkeys(one.text.strip() for one in asked if one.finish_reason == "stop"))


def write_answers(options: argparse.Namespace) -> list[Conversation]:
    """Answers of each temperature to the training prompts and own questions, in an order by chance."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it compiles for minutes
    from vllm import LLM, SamplingParams

    share, of = options.share
    llm = LLM(str(options.target), max_model_len=2048, seed=share, **options.engine)
    tokenizer, began = llm.get_tokenizer(), time.monotonic()
    of_kinds = (of_kind[: options.limit][share - 1 :: of] for of_kind in prompts(held_out=False).values())
    questions = own_questions(llm, options.questions // of)
    asked = [
        (
            chat_prompt(tokenizer, text),
            SamplingParams(temperature=temperature, max_tokens=options.max_tokens, detokenize=False),
        )
        for text in chain(*of_kinds, questions)
        for temperature in SAMPLED
    ]
    random.Random(share).shuffle(asked)
    written: list[Conversation] = []
    for first in range(0, len(asked), PROMPTS_AT_A_TIME):
        if time.monotonic() - began > options.minutes * 60:
            break
        ids, params = zip(*asked[first : first + PROMPTS_AT_A_TIME], strict=True)
        for prompt, answer in zip(ids, llm.generate([{"prompt_token_ids": one} for one in ids], params), strict=True):
            written.append((prompt, list(answer.outputs[0].token_ids)))
    return written


def shares_of_answers(options: argparse.Namespace) -> list[Conversation]:
    """What several engines write, each in a process of its own.

    Raises:
        SystemExit: one of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(share)) for share in range(1, options.engines + 1)]
        alone = [sys.executable, *sys.argv, "--engines", "1", "--share"]
        writers = [subprocess.Popen([*alone, file.name, str(options.engines), "--out", str(file)]) for file in files]
        statuses = [writer.wait() for writer in writers]
        if any(statuses):
            raise SystemExit("error: an engine failed")
        return list(chain.from_iterable(json.loads(file.read_text()) for file in files))


# The head


class Windows:
    """Draws windows of the conversations, which follow each other in one stream; each begins with one of them."""

    def __init__(self, conversations: list[Conversation], length: int, generator: torch.Generator) -> None:
        self._generator, self._places = generator, torch.arange(length)
        stream: list[int] = []
        answered: list[bool] = []
        starts = []
        for prompt, answer in conversations:
            starts.append(len(stream))
            stream += prompt + answer
            answered += (len(prompt) - 1) * [False] + len(answer) * [True] + [False]
        self._starts = torch.tensor(starts)
        self._stream = torch.tensor(stream + length * [0])
        self._answered = torch.tensor(answered + length * [False])

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens [count, length] int64, and whether the token after each is of an answer, [count, length] bool."""
        which = torch.randint(len(self._starts), (count,), generator=self._generator)
        places = self._starts[which, None] + self._places
        return self._stream[places], self._answered[places]


def load_target(folder: Path, device: torch.device) -> Target:
    """The target, whose weights stay as they are; it yields the residual streams that vLLM gives a head by default."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{field.name: config[field.name] for field in dataclasses.fields(Shape)})
    layers = shape.num_hidden_layers
    target = Target(shape, aux_layers=(2, layers // 2, layers - 3)).to(device)
    weights = load_file(folder / "model.safetensors", device=str(device))
    target.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    return target.requires_grad_(False)


def most_used(conversations: list[Conversation], count: int) -> Tensor:
    """The token ids that occur most in the answers, in ascending order: [count] int64."""
    counts = Counter(chain.from_iterable(answer for _, answer in conversations))
    chosen = [token for token, _ in counts.most_common(count)]
    return torch.tensor(sorted(chosen))


def train_head(target: Target, conversations: list[Conversation], options: argparse.Namespace) -> Eagle3Head:
    """Train a head on windows of the conversations."""
    device, generator = target.norm.weight.device, torch.Generator().manual_seed(0)
    shape = dataclasses.replace(target.shape, num_hidden_layers=1, intermediate_size=options.intermediate)
    head = Eagle3Head(shape, most_used(conversations, options.draft_vocab)).to(device)
    with torch.no_grad():  # begin with what the target makes of its last features
        head.norm.weight.copy_(target.norm.weight)
        head.lm_head.weight.copy_(target.embed_tokens.weight[head.draft_ids])
    windows = Windows(conversations, options.length, generator)
    # Launching its kernels one by one takes a GPU longer than their work.
    loss_of = torch.compile(head_loss) if device.type == "cuda" else head_loss

    def loss() -> Tensor:
        tokens, counts = windows.draw(options.batch)
        return loss_of(target, head, tokens.to(device), DEPTH, counts.to(device))

    train(head, loss, "eagle3", options.steps, LEARNING_RATE, options.minutes * 60)
    return head


def config_of(head: Eagle3Head, target: Target, folder: Path) -> dict[str, object]:
    """The configuration of a head's checkpoint."""
    of_target = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return llama_config(
        head.shape,
        "LlamaForCausalLMEagle3",
        draft_vocab_size=len(head.draft_ids),
        eagle_aux_hidden_state_layer_ids=list(target.aux_layers),
        **{name: of_target[name] for name in ("bos_token_id", "eos_token_id")},
    )


def acceptance(target: Target, head: Eagle3Head, tokenizer: Any, count: int) -> dict[Kind, list[float]]:
    """Share of greedy drafts that are accepted up to each position, on held-out prompts of each kind."""
    asked = prompts(held_out=True)
    return {
        kind: measure(target, head, [chat_prompt(tokenizer, text) for text in asked[kind][:count]], depth=DEPTH)
        for kind in KINDS
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    answers, training = commands.add_parser("answers"), commands.add_parser("train")
    commands.add_parser("pack").add_argument("--head", type=Path, required=True)
    for command in (answers, training):
        command.add_argument("--target", type=Path, required=True)
        command.add_argument("--out", type=Path, required=True)
    answers.add_argument("--limit", type=int, help="prompts of each kind")
    answers.add_argument("--questions", type=int, default=30_000, help="that the target asks itself")
    answers.add_argument("--engines", type=int, default=1, help="that write a share each, on the same GPU")
    answers.add_argument("--share", type=int, nargs=2, metavar=("NUMBER", "OF"), default=(1, 1), help="1 3 is a third")
    answers.add_argument("--max-tokens", type=int, default=224)
    answers.add_argument("--minutes", type=float, default=4.0, help="after the start; prompts left are not answered")
    answers.add_argument("--engine", type=json.loads, default={}, help="further LLM(...) arguments, as JSON")
    training.add_argument("--texts", type=Path, required=True)
    training.add_argument("--device", help="default: a GPU if there is one")
    training.add_argument("--steps", type=int, default=6000)
    training.add_argument("--minutes", type=float, default=8.0, help="budget; steps left when it runs out are dropped")
    training.add_argument("--batch", type=int, default=8)
    training.add_argument("--length", type=int, default=512)
    training.add_argument("--draft-vocab", type=int, default=DRAFT_VOCAB_SIZE)
    training.add_argument("--intermediate", type=int, default=INTERMEDIATE_SIZE, help="width of the head's MLP")
    training.add_argument("--measured", type=int, default=12, help="held-out prompts of each kind")
    options = parser.parse_args()
    if options.command == "pack":
        from vllm_eagle_mrv2_smollm2 import HEAD
        from vllm_eagle_mrv2_smollm2.head import pack

        pack(options.head, HEAD)
        return
    if options.command == "answers":
        written = write_answers(options) if options.engines == 1 else shares_of_answers(options)
        options.out.write_text(json.dumps(written))
        print(f"{len(written)} conversations, {sum(len(answer) for _, answer in written)} tokens of answers")
        return

    from transformers import AutoTokenizer

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    target = load_target(options.target, device)
    head = train_head(target, json.loads(options.texts.read_text()), options)
    save_model(options.out, head, config_of(head, target, options.target))
    for kind, rates in acceptance(
        target, head, AutoTokenizer.from_pretrained(options.target), options.measured
    ).items():
        print(f"{kind}: accepted length {1 + sum(rates):.2f}, by position {[round(rate, 2) for rate in rates]}")


if __name__ == "__main__":
    main()
