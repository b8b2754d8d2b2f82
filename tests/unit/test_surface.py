"""The coupling surface: what is installed, what is recorded, and that the two speak of the same thing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version
from scripts import script

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.cli.doctor.recorded import load_surface, recorded
from vllm_eagle_mrv2.releases import release_for
from vllm_eagle_mrv2.releases.spec import Release
from vllm_eagle_mrv2.releases.surface import Finding, Symbol, check_installed, check_recorded, describe_installed

pytestmark = pytest.mark.any_release

FILES = {
    "__init__.py": "",
    # More names than one byte counts.
    "many.py": "class Many:\n    def __init__(self):\n" + "".join(f"        self.n{n} = {n}\n" for n in range(300)),
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
            def width(self):
                self.read = True

            @width.setter
            def width(self, value):
                self.written = value

            @functools.cached_property
            def depth(self):
                self.sounded = True
        """,
    "sub/__init__.py": "from .leaf import sample as exported",
    "sub/leaf.py": """
        import dataclasses
        import functools
        from collections.abc import Iterable
        from typing import ClassVar, NamedTuple

        from .. import base
        from ..base import Base as Parent

        LIMIT = 7

        def sample(logits, idx, *rest, scale=1.0, **options): ...

        def logged(function):
            @functools.wraps(function)
            def call(*args):
                return function(*args)

            return call

        class Leaf(Parent):
            @staticmethod
            def make(path): ...

            @classmethod
            def build(cls, path, mode): ...

            def load(self, model):
                self.model = model
                model.loaded = True
                for self.step in range(3):
                    pass

            @logged
            def start(self, model):
                self.started = True

                def stop():
                    self.stopped = True

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
    Symbol(LEAF, "sample", ("logits", "idx", "*rest", "scale", "**options")),
    Symbol("surface_subject.sub", "exported", ("logits", "idx")),
    Symbol("surface_subject.sub", "leaf"),
    Symbol(LEAF, "LIMIT"),
    Symbol(LEAF, "Leaf", ("config", "device", "warm")),
    Symbol(LEAF, "Leaf.__init__", ("config", "device")),
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
    Symbol(LEAF, "Leaf.started"),
    Symbol(LEAF, "Leaf.stopped"),
    Symbol(LEAF, "Leaf.read"),
    Symbol(LEAF, "Leaf.written"),
    Symbol(LEAF, "Leaf.sounded"),
    Symbol("surface_subject.many", "Many.n299"),
    Symbol(LEAF, "Twice", ("only",)),
    Symbol(LEAF, "Twice.capture"),
    Symbol(LEAF, "More", ("size", "mode", "extra", "seen")),
    Symbol(LEAF, "More.size"),
    Symbol(LEAF, "Pair", ("left", "right")),
]
ABSENT = [
    (Symbol(LEAF, "gone"), "missing"),
    (Symbol(LEAF, "Leaf.gone", why="the draft loop"), "missing"),
    (Symbol(LEAF, "Leaf.range"), "missing"),
    (Symbol(LEAF, "Leaf.loaded"), "missing"),
    (Symbol(LEAF, "Gone.capture"), "missing"),
    (Symbol("surface_subject.gone", "sample"), "missing"),
    (Symbol(LEAF, "sample", ("logits", "temperature")), "changed"),
    (Symbol(LEAF, "sample", ("idx", "logits")), "changed"),
    (Symbol(LEAF, "Leaf.make", ("self", "path")), "changed"),
    (Symbol(LEAF, "Leaf.capture", ("self", "states")), "changed"),
    (Symbol(LEAF, "Parts", ("table",)), "changed"),
    (Symbol(LEAF, "More", ("made",)), "changed"),
    (Symbol(LEAF, "LIMIT", ("anything",)), "changed"),
    (Symbol(LEAF, "sample", ("logits", "scale")), "changed"),
    (Symbol(LEAF, "Leaf.build", ("path",)), "changed"),
]


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    return script("record_surface")


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


def test_another_class_of_that_name_does_not_count(subject: Path) -> None:
    inner = "class Outer:\n    class Worker:\n        def __init__(self): self.device = 1\n"
    (subject / "surface_subject" / "twice.py").write_text(f"{inner}class Worker: ...\n")
    assert check_installed([Symbol("surface_subject.twice", "Outer.Worker.device")])[0].ok
    assert check_installed([Symbol("surface_subject.twice", "Worker.device")])[0].status == "missing"


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


def test_diff_names_a_default_that_is_gone(recorder: ModuleType) -> None:
    def surface(*defaults: str) -> dict[str, Any]:
        entry = {"kind": "function", "parameters": ["a", "b"], "defaults": list(defaults)}
        return {"vllm_version": "1", "symbols": {"m:f": entry}, "missing": []}

    assert recorder.diff(surface("a", "b"), surface("b")) == ["m:f: parameter a lost its default"]
    assert recorder.diff(surface("b"), surface("a", "b")) == []


# Taking up a release

BEFORE = {
    "engine.py": """
        class Loop:
            def __init__(self, config): ...
            def propose(self, batch, tokens=None): ...
            def run_model(self, num_tokens, metadata): ...
            def finish(self, output): ...
            def left_alone(self, states): ...
            def loosened(self, states, unused=None): ...
            def tightened(self, states, pool=None): ...
            def sample(self, hidden, positions, seeds): ...

        class Graphs:
            def replay(self, desc): ...

        def uniform_token_count(requests, tokens): ...
        def nowhere_to_be_found(): ...
        def nowhere_to_be_found_either(): ...
        """,
}
AFTER = {
    "engine.py": """
        from .graphs import Graphs  # what is imported is found as before

        class Base:
            def finish(self, output): ...

        class Loop:
            def __init__(self, config): ...
            def propose(self, batch, slots, tokens=None): ...
            def _run_model(self, num_tokens, metadata): ...
            def left_alone(self, states): ...
            def loosened(self, states, extra=None): ...
            def tightened(self, states, pool): ...
            def sample(self, hidden, source_positions, seeds): ...
        """,
    "graphs.py": """
        class Graphs:
            def replay(self, desc): ...
        """,
    "counts.py": "def uniform_decode_token_count(requests, tokens): ...",
}
NEEDED = [
    *(f"Loop.{name}" for name in ("propose", "run_model", "finish", "left_alone", "loosened", "tightened", "sample")),
    "Graphs.replay",
    "uniform_token_count",
    "nowhere_to_be_found",
]


@pytest.fixture
def taken_up(recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two releases of a vLLM made up for the purpose: 0.40.1, which has an adapter, and 0.41.0, which has none."""
    for release, modules in (("0.40.1", BEFORE), ("0.41.0", AFTER)):
        for name, text in {"__init__.py": "", **modules}.items():
            file = tmp_path / f"cuda-{release}" / "vllm" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
    symbols = tuple(Symbol("vllm.engine", name, ("states",) if "loosened" in name else None) for name in NEEDED)
    adapter = Release(
        name="made_up",
        series=("0.40",),
        symbols=(
            *symbols,
            Symbol("vllm.engine", "Loop.only_later", releases=">=0.40.2,<0.41"),
            Symbol("vllm.engine", "nowhere_to_be_found_either", releases="<0.41"),
        ),
        stock={},
        adapter="nowhere",
    )
    monkeypatch.setattr(releases, "all_releases", lambda: [adapter])
    monkeypatch.setattr(recorder, "recorded", lambda: ("0.40.1",))
    return tmp_path


