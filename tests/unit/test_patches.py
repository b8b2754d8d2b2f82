"""The inventory of what is replaced: complete, true of the installed vLLM, and each thing replaced once."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from vllm_eagle_mrv2 import patches
from vllm_eagle_mrv2.patches import PATCHES, Patch, Scope
from vllm_eagle_mrv2.patches.wrap import Function, wrap

PACKAGE = Path(patches.__file__).parents[1]


def counted(original: Function) -> Function:
    return lambda *args: original(*args) + 1


class Owner:
    def method(self) -> int:
        return 1

    @staticmethod
    def static() -> int:
        return 1

    @property
    def attribute(self) -> int:
        """Its docstring."""
        return 1


def test_whatever_is_wrapped_is_wrapped_once() -> None:
    for _ in range(2):
        for name in ("method", "static", "attribute", "missing"):
            wrap(Owner, name, counted)
    assert (Owner().method(), Owner.static(), Owner().static(), Owner().attribute) == (2, 2, 2, 2)
    assert Owner.attribute.__doc__ == "Its docstring."
    assert not hasattr(Owner, "missing")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_each_names_what_makes_it(patch: Patch) -> None:
    module, _, name = patch.by.partition(":")
    if patch.wraps or module.startswith("vllm_eagle_mrv2.patches"):  # others import the release's private modules
        assert callable(getattr(importlib.import_module(module), name))
    assert all((patch.what, patch.why, patch.until))


def test_targets_are_there_on_the_releases_that_need_them() -> None:
    pytest.importorskip("vllm")
    from vllm_eagle_mrv2.releases import installed_version

    missing = [patch.target for patch in patches.of_release(installed_version()) if patch.wraps and not patch.found()]
    assert not missing


@pytest.mark.slow
def test_nothing_of_a_worker_is_replaced_before_one_drafts() -> None:
    """Whatever imports the adapters replaces nothing: `doctor`, say."""
    pytest.importorskip("vllm")
    script = """
import importlib
from vllm_eagle_mrv2 import patches, plugin, releases

def found(scope, replaced):
    each = [patch for patch in patches.of_release(releases.installed_version()) if patch.wraps and patch.scope is scope]
    return [patch.target for patch in each if hasattr(patch.found(), "_eagle_mrv2_original") == replaced]

plugin.register()
importlib.import_module(releases.installed_release().adapter)
print(found(patches.Scope.WORKER, replaced=True), found(patches.Scope.PLUGIN, replaced=False))
patches.apply(patches.Scope.WORKER, releases.installed_version())
print(found(patches.Scope.WORKER, replaced=False))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert run.stdout.splitlines()[-2:] == ["[] []", "[]"]


def test_only_the_inventory_wraps() -> None:
    """A wrapper that is put in place elsewhere would be in no list."""
    callers = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if re.search(r"(?<!def )\bwrap\(|wrapt\.|excepthook =", file.read_text(encoding="utf-8"))
    }
    assert callers == {"patches/__init__.py", "patches/last_line.py"}


def test_what_another_vllm_lacks_or_has_otherwise_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock engine may run on a release that this package does not know."""
    theirs: Any = ModuleType("vllm.engine.core_of_tomorrow")
    theirs.VllmConfig = type("VllmConfig", (), {"use_v2_model_runner": functools.cached_property(lambda self: False)})
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    for path in ("EngineCore._initialize_kv_caches", "VllmConfig.use_v2_model_runner"):
        patch = dataclasses.replace(patches.PATCHES[0], target=f"{theirs.__name__}:{path}")
        patch.put_in_place()
    assert theirs.VllmConfig().use_v2_model_runner is False


def test_an_unknown_target_is_no_patch() -> None:
    with pytest.raises(StopIteration):
        patches.patch_of("vllm:nothing")


def test_scopes_are_put_in_place_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the releases that need them."""
    owner: Any = SimpleNamespace(old=lambda: 1, new=lambda: 1, engine=lambda: 1)
    monkeypatch.setitem(sys.modules, "made_up", owner)
    wrapper = f"{__name__}:counted"
    made_up = [
        Patch("made_up:old", wrapper, Scope.WORKER, "what", "why", "until", releases="<0.26"),
        Patch("made_up:new", wrapper, Scope.WORKER, "what", "why", "until", releases=">=0.26"),
        Patch("made_up:engine", wrapper, Scope.ENGINE, "what", "why", "until"),
    ]
    monkeypatch.setattr(patches, "PATCHES", made_up)
    patches.apply(Scope.WORKER, Version("0.26.0"))
    assert (owner.old(), owner.new(), owner.engine()) == (1, 2, 1)
