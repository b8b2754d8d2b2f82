"""Compares two recorded surfaces, and tells what the changes mean for the adapter of the older one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any, Protocol

from vllm_eagle_mrv2.releases.surface import Symbol, check_recorded

Surface = Mapping[str, Any]
Entry = Mapping[str, Any]
_ALIKE, _NEARLY = 0.6, 0.8
_SHOWN = 3


class Tree(Protocol):
    """The sources of the newer release."""

    def find(self, module: str, name: str) -> dict[str, Any] | None:
        """Describe a symbol; None if it does not exist."""

    def modules(self) -> Iterable[tuple[str, str]]:
        """(name, text) of every module under ``vllm``."""

    def names_in(self, module: str, owner: str) -> Iterable[str]:
        """The names that a module defines, or one of its classes including bases."""


@dataclass(frozen=True)
class Change:
    """One difference; ``breaks`` marks changes that break the adapter, the others only need a look."""

    key: str
    what: str
    breaks: bool = False

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def diff(old: Surface, new: Surface) -> list[str]:
    """The drift from one recorded surface to another, one line per change."""
    return [str(change) for change in changes(old, new, old["symbols"].keys() | new["symbols"].keys())]


def changes(old: Surface, new: Surface, keys: Iterable[str]) -> list[Change]:
    """The changes of the given symbols, in alphabetical order."""
    found: list[Change] = []
    for key in sorted(set(keys)):
        before, after = old["symbols"].get(key), new["symbols"].get(key)
        if before is not None and after is not None:
            found += _compare(key, before, after)
        elif before is not None or after is not None:
            lacking, word = (old, "added") if before is None else (new, "missing")
            known = key in lacking.get("missing", ())
            found.append(Change(key, word if known else "only one of the two records knows it", breaks=after is None))
    return found


def _compare(key: str, before: Entry, after: Entry) -> Iterator[Change]:
    if before["kind"] != after["kind"]:
        yield Change(key, f"was {before['kind']}, is {after['kind']}", breaks=True)
    for what in ("bases", "parameters", "fields"):
        both = (before, after)
        if what == "fields" and all(one.get("fields") == one.get("parameters") for one in both):
            continue  # a dataclass: reported once, as its parameters
        yield from _list_changes(key, what, before, after)
    for name in before.get("defaults", []):
        if name in after.get("parameters", []) and name not in after.get("defaults", []):
            yield Change(key, f"parameter {name} lost its default", breaks=True)


def _list_changes(key: str, what: str, before: Entry, after: Entry) -> Iterator[Change]:
    old, new = before.get(what, []), after.get(what, [])
    one, callable_ = ("base" if what == "bases" else what[:-1]), what == "parameters"
    for name in old:
        if name not in new:
            yield Change(key, f"removed {one} {name}", breaks=callable_)
    for name in new:
        if name not in old:
            forced = callable_ and name not in after.get("defaults", []) and not name.startswith("*")
            yield Change(key, f"added {one} {name}{' (no default)' if forced else ''}", breaks=forced)
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield Change(key, f"reordered {what}: ({', '.join(old)}) -> ({', '.join(new)})", breaks=callable_)


# For the maintainer who adds a release


def drift(old: Surface, new: Surface, needed: Sequence[Symbol], tree: Tree, *, covered: bool) -> list[Change]:
    """The changes of the symbols that an adapter needs, with guesses where removed symbols are now.

    A symbol that ``doctor`` reports as missing or changed breaks the adapter.  If no adapter covers the newer release
    yet, a change that may not fit counts as breaking too.

    Args:
        old: the record of the release that the adapter knows.
        new: the record of the newer one.
        needed: the adapter's symbols on the newer one.
        tree: the sources of the newer one.
        covered: whether the adapter covers the newer one as well.
    """
    symbols = {symbol.key: symbol for symbol in needed}
    lacking = {finding.symbol.key: finding for finding in check_recorded(needed, new) if not finding.ok}
    found = []
    for change in changes(old, new, symbols):
        if change.what == "missing":
            found.append(Change(change.key, "removed", breaks=True))
            hints = whereabouts(symbols[change.key], old["symbols"][change.key], tree, old)
            found += [Change(change.key, hint) for hint in hints]
            continue
        feared = not covered and not _unused(symbols[change.key], change.what)
        found.append(replace(change, breaks=change.breaks and (feared or change.key in lacking)))
    for key in sorted(symbols.keys() & old["symbols"].keys() & new["symbols"].keys()):
        found += [Change(key, hint) for hint in _replaced(old["symbols"][key], new["symbols"][key])]
    told = {change.key for change in found if change.breaks}
    found += [Change(key, finding.detail, breaks=True) for key, finding in lacking.items() if key not in told]
    return found


def _unused(symbol: Symbol, what: str) -> bool:
    """Whether a change removes a parameter that the adapter never passed."""
    removed = re.fullmatch(r"removed parameter (\S+)", what)
    return removed is not None and symbol.parameters is not None and removed[1] not in symbol.parameters


def _replaced(before: Entry, after: Entry) -> list[str]:
    """Hints on parameters that were replaced by as many others in the same place, and may have been renamed."""
    old, new = before.get("parameters", []), after.get("parameters", [])
    steps = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    pairs = [
        pair
        for tag, a, b, c, d in steps
        if tag == "replace" and b - a == d - c
        for pair in zip(old[a:b], new[c:d], strict=True)
    ]
    return [
        f"in the place of parameter {was} stands {now}: perhaps a new name"
        for was, now in pairs
        if was not in new and now not in old
    ]


def whereabouts(symbol: Symbol, before: Entry, tree: Tree, old: Surface) -> list[str]:
    """Guesses, best first: the same name in another module, else in another class, else a similar name."""
    top, _, member = symbol.name.rpartition(".")
    moved = [
        f"moved to {module}:{symbol.name}"
        for module, text in tree.modules()
        if _defines(text, symbol.name.partition(".")[0]) and tree.find(module, symbol.name) is not None
    ]
    if moved:
        return moved[:_SHOWN]
    alike = _alike(symbol, top, before, tree, old)
    if top:
        elsewhere = [
            f"{module}:{owner}.{member} has its name"
            for module, text in tree.modules()
            if _defines(text, member)
            for owner in re.findall(r"^class (\w+)", text, re.MULTILINE)
            if owner != top and member in tree.names_in(module, owner)
        ]
        near = [hint for hint in elsewhere if hint.startswith(symbol.module + ":")] or elsewhere
        return [*near[:_SHOWN], *alike] if len(near) <= _SHOWN else alike
    return alike or _named_like(symbol.name, before, tree)


def _named_like(name: str, before: Entry, tree: Tree) -> list[str]:
    """Functions or classes anywhere in the sources with nearly the name of a removed one."""
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(name)
    scored = []
    for module, text in tree.modules():
        for other in re.findall(r"^(?:async def|def|class) (\w+)", text, re.MULTILINE):
            matcher.set_seq1(other)
            if matcher.quick_ratio() >= _NEARLY and matcher.ratio() >= _NEARLY:
                after = tree.find(module, other)
                if after is not None and after["kind"] == before["kind"]:
                    scored.append((matcher.ratio(), f"perhaps now {module}:{other}{_shown(after)}"))
    return [hint for _, hint in sorted(scored, reverse=True)[:_SHOWN]]


def _shown(entry: Entry) -> str:
    return f"({', '.join(entry['parameters'])})" if entry.get("parameters") else ""


def _defines(text: str, name: str) -> bool:
    return re.search(rf"^\s*(?:(?:async )?def|class) {name}\b|\b{name}\b[^\n=]*=", text, re.MULTILINE) is not None


def _alike(symbol: Symbol, owner: str, before: Entry, tree: Tree, old: Surface) -> list[str]:
    """Neighbours of a removed symbol with the same parameters or a similar name."""
    scored = []
    for name in tree.names_in(symbol.module, owner):
        path = f"{owner}.{name}" if owner else name
        if f"{symbol.module}:{path}" in old["symbols"] or name.startswith("__"):
            continue
        after = tree.find(symbol.module, path)
        if after is None or after["kind"] != before["kind"]:
            continue
        scores = [SequenceMatcher(None, symbol.name.rpartition(".")[2], name).ratio()]
        if before.get("parameters"):
            scores.append(SequenceMatcher(None, before["parameters"], after.get("parameters", [])).ratio())
        score = sum(scores) / len(scores)
        if score >= _ALIKE:
            scored.append((score, f"perhaps renamed to {path}{_shown(after)}"))
    return [hint for _, hint in sorted(scored, reverse=True)[:_SHOWN]]


def explain(found: list[Change], heading: str, total: int) -> str:
    """The drift as text: first the changes that break the adapter, then those that need a look."""
    lines = [heading]
    breaks = {change.key for change in found if change.breaks}
    for title, keys in (
        ("BREAKS: the adapter does not fit until these are taken up", breaks),
        ("to look at: the calls still fit", {change.key for change in found} - breaks),
    ):
        if keys:
            lines += ["", f"{title} ({len(keys)})"]
        for key in sorted(keys):
            lines.append(f"  {key}")
            own = [change for change in found if change.key == key]
            lines += [f"    {'!' if one.breaks else ' '} {one.what}" for one in sorted(own, key=lambda c: not c.breaks)]
    touched = len({change.key for change in found})
    return "\n".join([*lines, "", f"{total - touched} of {total} symbols unchanged"])
