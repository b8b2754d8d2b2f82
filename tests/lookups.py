"""What an engine with ``lookup_drafts`` drafts, beside what its requests' texts say."""

from __future__ import annotations

import itertools
from typing import Any

from support import greedy, speculator_of

from vllm_eagle_mrv2.kernels import lookup


def recorded_lookups(llm: Any) -> list[tuple[list[int], list[int]]]:
    """The text and the drafts of each request and batch from now on; filled as they come."""
    seen: list[tuple[list[int], list[int]]] = []
    drafts_by = speculator_of(llm).drafter.loop
    propose = drafts_by.propose

    def proposing(batch: Any) -> Any:
        drafts = propose(batch)
        for row, request in enumerate(batch.idx_mapping.tolist()):
            texts = drafts_by.lookup
            text = texts.tokens[request, : int(texts.lengths[request])]
            seen.append((text.tolist(), drafts[row, : batch.num_draft_tokens].tolist()))
        return drafts

    drafts_by.propose = proposing
    return seen


def continuation(text: list[int], first: int, length: int) -> list[int]:
    """What followed where the text was as it is at its end, over the longest stretch; nothing if it was nowhere.

    A short stretch counts only where the first draft followed it.
    """
    matches = []
    for place in range(1, len(text)):
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(text[place - 1 :: -1], text[::-1], strict=False)
        )
        matched = min(len(list(same)), lookup.MOST_MATCH)
        if matched >= (lookup.LEAST_MATCH if text[place] == first else lookup.SURE_MATCH):
            matches.append((matched, place))
    if not matches:
        return []
    _, place = max(matches)
    repeated = text[place:] * length  # a text that repeats itself goes on with its own drafts
    return repeated[:length]


def check(llm: Any, prompts: list[str], wanted: list[list[int]]) -> None:
    """Output is what was wanted, and drafts are looked up in prompt and output."""
    seen = recorded_lookups(llm)
    assert greedy(llm, prompts, len(wanted[0])) == wanted
    whole = [llm.get_tokenizer().encode(prompt) + output for prompt, output in zip(prompts, wanted, strict=True)]
    found = 0
    for text, drafts in seen:
        assert any(each[: len(text)] == text[: len(each)] for each in whole)  # the last drafts may go beyond the end
        follows = continuation(text, drafts[0], len(drafts)) if drafts else []
        assert not follows or drafts == follows
        found += bool(follows)
    assert 10 < found < 0.9 * len(seen)
