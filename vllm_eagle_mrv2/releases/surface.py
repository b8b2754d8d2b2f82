"""The coupling surface: the private vLLM symbols that an adapter relies on, and the check that a release has them.

A `Release` lists these needs as ``Symbol``s.  The same list is checked against the installed vLLM at start-up and, in
CI, against the recorded surface of every supported release, which ``tools/record_surface.py`` writes.

A described symbol, recorded or installed, is a JSON object:

* ``kind``: ``function``, ``class``, ``property`` or ``attribute``;
* ``parameters``: names in order, without ``self`` (``*args`` and ``**kwargs`` keep their stars); those of a class are
  its constructor's;
* ``defaults``: the parameters that have a default;
* ``bases``: a class's direct bases as dotted paths;
* ``fields``: a class's annotated fields, inherited ones first.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, ModuleType
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2.classes import class_path

Entry = Mapping[str, Any]
Status = Literal["found", "missing", "changed"]


def words(names: str) -> tuple[str, ...]:
    """Names separated by spaces, as parameters of a `Symbol`."""
    return tuple(names.split())


@dataclass(frozen=True)
class Symbol:
    """One name that an adapter needs.

    ``name`` is dotted inside the module: ``gumbel_sample``, ``BlockTables.slot_mappings``.
    ``parameters`` must all exist in this order.  Others may stand between them; in a function these must have defaults.
    None only requires that the symbol exists.
    ``releases`` is a version specifier of the releases that need the symbol in this form; empty for all of a series.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    why: str = ""
    releases: str = ""

    def needed_on(self, version: Version) -> bool:
        """Whether a release needs the symbol."""
        return version in SpecifierSet(self.releases)

    @property
    def key(self) -> str:
        """The key of the symbol in a recorded surface: ``module:name``."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Finding:
    """The result for one symbol; ``detail`` describes the difference in one line and is empty for ``found``."""

    symbol: Symbol
    status: Status
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "found"

    def __str__(self) -> str:
        line = f"{self.status} {self.symbol.key}"
        if self.detail:
            line += f": {self.detail}"
        return line + f" (needed: {self.symbol.why})" if self.symbol.why and not self.ok else line


def check_installed(symbols: Iterable[Symbol]) -> list[Finding]:
    """Import the modules of this environment and compare each symbol with them; reports failures, raises nothing."""
    findings = []
    for symbol in symbols:
        try:
            entry = describe_installed(symbol)
        except LookupError as error:
            findings.append(Finding(symbol, "missing", str(error.args[0])))
        else:
            findings.append(_compare(symbol, entry))
    return findings


def check_recorded(symbols: Iterable[Symbol], surface: Mapping[str, Any]) -> list[Finding]:
    """Compare each symbol with a recorded surface, the JSON object that ``tools/record_surface.py`` writes."""
    release = f"vLLM {surface.get('vllm_version', '?')}"
    findings = []
    for symbol in symbols:
        entry = surface["symbols"].get(symbol.key)
        if entry is not None:
            findings.append(_compare(symbol, entry))
        elif symbol.key in surface.get("missing", ()):
            findings.append(Finding(symbol, "missing", f"{release} has no such symbol"))
        else:
            findings.append(
                Finding(symbol, "missing", f"the record of {release} does not know it: record that release again")
            )
    return findings


def describe_installed(symbol: Symbol) -> Entry:
    """Describe a symbol of this environment; raise LookupError with the reason if it does not exist."""
    owner: Any = _import(symbol.module)
    *path, last = symbol.name.split(".")
    for part in path:
        owner = _member(owner, part, symbol.module)
    if isinstance(owner, type) and not hasattr(owner, last):
        if _declares(owner, last):
            return {"kind": "attribute"}
        raise LookupError(f"{owner.__qualname__} has no attribute {last}")
    return _describe(owner, last, _member(owner, last, symbol.module))


def _import(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # importing a GPU library may raise anything; the reason is reported
        reason = str(error).strip().splitlines()
        raise LookupError(f"cannot import {module}: {type(error).__name__}: {reason[0] if reason else ''}") from error


def _member(owner: Any, name: str, module: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise LookupError(f"{getattr(owner, '__qualname__', module)} has no attribute {name}") from None


def _describe(owner: Any, name: str, member: Any) -> Entry:
    if isinstance(member, type):
        return _describe_class(member)
    if isinstance(member, (property, functools.cached_property)):
        return {"kind": "property"}
    function = _unwrap_kernel(member)
    if not callable(function):
        return {"kind": "attribute"}
    # A plain function reached through its class still has self in its signature.
    skip = int(isinstance(owner, type) and inspect.isfunction(inspect.getattr_static(owner, name)))
    return {"kind": "function", **_signature(function, skip)}


def _describe_class(cls: type) -> Entry:
    entry = {"kind": "class", "bases": [class_path(base) for base in cls.__bases__ if base is not object]}
    return {**entry, **_signature(cls, 0), "fields": _annotated_fields(cls)}


def _signature(function: Any, skip: int) -> Entry:
    try:
        found = list(inspect.signature(function).parameters.values())[skip:]
    except (ValueError, TypeError):
        return {}
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return {
        "parameters": [stars.get(p.kind, "") + p.name for p in found],
        "defaults": [p.name for p in found if p.default is not p.empty],
    }


def _unwrap_kernel(member: Any) -> Any:
    """The Python function of a Triton kernel, which one or several wrappers keep as ``fn``."""
    while not inspect.isroutine(member) and callable(getattr(member, "fn", None)):
        member = member.fn
    return member


def _annotated_fields(cls: type) -> list[str]:
    """Annotated names of a class and its bases, without class variables, base classes first."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            if "ClassVar" not in str(annotation):
                names[name] = None
    return list(names)


