"""The command that ranks tokens, on the demo pair's tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support import PAIR
from typer.testing import CliRunner

from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.rank_vocab import _chunks, _coverage
from vllm_eagle_mrv2.config.vocab_ranking import Ranking, read_ranking

pytestmark = pytest.mark.any_release

transformers = pytest.importorskip("transformers")

TEXT = "The value of the name is the value of the object.\n"
SPECIAL = (0, 1)  # <s> and </s>, which no text of ours has


def run(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["rank-vocab", "--tokenizer", str(PAIR / "target"), *map(str, arguments)])
    assert result.exit_code == exit_code, result.output
    return result.output


def counted(text: str) -> Counter[int]:
    return Counter(transformers.AutoTokenizer.from_pretrained(PAIR / "target").encode(text, add_special_tokens=False))


def rank(tmp_path: Path, *files: Path) -> Ranking:
    run(*files, "--output", tmp_path / "ranking.json")
    return read_ranking(tmp_path / "ranking.json")


def file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_special_tokens_then_the_others_by_frequency(tmp_path: Path) -> None:
    ranking = rank(tmp_path, file(tmp_path / "a.txt", TEXT))
    counts = counted(TEXT)
    assert ranking.tokens[:2] == SPECIAL
    rest = ranking.tokens[2:]
    assert set(rest) == set(counts)
    assert [counts[token] for token in rest] == sorted(counts.values(), reverse=True)
    assert counts[rest[0]] > counts[rest[-1]]
    assert ranking.vocab_size == 2048
    assert ranking.tokenizer == str(PAIR / "target")


def test_files_add_up(tmp_path: Path) -> None:
    texts = [TEXT, "zebra " * 20]
    ranking = rank(tmp_path, *(file(tmp_path / f"{number}.txt", text) for number, text in enumerate(texts)))
    together = counted(texts[0]) + counted(texts[1])
    assert [together[token] for token in ranking.tokens[2:]] == sorted(together.values(), reverse=True)


def test_special_tokens_of_the_text_stand_once(tmp_path: Path) -> None:
    ranking = rank(tmp_path, file(tmp_path / "a.txt", "</s>" * 9 + TEXT))
    assert ranking.tokens[:2] == SPECIAL
    assert ranking.tokens.count(1) == 1


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        {"text": TEXT},
        {"messages": [{"role": "zebra", "content": TEXT}, {"role": "zebra", "content": [{"type": "q", "text": TEXT}]}]},
        {"id": "zebra", "choices": [{"message": {"content": TEXT}}], "usage": 3},
    ]
    ranking = rank(tmp_path, file(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, lines))))
    assert ranking == rank(tmp_path, file(tmp_path / "a.txt", TEXT))


def test_texts_in_a_list_count_as_their_field_does(tmp_path: Path) -> None:
    line = json.dumps({"tags": ["zebra"], "completion": [TEXT, TEXT]})
    assert rank(tmp_path, file(tmp_path / "a.jsonl", line)) == rank(tmp_path, file(tmp_path / "a.txt", TEXT))


def test_coverage() -> None:
    counts = Counter({5: 6, 7: 3, 9: 1})
    assert _coverage((0, 5, 7, 9), counts, vocab_size=9) == {1: 0.0, 2: 0.6, 4: 1.0}  # 8 were not ranked
    assert list(_coverage(tuple(range(2000)), Counter({0: 1}), vocab_size=2048)) == [64, 128, 256, 512, 1024]


def test_what_is_printed(tmp_path: Path) -> None:
    printed = run(file(tmp_path / "a.txt", TEXT * 50 + "zebra"), "--output", tmp_path / "r.json")
    tokens = len(read_ranking(tmp_path / "r.json").tokens)
    assert f"{tokens} of 2048 tokens ranked" in printed
    assert str(tmp_path / "r.json") in printed


def test_chunks_are_bounded_and_lose_nothing(tmp_path: Path) -> None:
    text = ("word " * 30_000 + "\n") + "x" * 200_000 + TEXT
    with file(tmp_path / "a.txt", text).open() as opened:
        chunks = list(_chunks(opened))
    assert "".join(chunks) == text
    assert max(map(len, chunks)) <= 2 * 65_536
    assert chunks[0].endswith("word")  # not within a word


def test_what_cannot_be_ranked(tmp_path: Path) -> None:
    good = file(tmp_path / "a.txt", TEXT)
    out = ["--output", tmp_path / "r.json"]
    assert "gone.txt is not a file" in run(good, tmp_path / "gone.txt", *out, exit_code=2)
    assert "does not exist" in run(good, "--output", tmp_path / "gone" / "r.json", exit_code=2)
    assert "empty.txt holds no text." in run(good, file(tmp_path / "empty.txt", ""), *out, exit_code=1)
    lines = file(tmp_path / "a.jsonl", json.dumps({"text": TEXT}) + "\n{")
    assert "line 2 of" in run(lines, *out, exit_code=1)
    lines = file(tmp_path / "b.jsonl", json.dumps({"body": TEXT}))
    assert "holds no text in the fields answer, " in run(lines, *out, exit_code=1)
    assert not (tmp_path / "r.json").exists()
    assert "cannot be read" in run(good, *out, "--tokenizer", tmp_path, exit_code=2)
