"""Records the coupling surface of a vLLM release from its Python sources, without importing or running them.

    python ci/record_surface.py 0.26.0                    download the stock wheel, write ci/surfaces/0.26.0.json
    python ci/record_surface.py 0.26.0 --wheel FILE       read this wheel
    python ci/record_surface.py 0.26.0 --source DIR       read this folder, the one that holds vllm/
    python ci/record_surface.py --diff A.json B.json      print what differs, symbol by symbol (exit status 1 if any)

Which symbols: ``vllm_eagle_mrv2.hosts.all_required_symbols()``. Form of an entry: ``vllm_eagle_mrv2.surface``.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import griffe

from vllm_eagle_mrv2.surface import Symbol, assigned_on_self

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
        """The surface as the JSON object to write. What the release lacks is listed under ``missing``."""
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
        """Describe ``name`` of ``module``, or None where there is no such thing."""
        here: Found | None = self._module_found(module)
        *path, last = name.split(".")
        for part in path:
            here = self._step(here, part)
        found = self._step(here, last)
        if found is not None:
            return self._describe(found)
        if here is None or not isinstance(here.definition, griffe.Class):
            return None
        on_self = any(last in assigned_on_self(self._syntax(cls)) for cls in self._mro(here.definition))
        return {"kind": "attribute"} if on_self else None

    def _module_found(self, module: str) -> Found | None:
        loaded = self._module(module)
        return None if loaded is None else Found(loaded)

    def _module(self, name: str) -> griffe.Module | None:
        if name not in self._modules:
            self._modules[name] = self._load(name)
        return self._modules[name]

    def _load(self, name: str) -> griffe.Module | None:
        """Parse one file. Its packages are empty shells: relative imports resolve and nothing else is read."""
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
        """The thing at an absolute dotted path: the longest prefix that is a module, then its members."""
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


def _base_path(base: griffe.Expr | str) -> str:
    if isinstance(base, griffe.ExprSubscript):  # Generic[T] -> Generic
        return _base_path(base.left)
    return base if isinstance(base, str) else base.canonical_path


def _fields(body: ast.ClassDef) -> dict[str, Role]:
    """The annotated names of a class body and what each is to a generated constructor; class variables left out."""
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


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The drift from one recorded surface to another, a line for each change."""
    lines = []
    for key in sorted(old["symbols"].keys() | new["symbols"].keys()):
        before, after = old["symbols"].get(key), new["symbols"].get(key)
        if before is None or after is None:
            lacking, word = (old, "added") if before is None else (new, "missing")
            known = key in lacking.get("missing", ())
            lines.append(f"{key}: {word if known else 'only one of the two records knows it'}")
            continue
        if before["kind"] != after["kind"]:
            lines.append(f"{key}: was {before['kind']}, is {after['kind']}")
        for what in ("bases", "parameters", "fields"):
            if (
                what == "fields"
                and before.get("fields") == before.get("parameters")
                and after.get("fields") == after.get("parameters")
            ):
                continue  # a dataclass: said once, as its parameters
            lines += [f"{key}: {change}" for change in _list_drift(what, before, after)]
    return lines


def _list_drift(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get(what, []), after.get(what, [])
    one = "base" if what == "bases" else what[:-1]
    for name in old:
        if name not in new:
            yield f"removed {one} {name}"
    for name in new:
        if name not in old:
            forced = what == "parameters" and name not in after.get("defaults", []) and not name.startswith("*")
            yield f"added {one} {name}{' (no default)' if forced else ''}"
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield f"reordered {what}: ({', '.join(old)}) -> ({', '.join(new)})"


def download(version: str, folder: Path) -> Path:
    """Fetch the stock wheel of a release with this interpreter's pip, for Linux x86-64 whatever this machine is.

    Raises subprocess.CalledProcessError where pip fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12"]
    command += [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    return next(folder.glob("vllm-*.whl"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="the vLLM release to record")
    parser.add_argument("--wheel", type=Path, help="read this wheel instead of downloading one")
    parser.add_argument("--source", type=Path, help="read this folder instead; it holds vllm/")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "surfaces", help="folder of the records")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two records instead")
    options = parser.parse_args(arguments)
    if options.diff:
        drift = diff(*(json.loads(path.read_text()) for path in options.diff))
        print("\n".join(drift) or "no drift")
        return int(bool(drift))
    if options.version is None:
        parser.error("name a version, or two records with --diff")

    from vllm_eagle_mrv2.hosts import all_required_symbols

    with tempfile.TemporaryDirectory() as scratch:
        root: Tree = options.source or zipfile.Path(options.wheel or download(options.version, Path(scratch)))
        if not (root / "vllm").is_dir():
            parser.error(f"no vllm/ in {root}")
        surface = Recorder(root).record(options.version, all_required_symbols())
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{options.version}.json"
    target.write_text(json.dumps(surface, indent=1, sort_keys=True) + "\n")
    print(f"{target}: {len(surface['symbols'])} symbols, {len(surface['missing'])} missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