def covering(monkeypatch: pytest.MonkeyPatch, *further: Symbol) -> None:
    """The adapter is for 0.41, too."""
    (adapter,) = releases.all_releases()
    wider = dataclasses.replace(adapter, series=("0.40", "0.41"), symbols=(*adapter.symbols, *further))
    monkeypatch.setattr(releases, "all_releases", lambda: [wider])


def run(recorder: ModuleType, root: Path, *arguments: str) -> int:
    status: int = recorder.main([*arguments, "--source-root", str(root), "--out", str(root / "surfaces")])
    return status


def drift_lines(output: str) -> dict[str, list[str]]:
    """Symbol -> the lines about it, in a drift that is printed."""
    lines: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith("  vllm."):
            lines[line.strip().partition(":")[2]] = here = []
        elif line.startswith("    "):
            here.append(line[4:])
    return lines


def test_drift_says_what_a_host_has_to_take_up(recorder: ModuleType, taken_up: Path, capsys: Any) -> None:
    assert run(recorder, taken_up, "--all") == 0
    capsys.readouterr()
    assert run(recorder, taken_up, "--drift", "0.41.0") == 1
    output = capsys.readouterr().out
    assert output.startswith("vLLM 0.41.0 against 0.40.1: the symbols that adapter made_up needs\n")
    assert drift_lines(output) == {
        "Loop.propose": ["! added parameter slots (no default)"],
        "Loop.run_model": ["! removed", "  perhaps renamed to Loop._run_model(num_tokens, metadata)"],
        "Loop.finish": ["! removed", "  vllm.engine:Base.finish has its name"],
        "Loop.tightened": ["! parameter pool lost its default"],
        "Loop.sample": [
            "! removed parameter positions",
            "! added parameter source_positions (no default)",
            "  in the place of parameter positions stands source_positions: perhaps a new name",
        ],
        "uniform_token_count": [
            "! removed",
            "  perhaps now vllm.counts:uniform_decode_token_count(requests, tokens)",
        ],
        "nowhere_to_be_found": ["! removed"],
        "Loop.loosened": [
            "  removed parameter unused",
            "  added parameter extra",
            "  in the place of parameter unused stands extra: perhaps a new name",
        ],
    }
    breaks, _, to_look_at = output.partition("to look at: the calls still fit (1)")
    assert "BREAKS: the adapter does not fit until these are taken up (7)" in breaks
    assert "Loop.loosened" in to_look_at
    assert "2 of 10 symbols unchanged" in output
    assert sorted(path.name for path in (taken_up / "surfaces").iterdir()) == ["0.40.1.json"]


