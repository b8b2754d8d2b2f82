"""Records the coupling surface of a vLLM release from its Python sources, without importing or running them.

    python tools/record_surface.py 0.26.0            download the stock wheel, write its surface into the package
    python tools/record_surface.py --all             the same for every recorded release
    python tools/record_surface.py --drift 0.34.0    print the changes that an adapter for that release must handle
    python tools/record_surface.py --diff A B        print what differs between two records, symbol by symbol

Recording also prints what the release's adapter lacks, as ``doctor`` does, or the drift if no adapter covers the
release.  ``--drift`` and ``--diff`` exit with 1 if something changed.  Local sources replace the download:
``--wheel FILE``, ``--source DIR`` (the folder that contains vllm/), or ``--source-root DIR`` (with one such folder for
each release, whose name ends in the release).

`vllm_eagle_mrv2.releases.all_required_symbols` lists the symbols; `vllm_eagle_mrv2.releases.surface` documents the form
of an entry.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import griffe
from packaging.version import Version
from surface_drift import diff, drift, explain

from vllm_eagle_mrv2.cli.doctor.recorded import SURFACES, recorded
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases import all_required_symbols, release_for, stock_version
from vllm_eagle_mrv2.releases.spec import Release
from vllm_eagle_mrv2.releases.surface import Symbol, check_recorded

Tree = Path | zipfile.Path
Role = Literal["required", "optional", "internal"]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 28, 31, 34, 35)] + [
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
]


@dataclass(frozen=True)
class Found:
    """A definition and the class through which it was reached, if any."""

    definition: griffe.Module | griffe.Class | griffe.Function | griffe.Attribute
    owner: griffe.Class | None = None


class Recorder:
    """Looks symbols up in a source tree, following imports and base classes within it."""

    def __init__(self, root: Tree) -> None:
        self._root = root
        self._modules: dict[str, griffe.Module | None] = {}
        self._code: dict[str, str] = {}

    def record(self, version: str, symbols: Iterable[Symbol]) -> dict[str, Any]:
        """The surface as a JSON object; symbols that the release lacks are listed under ``missing``."""
        entries: dict[str, Any] = {}
        missing = set()
        for symbol in symbols:
            found = self.find(symbol.module, symbol.name)
            if found is None:
                missing.add(symbol.key)
            else:
                entries[symbol.key] = found
        return {"vllm_version": version, "symbols": entries, "missing": sorted(missing)}

    def find(self, module: str, name: str) -> dict[str, Any] | None:
        """Describe ``name`` in ``module``; None if it does not exist."""
        here: Found | None = self._module_found(module)
        *path, last = name.split(".")
        for part in path:
            here = self._step(here, part)
        found = self._step(here, last)
        if found is not None:
            return self._describe(found)
        if here is None or not isinstance(here.definition, griffe.Class):
            return None
        on_self = any(last in _assigned_on_self(self._syntax(cls)) for cls in self._mro(here.definition))
        return {"kind": "attribute"} if on_self else None

    @functools.cache  # noqa: B019 - one recorder lives as long as the script
    def modules(self) -> list[tuple[str, str]]:
        """(name, text) of every module under ``vllm``."""
        return [(".".join(path), file.read_text(encoding="utf-8")) for path, file in _python_files(self._root / "vllm")]

    def names_in(self, module: str, owner: str) -> list[str]:
        """The names that a module defines, or its class ``owner`` including bases."""
        here: Found | None = self._module_found(module)
        for part in owner.split(".") if owner else ():
            here = self._step(here, part)
        if here is None:
            return []
        if not isinstance(here.definition, griffe.Class):
            return [name for name, member in here.definition.members.items() if not isinstance(member, griffe.Alias)]
        names: dict[str, None] = {}
        for cls in self._mro(here.definition):
            names.update(dict.fromkeys([*cls.members, *sorted(_assigned_on_self(self._syntax(cls)))]))
        return list(names)

    def _module_found(self, module: str) -> Found | None:
        loaded = self._module(module)
        return None if loaded is None else Found(loaded)

    def _module(self, name: str) -> griffe.Module | None:
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> griffe.Module | None:
        """Parse one file.  Its packages are empty: relative imports resolve, and nothing else is read."""
        parent: griffe.Module | None = None
        *packages, last = name.split(".")
        for package in packages:
            parent = griffe.Module(package, filepath=Path(package, "__init__.py"), parent=parent)
        base = "/".join([*packages, last])
        for file in (f"{base}.py", f"{base}/__init__.py"):
            if (self._root / file).is_file():
                self._code[name] = (self._root / file).read_text(encoding="utf-8")
                return griffe.visit(last, filepath=Path(file), code=self._code[name], parent=parent)
        return None

    def _step(self, here: Found | None, name: str) -> Found | None:
        if here is None:
            return None
        if isinstance(here.definition, griffe.Class):
            return self._class_member(here.definition, name)
        if isinstance(here.definition, griffe.Module):
            return self._module_member(here.definition, name)
        return None

    def _class_member(self, cls: griffe.Class, name: str) -> Found | None:
        for base in self._mro(cls):
            if name in base.members:
                found = self._follow(base.members[name])
                return None if found is None else Found(found.definition, base)
        return None

    def _module_member(self, module: griffe.Module, name: str) -> Found | None:
        if name in module.members:
            return self._follow(module.members[name])
        return self._module_found(f"{module.path}.{name}")

    def _follow(self, member: Any) -> Found | None:
        if isinstance(member, griffe.Alias):
            return self._resolve(member.target_path)
        return Found(member)

    def _resolve(self, path: str) -> Found | None:
        """The definition at an absolute dotted path: the longest prefix that is a module, then its members."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            here = self._module_found(".".join(parts[:length]))
            if here is not None:
                for part in parts[length:]:
                    here = self._step(here, part)
                return here
        return None

    def _mro(self, cls: griffe.Class) -> Iterator[griffe.Class]:
        """The class and its bases inside the tree, depth first."""
        yield cls
        for base in cls.bases:
            found = self._resolve(_base_path(base))
            if found is not None and isinstance(found.definition, griffe.Class) and found.definition is not cls:
                yield from self._mro(found.definition)

    def _syntax(self, cls: griffe.Class) -> ast.ClassDef:
        lines = self._code[cls.module.path].splitlines()[(cls.lineno or 1) - 1 : cls.endlineno]
        (body,) = ast.parse(textwrap.dedent("\n".join(lines))).body
        assert isinstance(body, ast.ClassDef)
        return body

    def _describe(self, found: Found) -> dict[str, Any]:
        definition = found.definition
        if isinstance(definition, griffe.Class):
            return self._describe_class(definition)
        if isinstance(definition, griffe.Function):
            bound = found.owner is not None and "staticmethod" not in definition.labels
            return {"kind": "function", **_parameters(definition, skip=int(bound))}
        return {"kind": "property" if "property" in definition.labels else "attribute"}

    def _describe_class(self, cls: griffe.Class) -> dict[str, Any]:
        fields: dict[str, Role] = {}
        for base in reversed(list(self._mro(cls))):
            fields.update(_fields(self._syntax(base)))
        bases = [_base_path(base) for base in cls.bases]
        entry: dict[str, Any] = {"kind": "class", "bases": bases, "fields": list(fields)}
        init = self._class_member(cls, "__init__")
        if init is not None and isinstance(init.definition, griffe.Function):
            return {**entry, **_parameters(init.definition, skip=1)}
        return {
            **entry,
            "parameters": [name for name, role in fields.items() if role != "internal"],
            "defaults": [name for name, role in fields.items() if role == "optional"],
        }


