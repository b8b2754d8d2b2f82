"""Drafts that are found in a request's own text: the kernel against its reference, and examples worked by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from vllm_eagle_mrv2.batch.buffers import DraftBuffers, Lookup
from vllm_eagle_mrv2.kernels.lookup import (
    MOST_MATCH,
    SURE_MATCH,
    look_up_drafts,
    look_up_drafts_reference,
    store_found_logits,
    store_found_logits_reference,
)
from vllm_eagle_mrv2.kernels.step_update import update_after_step, update_after_step_reference

from .test_kernels import DEVICE, MAX_LEN, assert_same, clone, decoding, ints, needs_device, poisoned

pytestmark = needs_device

NONE = -1


def batch_of(
    texts: Sequence[Sequence[int]],
    first: Sequence[int],
    *,
    k: int = 4,
    max_len: int = 64,
    idx_dtype: torch.dtype = torch.int32,
) -> tuple[DraftBuffers, Lookup]:
    """Texts and first drafts of as many requests, whose states are in another order than the rows of the batch."""
    states = len(texts) + 2
    tokens = torch.full((states, max_len), 7, dtype=torch.int32, device=DEVICE)  # what an earlier request left
    lengths = torch.full((states,), max_len, dtype=torch.int32, device=DEVICE)
    buffers = poisoned(len(texts) + 1, len(texts) + 8, num_draft_tokens=k, idx_dtype=idx_dtype)
    for row, text in enumerate(texts):
        request = states - 1 - row
        tokens[request, : len(text)] = ints(text)
        lengths[request] = len(text)
        buffers.idx_mapping[row] = request
    buffers.draft_tokens[: len(first), 0] = ints(first, torch.int64)
    buffers.live_reqs.fill_(len(texts))
    return buffers, Lookup.of(tokens, lengths, k)


def found(buffers: DraftBuffers, lookup: Lookup, num_rows: int) -> list[list[int]]:
    """What the kernel finds, twice, and its reference."""
    lookup.found.fill_(99)
    after = clone(buffers)
    look_up_drafts_reference(after, lookup, num_rows)
    expected = lookup.found.tolist()
    for _ in range(2):
        lookup.found.fill_(99)
        look_up_drafts(buffers, lookup, num_rows)
        assert lookup.found.tolist() == expected
        assert not lookup.best.any()
        assert not lookup.arrived.any()
        assert_same(buffers, after)
    assert expected[num_rows:] == [[99] * lookup.found.shape[1]] * (len(expected) - num_rows)
    return expected[:num_rows]


EXAMPLES = {
    "a place before": ([7, 1, 2, 3, 4, 5, 6, 8, 7, 1, 2, 3], 4, [4, 5, 6, 8]),
    "another first draft": ([7, 1, 2, 3, 4, 5, 6, 8, 7, 1, 2, 3], 5, [NONE] * 4),
    "a short match": ([9, 1, 2, 3, 4, 5, 6, 8, 7, 1, 2, 3], 4, [4, 5, 6, 8]),
    "too short a match": ([9, 0, 2, 3, 4, 5, 6, 8, 7, 1, 2, 3], 4, [NONE] * 4),
    "the longest": ([6, 7, 1, 2, 3, 4, 5, 9, 7, 1, 2, 3, 4, 0, 6, 7, 1, 2, 3], 4, [4, 5, 9, 7]),
    "of equals the latest": ([7, 1, 2, 3, 4, 5, 8, 7, 1, 2, 3, 4, 6, 9, 7, 1, 2, 3], 4, [4, 6, 9, 7]),
    "to the end of the text": ([1, 2, 3, 4, 5, 1, 2, 3, 4], 5, [5, 1, 2, 3]),
    "a text that repeats itself": ([5, 6, 5, 6, 5, 6, 5], 6, [6, 5, 6, 5]),
    "one token again and again": ([3, 3, 3, 3, 3], 3, [3, 3, 3, 3]),
    "at the beginning": ([1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4], 5, [5, 6, 8, 1]),
    "a short text": ([1, 2], 1, [NONE] * 4),
    "no text": ([], 1, [NONE] * 4),
}


@pytest.mark.parametrize(("text", "first", "drafts"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples(text: list[int], first: int, drafts: list[int]) -> None:
    """No match is so long that it would replace the first draft."""
    buffers, lookup = batch_of([text], [first])
    assert found(buffers, lookup, 1) == [[NONE, *drafts[1:]]]
    assert buffers.draft_tokens[0, 0] == first


@pytest.mark.parametrize("first", [9, 5])
@pytest.mark.parametrize("matched", [SURE_MATCH - 1, SURE_MATCH, MOST_MATCH])
def test_a_sure_match_replaces_the_first_draft(matched: int, first: int) -> None:
    """A shorter one counts only if it agrees."""
    end = list(range(100, 100 + matched))
    buffers, lookup = batch_of([[1, *end, 9, 90, 91, 2, *end]], [first])
    buffers.input_ids[0] = first
    sure = matched >= SURE_MATCH
    rest = [90, 91, 2] if sure or first == 9 else [NONE] * 3
    assert found(buffers, lookup, 1) == [[9 if sure else NONE, *rest]]
    assert buffers.draft_tokens[0, 0] == buffers.input_ids[0] == (9 if sure else first)


def test_the_longest_match_is_sure_whatever_another_says() -> None:
    """Of two places, the one that agrees with the first draft matches by fewer tokens."""
    end = list(range(100, 110))
    text = [*end, 9, 90, 91, *end[-5:], 7, 70, 71, *end]
    assert found(*batch_of([text], [7]), 1) == [[9, 90, 91, 105]]
    shorter = [*end[-7:], 9, 90, 91, *end[-5:], 7, 70, 71, *end]
    assert found(*batch_of([shorter], [7]), 1) == [[NONE, 70, 71, 100]]


@pytest.mark.parametrize("k", [1, 2, 5, 7])
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
def test_every_row_has_its_own_text(k: int, idx_dtype: torch.dtype) -> None:
    texts, firsts, drafts = zip(*EXAMPLES.values(), strict=True)
    rows = found(*batch_of(texts, firsts, k=k, idx_dtype=idx_dtype), len(texts))
    assert [row[1:4] for row in rows] == [each[1:k] for each in drafts]


@pytest.mark.parametrize(("earlier", "drafts"), [(MOST_MATCH, [90, 91]), (MOST_MATCH + 1, [92, 93])])
def test_longer_matches_are_as_good_as_long_ones(earlier: int, drafts: list[int]) -> None:
    """One place matches by one token less than are compared, or by as many; another before it by one more."""
    end = list(range(100, 130))
    text = [*end[-earlier:], 9, 90, 91, *end[-earlier + 1 :], 9, 92, 93, *end]
    assert [row[1:3] for row in found(*batch_of([text], [9], max_len=128), 1)] == [drafts]


def test_padding_finds_nothing() -> None:
    """Rows after the live ones, and a row of no request."""
    repeated = [5, 6, 5, 6, 5, 6, 5, 6]
    buffers, lookup = batch_of([repeated] * 5, [5] * 5)
    # Before what the others read stands a text that would match.
    lookup = replace(lookup, tokens=lookup.tokens[-4:], lengths=lookup.lengths[-4:])
    buffers.idx_mapping[:4] = ints([3, 2, 1, 0])
    buffers.live_reqs.fill_(3)
    buffers.idx_mapping[1] = -1
    nothing, something = [NONE] * 4, [NONE, 6, 5, 6]
    assert found(buffers, lookup, 4) == [something, nothing, something, nothing]


@pytest.mark.parametrize("length", [1023, 1024, 1025, 8192, 8193, 20000])
def test_long_texts(length: int) -> None:
    """The place is somewhere in a text that several programs read, or at its end; the text may fill the model."""
    draw = random.Random(length)
    texts, firsts = [], []
    for place in (4, length // 2, 1024 if length > 1030 else 100, length - 6):
        text = [draw.randrange(10, 30000) for _ in range(length)]
        text[place : place + 2] = [3, 4]
        text[place - 4 : place] = text[-4:] = [1, 2, 1, 1]
        texts.append(text)
        firsts.append(3)
    rows = found(*batch_of(texts, firsts, max_len=length), len(texts))
    assert [row[:2] for row in rows] == [[NONE, 4]] * len(texts)


def test_texts_of_few_tokens() -> None:
    """Many places match, and by more tokens than are compared."""
    draw = random.Random(0)
    texts = [[draw.randrange(choices) for _ in range(draw.randrange(60))] for choices in (1, 2, 2, 2, 3, 3, 3) * 8]
    firsts = [draw.randrange(3) for _ in texts]
    rows = found(*batch_of(texts, firsts, k=5), len(texts))
    assert 10 < sum(row[1] >= 0 for row in rows) < 50
    assert 5 < sum(row[0] >= 0 for row in rows) < 40
    assert max(map(len, texts)) > 2 * MOST_MATCH


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_is_found_replaces_drafts(step: int) -> None:
    before, sampled, feedback = decoding(3, step)
    before.query_start_loc.copy_(torch.arange(9))
    lookup = Lookup.of(torch.zeros(8, 4, dtype=torch.int32, device=DEVICE), ints([0] * 8), num_draft_tokens=3)
    lookup.found[1] = ints([51, 52, 53], torch.int64)
    actual, expected, without = clone(before), clone(before), clone(before)
    update_after_step(actual, sampled, feedback, 3, 3, MAX_LEN, lookup=lookup)
    update_after_step_reference(expected, sampled, feedback, 3, 3, MAX_LEN, lookup=lookup)
    update_after_step(without, sampled, feedback, 3, 3, MAX_LEN)
    assert_same(actual, expected)
    if step < 3:
        assert actual.draft_tokens[1, step] == 51 + step
        assert without.draft_tokens[1, step] != 51 + step
        without.draft_tokens[1, step] = 51 + step
    if step < 2:
        assert actual.input_ids[1] == 51 + step
        without.input_ids[1] = 51 + step
    assert_same(actual, without)  # nothing else differs


@pytest.mark.parametrize("steps_ago", [0, 1])
@pytest.mark.parametrize("step", [0, 1, 3, 4], ids="step {}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [60, 4096, 5000])
def test_what_is_found_is_certain(step: int, steps_ago: int, dtype: torch.dtype, vocab_size: int) -> None:
    """Of five requests one found nothing, one is padding, one is greedy; states have another order than rows."""
    buffers, lookup = batch_of([[1]] * 5, [1] * 5)
    buffers = replace(buffers, temperature=torch.tensor([0.7] * 2 + [0.0] + [0.7] * 4, device=DEVICE))
    buffers.idx_mapping[2] = -1
    buffers.draft_step.fill_(step + steps_ago)
    lookup.found[:5] = torch.tensor([[7] * 4, [NONE] * 4, [7] * 4, [10, 20, 30, vocab_size - 1], [7] * 4])
    expected = torch.randn(7, 4, vocab_size, device=DEVICE).to(dtype)
    lookup = replace(lookup, draft_logits=expected.clone())
    store_found_logits(buffers, lookup, 5, steps_ago)
    assert lookup.draft_logits is not None
    if step < 4:
        for request, token in ((6, 7), (3, lookup.found[3, step])):
            expected[request, step] = float("-inf")
            expected[request, step, token] = 0
    torch.testing.assert_close(lookup.draft_logits, expected, rtol=0, atol=0)
    reference = replace(lookup, draft_logits=expected.clone())
    store_found_logits_reference(buffers, reference, 5, steps_ago)
    torch.testing.assert_close(reference.draft_logits, expected, rtol=0, atol=0)
