"""The coupling surface: what is installed, what is recorded, and that the two speak of the same thing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_eagle_mrv2.surface import Finding, Symbol, check_installed, check_recorded, describe_installed

FILES = {
    "__init__.py": "",
    "base.py": """
        import functools

        class Base:
            kind: str
            limit: int = 3

            def __init__(self, config, device, *, warm=True):
                self.config = config
                self.limit: int = config.limit
                self.left, self.right = 1, 2

            def capture(self, states, pool=None): ...

            @property
            def width(self): ...

            @functools.cached_property
            def depth(self): ...
        """,
    "sub/__init__.py": "from .leaf import sample as exported",
    "sub/leaf.py": """
        import dataclasses
        from collections.abc import Iterable
        from typing import ClassVar, NamedTuple

        from .. import base
        from ..base import Base as Parent

        LIMIT = 7

        def sample(logits, idx, *rest, scale=1.0, **options): ...

        class Leaf(Parent):
            @staticmethod
            def make(path): ...

            @classmethod
            def build(cls, path, mode): ...

            def load(self, model):
                self.model = model
                for self.step in range(3):
                    pass

        class Twice(base.Base):
            def __init__(self, only): ...

        @dataclasses.dataclass
        class Parts:
            size: int
            table: ClassVar[dict] = {}
            mode: str = "none"

        @dataclasses.dataclass
        class More(Parts):
            extra: Iterable[int] = ()
            seen: list = dataclasses.field(default_factory=list)
            made: int = dataclasses.field(init=False, default=0)

        class Pair(NamedTuple):
            left: int
            right: int = 0

        class Kernel:
            def __init__(self, fn):
                self.fn = fn

            def __call__(self, *args, **kwargs): ...
        """,
}
LEAF = "surface_subject.sub.leaf"
PRESENT = [
    Symbol(LEAF, "sample", ("logits", "idx")),
    Symbol(LEAF, "sample", ("logits", "*rest", "scale", "**options")),
    Symbol("surface_subject.sub", "exported", ("idx",)),
    Symbol("surface_subject.sub", "leaf"),
    Symbol(LEAF, "LIMIT"),
    Symbol(LEAF, "Leaf", ("config", "device", "warm")),
    Symbol(LEAF, "Leaf.__init__", ("config", "warm")),
    Symbol(LEAF, "Leaf.capture", ("states", "pool")),
    Symbol(LEAF, "Leaf.make", ("path",)),
    Symbol(LEAF, "Leaf.build", ("path", "mode")),
    Symbol(LEAF, "Leaf.width"),
    Symbol(LEAF, "Leaf.depth"),
    Symbol(LEAF, "Leaf.kind"),
    Symbol(LEAF, "Leaf.config"),
    Symbol(LEAF, "Leaf.right"),
    Symbol(LEAF, "Leaf.model"),
    Symbol(LEAF, "Leaf.step"),
    Symbol(LEAF, "Twice", ("only",)),
    Symbol(LEAF, "Twice.capture"),
    Symbol(LEAF, "More", ("size", "mode", "extra", "seen")),
    Symbol(LEAF, "More.size"),
    Symbol(LEAF, "Pair", ("left", "right")),
]
ABSENT = [
    (Symbol(LEAF, "gone"), "missing"),
    (Symbol(LEAF, "Leaf.gone", why="the draft loop"), "missing"),
    (Symbol(LEAF, "Gone.capture"), "missing"),
    (Symbol("surface_subject.gone", "sample"), "missing"),
    (Symbol(LEAF, "sample", ("logits", "temperature")), "changed"),
    (Symbol(LEAF, "sample", ("idx", "logits")), "changed"),
    (Symbol(LEAF, "Leaf.make", ("self", "path")), "changed"),
    (Symbol(LEAF, "Leaf.capture", ("self", "states")), "changed"),
    (Symbol(LEAF, "Parts", ("table",)), "changed"),
    (Symbol(LEAF, "More", ("made",)), "changed"),
    (Symbol(LEAF, "LIMIT", ("anything",)), "changed"),
]


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    path = Path(__file__).parents[2] / "ci" / "record_surface.py"
    spec = importlib.util.spec_from_file_location("record_surface", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        file = tmp_path / "surface_subject" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "surface_subject"]:
        del sys.modules[name]


def record(recorder: ModuleType, root: Path, symbols: list[Symbol]) -> dict[str, Any]:
    surface: dict[str, Any] = json.loads(json.dumps(recorder.Recorder(root).record("1.2.3", symbols)))
    return surface


@pytest.mark.parametrize("symbol", PRESENT, ids=lambda s: f"{s.name}{s.parameters or ''}")
def test_what_is_there_is_found(recorder: ModuleType, subject: Path, symbol: Symbol) -> None:
    assert check_installed([symbol]) == [Finding(symbol, "found")]
    assert check_recorded([symbol], record(recorder, subject, [symbol])) == [Finding(symbol, "found")]


@pytest.mark.parametrize(("symbol", "status"), ABSENT, ids=lambda v: getattr(v, "name", v))
def test_drift_is_reported_with_its_reason(recorder: ModuleType, subject: Path, symbol: Symbol, status: str) -> None:
    for finding in check_installed([symbol]) + check_recorded([symbol], record(recorder, subject, [symbol])):
        assert finding.status == status
        assert finding.detail
        assert not finding.ok
        assert symbol.key in str(finding)
        assert symbol.why in str(finding)


@pytest.mark.parametrize("symbol", PRESENT, ids=lambda s: f"{s.name}{s.parameters or ''}")
def test_the_record_describes_what_importing_would_show(recorder: ModuleType, subject: Path, symbol: Symbol) -> None:
    recorded = record(recorder, subject, [symbol])["symbols"][symbol.key]
    installed = describe_installed(symbol)
    if symbol.name in ("Pair", "leaf"):  # a NamedTuple's real base is tuple; a module has no signature of its own
        assert recorded.get("parameters") == installed.get("parameters")
    else:
        assert recorded == installed


def test_a_kernel_object_has_the_parameters_of_its_function(subject: Path) -> None:
    leaf: Any = importlib.import_module(LEAF)
    leaf.sample = leaf.Kernel(leaf.Kernel(leaf.sample))
    assert check_installed([Symbol(LEAF, "sample", ("logits", "idx"))])[0].ok


def test_a_module_that_fails_to_import_is_missing_with_the_reason(subject: Path) -> None:
    (subject / "surface_subject" / "broken.py").write_text("raise OSError('libcuda.so.1: no such file')\n")
    (finding,) = check_installed([Symbol("surface_subject.broken", "anything")])
    assert finding.status == "missing"
    assert finding.detail == "cannot import surface_subject.broken: OSError: libcuda.so.1: no such file"


def test_a_symbol_newer_than_the_record_asks_for_a_new_record(recorder: ModuleType, subject: Path) -> None:
    surface = record(recorder, subject, PRESENT)
    (finding,) = check_recorded([Symbol(LEAF, "sampled_later")], surface)
    assert finding.status == "missing"
    assert "record that release again" in finding.detail


def test_the_record_is_made_without_running_the_source(recorder: ModuleType, subject: Path) -> None:
    leaf = subject / "surface_subject" / "sub" / "leaf.py"
    leaf.write_text(leaf.read_text() + "\nraise SystemExit('executed')\n")
    assert not record(recorder, subject, PRESENT)["missing"]


def test_diff_names_each_change(recorder: ModuleType) -> None:
    def surface(missing: str, **symbols: Any) -> dict[str, Any]:
        entries = {f"m:{name}": entry for name, entry in symbols.items()}
        return {"vllm_version": "1", "symbols": entries, "missing": [f"m:{missing}"]}

    def function(*parameters: str, defaults: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"kind": "function", "parameters": list(parameters), "defaults": list(defaults)}

    parts = {"kind": "class", "bases": ["m.Old"], "fields": ["a"], "parameters": ["a"], "defaults": []}
    old = surface(
        "fresh",
        gone=function(),
        unasked=function(),
        same=function("a"),
        f=function("a", "b", "c"),
        turned=function("a", "b"),
        Parts=parts,
    )
    new = surface(
        "gone",
        same=function("a"),
        fresh=function(),
        f=function("a", "c", "d", "e", defaults=("e",)),
        turned=function("b", "a"),
        Parts={**parts, "bases": ["m.New"], "fields": ["a", "b"], "parameters": ["a", "b"]},
    )
    assert recorder.diff(old, new) == [
        "m:Parts: removed base m.Old",
        "m:Parts: added base m.New",
        "m:Parts: added parameter b (no default)",
        "m:f: removed parameter b",
        "m:f: added parameter d (no default)",
        "m:f: added parameter e",
        "m:fresh: added",
        "m:gone: missing",
        "m:turned: reordered parameters: (a, b) -> (b, a)",
        "m:unasked: only one of the two records knows it",
    ]
    assert recorder.diff(old, old) == []