def test_of_a_release_with_a_host_only_that_breaks_which_doctor_misses(
    recorder: ModuleType, taken_up: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are told of the same symbols: recording, drift and what ``doctor`` calls missing or changed."""
    assert run(recorder, taken_up, "--all") == 0
    covering(
        monkeypatch,
        Symbol("vllm.engine", "Loop.__init__", ("config", "device")),
        Symbol("vllm.engine", "asked_for_in_vain", releases=">=0.41"),
    )
    capsys.readouterr()
    assert run(recorder, taken_up, "0.41.0") == 0
    needed = releases.release_for("0.41.0").symbols_of(Version("0.41.0"))
    surface = json.loads((taken_up / "surfaces" / "0.41.0.json").read_text())
    lacking = [finding for finding in check_recorded(needed, surface) if not finding.ok]
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(f": 7 symbols; adapter made_up needs 12, lacks {len(lacking)}")
    assert rest == [f"  {finding}" for finding in lacking]
    assert run(recorder, taken_up, "--drift", "0.41.0") == 1
    breaking = {
        name: lines for name, lines in drift_lines(capsys.readouterr().out).items() if any("!" in one for one in lines)
    }
    assert breaking.keys() == {finding.symbol.name for finding in lacking}
    assert breaking.keys() == {
        *("Loop.__init__", "Loop.run_model", "Loop.finish", "uniform_token_count", "nowhere_to_be_found"),
        "asked_for_in_vain",
    }
    assert breaking["Loop.__init__"][0] == "! no parameter device; it takes (config)"


@pytest.mark.parametrize("release", recorded())
def test_of_a_supported_release_nothing_breaks(recorder: ModuleType, release: str) -> None:
    """Compared with itself and with the oldest record, without their sources, of which only hints are read."""
    needed = release_for(release).symbols_of(Version(release))
    old, new = load_surface(next(iter(recorded()))), load_surface(release)
    for before in (old, new):
        found = recorder.drift(before, new, needed, None, covered=True)
        assert [str(change) for change in found if change.breaks] == []


def test_a_symbol_that_moved_is_traced(recorder: ModuleType, taken_up: Path, capsys: Any) -> None:
    run(recorder, taken_up, "--all")
    engine = taken_up / "cuda-0.41.0" / "vllm" / "engine.py"
    engine.write_text(engine.read_text().replace("from .graphs import Graphs", "import os"))
    assert run(recorder, taken_up, "--drift", "0.41.0") == 1
    assert drift_lines(capsys.readouterr().out)["Graphs.replay"] == [
        "! removed",
        "  moved to vllm.graphs:Graphs.replay",
    ]


def test_nothing_changed(recorder: ModuleType, taken_up: Path, capsys: Any) -> None:
    run(recorder, taken_up, "--all")
    (taken_up / "cuda-0.40.1").rename(taken_up / "cuda-0.42.0")
    assert run(recorder, taken_up, "--drift", "0.42.0") == 0
    assert "10 of 10 symbols unchanged" in capsys.readouterr().out


def test_recording_a_release_without_a_host_prints_its_drift(recorder: ModuleType, taken_up: Path, capsys: Any) -> None:
    assert run(recorder, taken_up, "--all") == 0
    assert "against" not in capsys.readouterr().out
    assert run(recorder, taken_up, "0.41.0") == 0
    assert "vLLM 0.41.0 against 0.40.1" in capsys.readouterr().out
    written = json.loads((taken_up / "surfaces" / "0.41.0.json").read_text())
    assert written["vllm_version"] == "0.41.0"
    assert "vllm.engine:Loop.run_model" in written["missing"]


def test_a_release_is_compared_with_the_last_one_that_has_a_host(
    recorder: ModuleType, taken_up: Path, capsys: Any
) -> None:
    run(recorder, taken_up, "--all")
    run(recorder, taken_up, "0.41.0")
    (taken_up / "cuda-0.41.0").rename(taken_up / "cuda-0.42.0")
    capsys.readouterr()
    assert run(recorder, taken_up, "--drift", "0.42.0") == 1
    assert "vLLM 0.42.0 against 0.40.1" in capsys.readouterr().out


def test_a_wheel_is_read_like_a_folder(recorder: ModuleType, taken_up: Path, capsys: Any, monkeypatch: Any) -> None:
    run(recorder, taken_up, "--all")
    assert run(recorder, taken_up, "--drift", "0.41.0") == 1
    from_folder = capsys.readouterr().out
    wheel = taken_up / "vllm-0.41.0.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (taken_up / "cuda-0.41.0").rglob("*.py"):
            archive.write(file, file.relative_to(taken_up / "cuda-0.41.0"))
    out = ["--out", str(taken_up / "surfaces")]
    assert recorder.main(["--drift", "0.41.0", "--wheel", str(wheel), *out]) == 1
    assert from_folder.endswith(capsys.readouterr().out)
    monkeypatch.setattr(recorder, "download", lambda version, folder: wheel)
    assert recorder.main(["--drift", "0.41.0", *out]) == 1
    assert from_folder.endswith(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "required"),
        (["--drift", "0.41.0"], "no release before 0.41.0 that an adapter covers is recorded"),
        (["0.39.0"], "no folder of 0.39.0"),
        (["--all", "--source", "somewhere"], "not allowed with"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], problem: str, recorder: ModuleType, taken_up: Path, capsys: Any
) -> None:
    try:
        status: Any = run(recorder, taken_up, *arguments)
    except SystemExit as stopped:  # argparse
        status = stopped.code
    assert status == 2
    assert problem in capsys.readouterr().err
