"""Prompts for SmolLM2, of several kinds, from templates and from what ships with Python (PSF licence).

Prompts for measurements ask about subjects and tasks, and have texts and functions of modules, that no prompt for
training has.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from train_demo_pair import documents_of, load_documents, module_text, module_tree

Kind = Literal["chat", "code", "editing", "prose"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HELD_OUT = 8
"""Of so many subjects and tasks, the last is for measurements only."""
HELD_OUT_MODULES = """
    calendar cmd copy email/utils ftplib genericpath gettext glob gzip http/client http/cookies imaplib inspect
    ipaddress locale mailbox mimetypes ntpath optparse pickle platform posixpath pprint sched selectors shlex smtplib
    socket socketserver tarfile timeit tokenize trace uuid warnings weakref webbrowser
"""
"""Of the standard library, for measurements only; all others are to train with."""
_NO_MODULES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
"""Folders beside the modules of the standard library."""

_SUBJECTS = """
    the water cycle; photosynthesis; the French Revolution; compound interest; how vaccines work; plate tectonics;
    the rules of chess; baking bread; learning a language; the speed of light; renewable energy; the Roman Empire;
    public libraries; how the heart pumps blood; writing a cover letter; black holes; saving money; growing tomatoes;
    the history of the bicycle; electric cars; coral reefs; time management; the human skeleton; jazz music;
    how rainbows form; the internet; volcanoes; healthy breakfasts; the Great Wall of China; meditation; honey bees;
    gravity; job interviews; the moon landing; first aid for burns; glaciers; the printing press; sleep; soil;
    how airplanes fly; tea and coffee; earthquakes; fractions; the Amazon rainforest; online privacy; penguins;
    running a marathon; the solar system; recycling; Shakespeare; camping in the rain; inflation; the immune system;
    teamwork; deserts; how batteries store energy; folk tales; bridges; migration of birds; town planning; the senses;
    making friends in a new city; weather forecasts; the Silk Road
"""
_QUESTIONS = (
    "What should everyone know about {}?",
    "Explain {} to a child of ten.",
    "Give me five facts about {}.",
    "Write a short paragraph about {}.",
    "What are common misunderstandings about {}?",
    "Summarize the most important points about {} as a list.",
    "Write a short story in which {} plays a role.",
    "Why does {} matter today?",
)
_TASKS = """
    reverses a string; counts the vowels of a text; checks whether a number is prime; merges two sorted lists;
    computes the factorial of a number; finds the largest item of a list; removes duplicates from a list;
    reads a CSV file into dictionaries; counts the words of a file; flattens a nested list; computes Fibonacci numbers;
    checks whether a word is a palindrome; sorts dictionaries by a key; converts Celsius to Fahrenheit;
    finds the common items of two lists; generates a random password; parses a date; rotates a matrix by 90 degrees;
    computes the average of numbers; groups words by their first letter; validates an e-mail address; rolls two dice;
    finds all divisors of a number; splits a list into chunks; computes the dot product of two vectors;
    converts an integer to binary; finds the second largest number; counts how often each character occurs;
    writes a dictionary to a JSON file; transposes a matrix; computes the greatest common divisor; shuffles a list
"""
_REQUESTS = ("Write a Python function that {}.", "Write a Python function that {}, with a docstring and an example.")
_ABOUT_CODE = ("Explain what this Python function does:", "Write a docstring for this Python function:")
_EDITS_OF_CODE = (
    "Add type hints to this function and give me all of it:",
    "Rename the first parameter of this function to value and give me all of it:",
)
_EDITS_OF_TEXT = (
    "Repeat this text, with every sentence on a line of its own:",
    "Correct the spelling of this text and give me all of it:",
    "Rewrite this text so that it is easier to read:",
)
_CODE_LINES = range(5, 19)
_TEXT_CHARACTERS = range(160, 600)


def prompts(held_out: bool) -> dict[Kind, list[str]]:
    """What a user asks for, by kind; the same in every run with the same Python.

    Args:
        held_out: whether to return those for measurements, instead of those to train with.
    """
    subjects, tasks = (_part(_items(text), held_out) for text in (_SUBJECTS, _TASKS))
    modules = training_modules()
    functions = _by_beginning(_functions(modules))
    texts = _by_beginning(_paragraphs(load_documents(modules)))
    if held_out:
        modules = HELD_OUT_MODULES.split()
        documents = documents_of(map(module_text, modules))
        functions = _without(functions, _by_beginning(_functions(modules)))
        texts = _without(texts, _by_beginning(_paragraphs(documents)))
    chat = [question.format(subject) for subject in subjects for question in _QUESTIONS]
    code = [request.format(task) for task in tasks for request in _REQUESTS]
    code += [f"{question}\n\n```python\n{source}\n```" for source in functions.values() for question in _ABOUT_CODE]
    editing = [f"{edit}\n\n```python\n{source}\n```" for source in functions.values() for edit in _EDITS_OF_CODE]
    for text in texts.values():
        editing += [f"{edit}\n\n{_misspelt(text) if 'spelling' in edit else text}" for edit in _EDITS_OF_TEXT]
    prose = [f"Continue this text:\n\n{beginning}" for beginning in texts]
    return {"chat": chat, "code": code, "editing": editing, "prose": prose}


def training_modules() -> list[str]:
    """The modules to train with, by their paths without ``.py``."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path.relative_to(root).with_suffix("") for path in sorted(root.rglob("*.py"))]
    names = [path.as_posix() for path in paths if not _NO_MODULES.intersection(path.parts)]
    return [name for name in names if name not in HELD_OUT_MODULES.split()]


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";")]


def _part(items: list[str], held_out: bool) -> list[str]:
    return [item for number, item in enumerate(items, start=1) if (number % HELD_OUT == 0) is held_out]


def _functions(modules: list[str]) -> Iterator[str]:
    """Short functions of the standard library, with their source."""
    for name in modules:
        for node in module_tree(name).body:
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 in _CODE_LINES:
                yield ast.unparse(node)


def _paragraphs(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        yield from (line for line in document.split("\n") if len(line) in _TEXT_CHARACTERS)


def _by_beginning(texts: Iterable[str]) -> dict[str, str]:
    """Beginning -> text; the last of those that begin alike."""
    return {" ".join(text.split()[:24]): text for text in texts}


def _without(known: dict[str, str], texts: dict[str, str]) -> dict[str, str]:
    """The texts that are not, nor almost, among those that are known."""
    first_words = {tuple(beginning.split()[:8]) for beginning in known}
    return {beginning: text for beginning, text in texts.items() if tuple(beginning.split()[:8]) not in first_words}


def _misspelt(text: str) -> str:
    """The text with two letters swapped in one of four longer words."""
    draw, words = random.Random(text), text.split(" ")
    for place, word in enumerate(words):
        if len(word) > 5 and word.isalpha() and draw.random() < 0.25:
            cut = draw.randrange(1, len(word) - 2)
            words[place] = word[:cut] + word[cut + 1] + word[cut] + word[cut + 2 :]
    return " ".join(words)