def _python_files(folder: Tree, path: tuple[str, ...] = ("vllm",)) -> Iterator[tuple[tuple[str, ...], Tree]]:
    entries: list[Tree] = [*folder.iterdir()]
    for entry in sorted(entries, key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _python_files(entry, (*path, entry.name))
        elif entry.name.endswith(".py"):
            yield (path if entry.name == "__init__.py" else (*path, entry.name[: -len(".py")])), entry


def _assigned_on_self(tree: ast.AST) -> set[str]:
    """Names ``x`` of all assignments to ``self.x`` in the tree, in any method."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _base_path(base: griffe.Expr | str) -> str:
    if isinstance(base, griffe.ExprSubscript):  # Generic[T] -> Generic
        return _base_path(base.left)
    return base if isinstance(base, str) else base.canonical_path


def _fields(body: ast.ClassDef) -> dict[str, Role]:
    """The annotated names of a class body, without class variables, and the role of each in a generated constructor."""
    return {
        node.target.id: _role(node.value)
        for node in body.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }


def _role(value: ast.expr | None) -> Role:
    if value is None:
        return "required"
    if isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if ast.unparse(given.get("init", value)) == "False":
            return "internal"
        return "optional" if given.keys() & {"default", "default_factory"} else "required"
    return "optional"


def _parameters(function: griffe.Function, skip: int) -> dict[str, Any]:
    stars: dict[Any, str] = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    found = list(function.parameters)[skip:]
    return {
        "parameters": [stars.get(p.kind, "") + p.name for p in found],
        "defaults": [p.name for p in found if p.default is not None and p.kind not in stars],
    }


def download(version: str, folder: Path) -> Path:
    """Download the stock Linux x86-64 wheel of a release with this interpreter's pip, on any machine.

    Raises:
        FileNotFoundError: pip, which prints the reason, finds no wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12"]
    command += [f"--platform={name}" for name in PLATFORMS]
    if subprocess.run([*command, f"vllm=={version}"]).returncode:
        raise FileNotFoundError(f"pip got no wheel of vLLM {version}")
    return next(folder.glob("vllm-*.whl"))


@contextlib.contextmanager
def sources(version: str, options: argparse.Namespace) -> Iterator[Tree]:
    """The tree that contains vllm/ of a release: local sources, or else a downloaded wheel."""
    with tempfile.TemporaryDirectory() as scratch:
        if options.source_root is not None:
            root: Tree = _source_folder(options.source_root, version)
        else:
            root = options.source or zipfile.Path(options.wheel or download(version, Path(scratch)))
        if not (root / "vllm").is_dir():
            raise FileNotFoundError(f"no vllm/ in {root}")
        yield root


def _source_folder(root: Path, version: str) -> Path:
    for folder in sorted(root.iterdir()):
        if folder.name == version or folder.name.endswith(f"-{version}"):
            return folder
    raise FileNotFoundError(f"no folder of {version} in {root}")


def record(version: str, options: argparse.Namespace) -> None:
    """Write the record of one release; print what its adapter lacks or, if no adapter covers it, the drift."""
    with sources(version, options) as root:
        recorder = Recorder(root)
        surface = recorder.record(version, all_required_symbols())
        options.out.mkdir(parents=True, exist_ok=True)
        target = options.out / f"{version}.json"
        target.write_text(json.dumps(surface, indent=1, sort_keys=True) + "\n")
        adapter = _adapter(version)
        if adapter is None:
            print(f"{target}: {len(surface['symbols'])} symbols")
            print_drift(surface, recorder, options)
            return
        findings = check_recorded(adapter.symbols_of(stock_version(version)), surface)
        lacking = [finding for finding in findings if not finding.ok]
        needs = f"adapter {adapter.name} needs {len(findings)}, lacks {len(lacking)}"
        print(f"{target}: {len(surface['symbols'])} symbols; {needs}", *lacking, sep="\n  ")


def print_drift(surface: dict[str, Any], recorder: Recorder, options: argparse.Namespace) -> bool:
    """Compare a release with the newest recorded one before it; return whether something changed."""
    version = surface["vllm_version"]
    known = _last_known(version, options.out)
    if known is None:
        raise FileNotFoundError(f"no release before {version} that an adapter covers is recorded in {options.out}")
    own = _adapter(version)
    adapter = own or release_for(known.stem)
    needed = adapter.symbols_of(stock_version(version))
    old = json.loads(known.read_text(encoding="utf-8"))
    found = drift(old, surface, needed, recorder, covered=own is not None)
    heading = f"vLLM {version} against {known.stem}: the symbols that adapter {adapter.name} needs"
    print(explain(found, heading, len({symbol.key for symbol in needed})))
    return bool(found)


def _adapter(version: str) -> Release | None:
    with contextlib.suppress(EagleMRV2Error):
        return release_for(version)
    return None


def _last_known(version: str, folder: Path) -> Path | None:
    files = [file for file in folder.glob("*.json") if Version(file.stem) < Version(version) and _adapter(file.stem)]
    return max(files, key=lambda file: Version(file.stem), default=None)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", help="the vLLM release to record")
    what.add_argument("--all", action="store_true", help="record every recorded release again")
    what.add_argument("--drift", metavar="VERSION", help="compare a release with the last recorded one before it")
    what.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two records")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--wheel", type=Path, help="read this wheel instead of downloading one")
    place.add_argument("--source", type=Path, help="read this folder instead; it holds vllm/")
    place.add_argument("--source-root", type=Path, help="read the folder of the release in this one instead")
    parser.add_argument("--out", type=Path, default=SURFACES, help="folder of the records")
    options = parser.parse_args(arguments)
    if options.all and (options.wheel or options.source):
        parser.error("--all reads one folder a release: give --source-root")
    try:
        if options.diff:
            lines = diff(*(json.loads(path.read_text(encoding="utf-8")) for path in options.diff))
            print("\n".join(lines) or "no drift")
            return int(bool(lines))
        if options.drift:
            with sources(options.drift, options) as root:
                recorder = Recorder(root)
                return int(print_drift(recorder.record(options.drift, all_required_symbols()), recorder, options))
        for version in recorded() if options.all else (options.version,):
            record(version, options)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
