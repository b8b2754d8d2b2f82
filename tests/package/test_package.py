"""What is built, and that it runs on the lowest versions that it asks for, on each Python that is here."""

from __future__ import annotations

import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_eagle_mrv2.cli.doctor.recorded import recorded

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
pytestmark = [pytest.mark.package, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MINORS = [minor for minor in range(40) if f"3.{minor}" in SpecifierSet(PROJECT["project"]["requires-python"])]
NOT_SHIPPED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def run(*command: object, status: int = 0, variables: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """What a command prints; its environment is this one, but for what points to other packages."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=cwd, env=inherited | dict(variables or {})
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def lowest(requirements: list[str]) -> list[str]:
    """The lower bounds as pins."""
    found = [Requirement(text) for text in requirements]
    return [f"{one.name}=={part.version}" for one in found for part in one.specifier if part.operator == ">="]


def environment(folder: Path, python: str, *packages: object) -> Path:
    """A new environment with packages, wheels all of them; returns its Python."""
    run(python, "-m", "venv", "--without-pip", folder)
    new = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", new, "install", "-qq", "--only-binary=:all:", *packages)
    return new


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without what is made in it."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "checkout", ignore=NOT_SHIPPED))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, built with the lowest build requirements."""
    folder = tmp_path_factory.mktemp("sdist")
    builder = environment(folder / "env", sys.executable, *lowest(PROJECT["build-system"]["requires"]))
    run(builder, "-c", f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})", cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """The wheel, built from the source distribution."""
    folder = sdist.parent
    builder = folder / "env" / "bin" / "python"
    run(builder, "-c", f"import setuptools.build_meta as b; b.build_wheel({str(folder)!r})", cwd=sdist)
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_source_distribution_has_every_file(tree: Path, sdist: Path) -> None:
    """Tests, results, surfaces and changelog among them."""
    files = {str(file.relative_to(tree)) for file in tree.rglob("*") if file.is_file() and "egg-info" not in str(file)}
    assert {"CHANGELOG.md", "benchmarks/results/README.md", "tests/package/test_package.py"} <= files
    assert [file for file in sorted(files) if not (sdist / file).is_file()] == []


def test_the_wheel_has_the_surfaces_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"vllm_eagle_mrv2/surfaces/{release}.json" for release in recorded()} <= names
    assert {"vllm_eagle_mrv2/py.typed", "vllm_eagle_mrv2/demo_pair/prompts.json"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"vllm_eagle_mrv2"}


def test_the_metadata_name_each_python(wheel: Path) -> None:
    found = metadata(wheel)
    classifiers = set(found.get_all("Classifier", []))
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in MINORS} <= classifiers
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"


def test_the_readme_of_an_index_page_links_to_no_file(wheel: Path) -> None:
    """There is none beside it; the file is named instead."""
    page = str(metadata(wheel).get_payload())
    assert "# vllm-eagle-mrv2" in page
    assert "(`benchmarks/results/README.md` in the source distribution)" in page
    assert re.findall(r"\]\((?!#|https:)[^)]*\)", page) == []


def python(minor: int) -> str:
    """A Python that really runs: a version manager's shim may not."""
    if minor == sys.version_info.minor:
        return sys.executable
    name = f"python3.{minor}"
    found: list[str | Path | None] = [shutil.which(name), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}")]
    for candidate in found:
        if candidate and subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return str(candidate)
    pytest.skip(f"no {name} here")


@pytest.mark.parametrize("minor", MINORS)
def test_the_lowest_versions_run(minor: int, wheel: Path, tmp_path: Path) -> None:
    """The commands, and the tests that need neither vLLM nor torch; there is no vLLM, which doctor says."""
    extras = PROJECT["project"]["optional-dependencies"]
    tools = [pin for pin in lowest(extras["test"]) if pin.startswith(("pytest==", "pytest-timeout==", "griffe=="))]
    pins = [*lowest(PROJECT["project"]["dependencies"]), *tools]
    new = environment(tmp_path / "env", python(minor), wheel, *pins)
    command = new.with_name("vllm-eagle-mrv2")
    for words in ("--version", "--help", "demo --help", "bench --help", "rank-vocab --help"):
        assert run(command, *words.split(), cwd=tmp_path)
    newest = list(recorded())[-1]
    assert "OK: the recorded release" in run(command, "doctor", "--surface", newest, cwd=tmp_path)
    report = json.loads(run(command, "doctor", "--json", status=2, cwd=tmp_path))
    assert "vLLM is not installed here" in report["problems"][0]
    quiet = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'tests'}")
    variables = {"PYTHONDONTWRITEBYTECODE": "1"}
    run(new, "-m", "pytest", *quiet, "tests/unit/test_surface.py", "tests/unit/test_options.py", variables=variables)
