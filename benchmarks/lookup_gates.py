"""Accepted length of SmolLM2's head with several gates of ``lookup_drafts``, and with the best choice there is.

    PYTHONPATH=tools python benchmarks/lookup_gates.py --pair FOLDER [--prompts 32] [--tokens 128]

FOLDER is what ``python -m vllm_eagle_mrv2_smollm2 --out FOLDER`` made.  The target answers prompts that the head was
not trained on, greedily, in plain torch, and the head drafts at every place of the answers.  What an engine would
accept follows from these, for any gate.  "none" are the head's drafts alone; "best" takes at each place those of which
most are right, of the head's and of all that follow earlier tokens like the last two: no gate finds better ones.
Prints a JSON line for each kind of prompt and gate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from smollm2_prompts import KINDS, prompts
from train_demo_pair import Eagle3Head, Target, generate, rollout
from train_smollm2_head import DEPTH, chat_prompt, load_target
from transformers import AutoTokenizer

from vllm_eagle_mrv2.kernels.lookup import LEAST_MATCH, SURE_MATCH, earlier_matches, match_that_counts, what_follows

GATES = ((SURE_MATCH, LEAST_MATCH), (12, 3), (5, 3), (3, 3), (8, 2), (4, 2))
"""Tokens of a match that replaces the head's first draft, and of one that counts where the first draft agrees."""
Draft = Callable[[list[int], list[int], list[int]], list[int]]
"""The text so far, the head's drafts, the tokens that follow -> what is drafted."""


class Answer(NamedTuple):
    """A greedy answer."""

    prompt: list[int]
    tokens: list[int]
    drafts: list[list[int]]
    """The head's for each place of the prompt and the answer, from the third on."""


def load_head(folder: Path, target: Target) -> Eagle3Head:
    """A head's checkpoint, in float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    shape = dataclasses.replace(target.shape, num_hidden_layers=1, intermediate_size=config["intermediate_size"])
    head = Eagle3Head(shape, weights["d2t"] + torch.arange(len(weights["d2t"])))
    head.load_state_dict(weights)
    return head


@torch.inference_mode()
def answer_of(target: Target, head: Eagle3Head, prompt: list[int], count: int, end: int) -> Answer:
    """At most so many tokens, and what the head drafts before each of them."""
    greedy = torch.zeros(1, dtype=torch.long)
    tokens = generate(target, torch.tensor([prompt]), len(prompt) + count, greedy, torch.Generator())[0].tolist()
    if end in tokens[len(prompt) :]:
        tokens = tokens[: tokens.index(end, len(prompt)) + 1]
    padded = torch.tensor([tokens + (DEPTH + 1) * [0]])
    hidden, aux = target(padded)
    steps = [logits.argmax(-1)[0] for _, logits in rollout(target, head, padded, hidden, aux, DEPTH)]
    return Answer(prompt, tokens[len(prompt) :], head.draft_ids[torch.stack(steps, dim=1)].tolist())


def right(drafts: list[int], follows: list[int]) -> int:
    """How many of the drafts are accepted."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, follows, strict=False)))


def gate(sure: int, least: int) -> Draft:
    """What `lookup_drafts` drafts with these limits."""

    def draft(text: list[int], of_head: list[int], follows: list[int]) -> list[int]:
        match = match_that_counts(text, of_head[0], sure, least)
        return of_head if match is None else what_follows(text, match[1], DEPTH)

    return draft


def alone(text: list[int], of_head: list[int], follows: list[int]) -> list[int]:
    """The head's drafts."""
    return of_head


def best(text: list[int], of_head: list[int], follows: list[int]) -> list[int]:
    """The drafts of which most are right."""
    found = [what_follows(text, place, DEPTH) for _, place in earlier_matches(text, 2)]
    return max([of_head, *found], key=lambda one: right(one, follows))


def accepted_length(answers: list[Answer], draft: Draft) -> float:
    """Tokens an iteration; the first of an answer comes with the prefill."""
    iterations = tokens = 0
    for answer in answers:
        text, at = answer.prompt + answer.tokens, len(answer.prompt) + 1
        while at < len(text):
            follows = text[at : at + DEPTH]
            made = min(1 + right(draft(text[:at], answer.drafts[at - 2], follows), follows), len(text) - at)
            at, iterations, tokens = at + made, iterations + 1, tokens + made
    return tokens / iterations


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=32, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--known", action="store_true", help="prompts that the head was trained on, instead")
    options = parser.parse_args()
    target = load_target(options.pair / "target", torch.device("cpu"))
    head = load_head(options.pair / "eagle3", target)
    tokenizer, asked = AutoTokenizer.from_pretrained(options.pair / "target"), prompts(held_out=not options.known)
    policies: dict[str, Draft] = {"none": alone, **{f"{s}, {m}": gate(s, m) for s, m in GATES}, "best": best}
    for kind in options.kinds:
        texts = asked[kind][:: max(1, len(asked[kind]) // options.prompts)][: options.prompts]
        ids = [chat_prompt(tokenizer, text) for text in texts]
        answers = [answer_of(target, head, one, options.tokens, tokenizer.eos_token_id) for one in ids]
        for name, draft in policies.items():
            line = {"kind": kind, "gate": name, "accepted_length": round(accepted_length(answers, draft), 3)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