def _declares(cls: type, name: str) -> bool:
    """Whether instances have a name that the class object lacks: a bare annotation, or an assignment to ``self``."""
    return name in _annotated_fields(cls) or any(
        _assigns(code, name) for base in cls.__mro__ for member in vars(base).values() for code in _codes(member)
    )


def _assigns(code: CodeType, name: str) -> bool:
    """Whether bytecode assigns to ``self.name``.  Parsing the sources instead would add half a second to start-up."""
    if name not in code.co_names:
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    return any(
        step.opname == "STORE_ATTR" and step.argval == name and _last_loaded(before) == "self"
        for before, step in pairwise(steps)
    )


def _last_loaded(step: dis.Instruction) -> object:
    """The last variable that an instruction loads; Python 3.13 may load two at once, the value and then its owner."""
    return step.argval[-1] if isinstance(step.argval, tuple) else step.argval


def _codes(member: object) -> Iterator[CodeType]:
    """The code objects of a class member, and of the functions defined inside it."""
    functions = [member]
    if isinstance(member, property):
        functions = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        functions = [member.func]
    pending = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]  # type: ignore[arg-type]
    while pending:
        code = pending.pop()
        if isinstance(code, CodeType):
            yield code
            pending.extend(code.co_consts)


def _compare(symbol: Symbol, entry: Entry) -> Finding:
    if symbol.parameters is None:
        return Finding(symbol, "found")
    if "parameters" not in entry:
        return Finding(symbol, "changed", f"it is {_article(str(entry['kind']))} without readable parameters")
    actual: Sequence[str] = entry["parameters"]
    gone = [name for name in symbol.parameters if name not in actual]
    shown = f"it takes ({', '.join(actual)})"
    if gone:
        return Finding(symbol, "changed", f"no parameter {', '.join(gone)}; {shown}")
    if not _in_order(symbol.parameters, iter(actual)):
        return Finding(symbol, "changed", f"parameters in another order than ({', '.join(symbol.parameters)}); {shown}")
    unknown = [name for name in actual if name not in (*symbol.parameters, *entry["defaults"]) and name[0] != "*"]
    if unknown and entry["kind"] == "function":
        return Finding(symbol, "changed", f"it needs {', '.join(unknown)}, which the adapter does not give; {shown}")
    return Finding(symbol, "found")


def _in_order(wanted: Sequence[str], actual: Iterator[str]) -> bool:
    return all(name in actual for name in wanted)  # each `in` consumes the iterator up to its match


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
