"""``vllm-eagle-mrv2 rank-vocab``: ranks tokens by their frequency in text files, for the option ``draft_vocab``.

Exit codes: 0, the ranking is written; 1, the files contain no text; 2, the command could not be started as asked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_eagle_mrv2.cli.common.errors import CommandError, print_error
from vllm_eagle_mrv2.config.vocab_ranking import Ranking

# Keys of the text in common data sets and logs (JSON lines), at any depth (messages, choices).
_TEXT_KEYS = frozenset({"text", "content", "value", "prompt", "completion", "response", "output", "answer"})
_CHUNK_CHARACTERS = 1 << 16
_BATCH = 64
_COVERED_SIZES = 5


def rank_vocab(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Texts: .jsonl by line, others as they are.")],
    tokenizer: Annotated[str, typer.Option(metavar="MODEL", help="The target, for its tokenizer: path or hub name.")],
    output: Annotated[Path, typer.Option(metavar="PATH", help="Where the ranking goes.")] = Path("ranking.json"),
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="As in vLLM.")] = False,
) -> None:
    """Rank a tokenizer's tokens by how often they occur in text files, for the option draft_vocab.

    Best is text like that which the target is going to write: its own answers, from a log.
    """
    errors = Console(stderr=True)
    try:
        for file in files:
            if not file.is_file():
                raise CommandError(f"{file} is not a file.", 2)
        if not output.absolute().parent.is_dir():
            raise CommandError(f"the folder of {output} does not exist; make it, or give another --output.", 2)
        ranking = rank(_load_tokenizer(tokenizer, trust_remote_code), tokenizer, files, errors)
        output.write_text(ranking.model_dump_json(), encoding="utf-8")
    except (CommandError, OSError) as error:
        print_error(errors, error)
        raise typer.Exit(error.exit_code if isinstance(error, CommandError) else 2) from None
    _print_coverage(ranking, output)


def rank(tokenizer: Any, name: str, files: Iterable[Path], console: Console) -> Ranking:
    """Rank the tokens of a tokenizer by their frequency in files.

    Args:
        tokenizer: a transformers tokenizer.
        name: its name in the ranking.
        files: texts, read as a stream.
        console: shows a progress bar for each file.

    Raises:
        CommandError: a file contains no text, or a line is not JSON.
    """
    counts: Counter[int] = Counter()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for file in files:
            before = counts.total()
            with progress.open(file, "r", encoding="utf-8", errors="replace", description=file.name) as text:
                texts = _texts_of_lines(text, file) if file.suffix == ".jsonl" else _chunks(text)
                while batch := list(islice(texts, _BATCH)):
                    counts.update(chain.from_iterable(_encode(tokenizer, batch)))
            if counts.total() == before:
                fields = f" in the fields {', '.join(sorted(_TEXT_KEYS))}" if file.suffix == ".jsonl" else ""
                raise CommandError(f"{file} holds no text{fields}.", 1)
    # Special tokens come first: a draft must be able to end a text or a chat turn, whatever the corpus was.
    special = sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})
    frequent = sorted(
        (token for token in counts if token not in set(special)), key=lambda token: (-counts[token], token)
    )
    tokens = (*special, *frequent)
    vocab_size = 1 + max(tokenizer.get_vocab().values())
    return Ranking(tokenizer=name, vocab_size=vocab_size, tokens=tokens, coverage=_coverage(tokens, counts, vocab_size))


def _coverage(tokens: tuple[int, ...], counts: Counter[int], vocab_size: int) -> dict[int, float]:
    """Size -> share of the corpus, for the largest powers of two below the vocabulary size that the ranking reaches."""
    largest = (vocab_size - 1).bit_length() - 1
    sizes = [1 << power for power in range(max(0, largest - _COVERED_SIZES + 1), largest + 1)]
    return {
        size: round(sum(counts[token] for token in tokens[:size]) / counts.total(), 4)
        for size in sizes
        if size <= len(tokens)
    }


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise CommandError("transformers is not installed here: it comes with vLLM, install that.", 2) from None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommandError(f"the tokenizer of {name} cannot be read ({reason}).", 2) from None


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, verbose=False
    ).input_ids
    return ids


def _chunks(text: IO[str]) -> Iterator[str]:
    """Chunks of bounded length, cut at the end of a line or at least of a word."""
    rest = ""
    while read := text.read(_CHUNK_CHARACTERS):
        rest += read
        cut = max(rest.rfind("\n") + 1, rest.rfind(" "))
        cut = cut if cut > 0 else len(rest)
        yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest


def _texts_of_lines(lines: IO[str], file: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise CommandError(f"line {number} of {file} is not JSON.", 1) from None
        yield from _texts_in(entry)


def _texts_in(entry: Any, *, counts: bool = False) -> Iterator[str]:
    """The texts of fields that count, at any depth; a list counts as its field does."""
    if isinstance(entry, str):
        if counts:
            yield entry
    elif isinstance(entry, list):
        for each in entry:
            yield from _texts_in(each, counts=counts)
    elif isinstance(entry, dict):
        for key, value in entry.items():
            yield from _texts_in(value, counts=key in _TEXT_KEYS)


def _print_coverage(ranking: Ranking, output: Path) -> None:
    table = Table("size", "share of the text", title=f"{len(ranking.tokens)} of {ranking.vocab_size} tokens ranked")
    for size, share in ranking.coverage.items():
        table.add_row(str(size), f"{share:.2%}")
    console = Console()
    console.print(table)
    console.print(f"written to {output}", markup=False, highlight=False, soft_wrap=True)
