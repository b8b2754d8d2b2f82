"""``vllm-eagle-mrv2 doctor``: what it finds, and the exit status that says so."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version
from typer.testing import CliRunner

from vllm_eagle_mrv2 import __version__, releases
from vllm_eagle_mrv2.cli import app
from vllm_eagle_mrv2.cli.common.installed import PLUGIN_GROUP
from vllm_eagle_mrv2.cli.doctor.recorded import SURFACES, recorded
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases.spec import Release
from vllm_eagle_mrv2.releases.surface import Symbol

module = importlib.import_module("vllm_eagle_mrv2.cli.doctor.command")  # the package's attribute is the command
CHECKOUT = Path(__file__).parents[2]
KEYS = {
    "package_version",
    "source",
    "vllm_version",
    "python",
    "torch",
    "triton",
    "platform",
    "adapter",
    "plugin",
    "symbols",
    "behaviours",
    "patches",
    "families",
    "unsupported",
    "family",
    "accepted",
    "reason",
    "deployment",
    "problems",
    "notes",
    "exit_code",
    "counts",
}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def run_json(*arguments: str) -> dict[str, Any]:
    code, output = run("--json", *arguments)
    report: dict[str, Any] = json.loads(output)
    assert set(report) == KEYS
    assert report["exit_code"] == code
    assert (code == 0) == (report["problems"] == [])
    return report


# On a vLLM made up for the purpose

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a vLLM in place, healthy unless told otherwise, and the adapter for its minor."""

    def put(
        version: str = "0.40.0",
        lacking: str | None = None,
        stock_class: Any = lambda family: object,
        plugin: bool = True,
        **adapter: Any,
    ) -> None:
        def add(name: str, **content: Any) -> None:
            fake = ModuleType(name)
            fake.__spec__ = ModuleSpec(name, None, origin="made up")
            fake.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, fake)

        add("vllm", __version__=version)
        add("vllm.platforms", current_platform=SimpleNamespace(device_type="made-up"))
        add("made_up_surface", **{name: object for name in ("Kept", "Called") if name != lacking})
        add("made_up_adapter", Adapter=SimpleNamespace(stock_class=stock_class))
        theirs = Release(
            **{
                "name": "made_up",
                "series": ("0.40", "0.41"),
                "symbols": (
                    Symbol("made_up_surface", "Kept"),
                    Symbol("made_up_surface", "Called", why="the draft loop"),
                    Symbol("made_up_surface", "NeededLater", releases=">=0.41"),
                ),
                "stock": {Behaviour.DRAFT_LOGITS_IN_REPLAY: "", Behaviour.ACTUAL_MAX_SEQ_LEN: ">=0.41"},
                "not_offered": {Behaviour.DYNAMIC_DRAFT_LENGTH: ""},
                "adapter": "made_up_adapter",
                "logits_of_any_dtype": False,
                **adapter,
            }
        )
        monkeypatch.setattr(releases, "all_releases", lambda: [theirs])
        plugins = [SimpleNamespace(name="eagle_mrv2")] if plugin else []
        real = importlib.metadata.entry_points

        def entry_points(**of: str) -> Any:  # torch and triton ask for theirs when they are imported
            return plugins if of == {"group": PLUGIN_GROUP} else real(**of)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)

    return put


def test_a_healthy_vllm(install: Install) -> None:
    install()
    report = run_json()
    assert report["exit_code"] == 0
    assert report["package_version"] == __version__
    assert report["source"] == "installed"
    assert report["vllm_version"] == "0.40.0"
    assert report["platform"] == "SimpleNamespace (made-up)"
    assert report["adapter"] == {"name": "made_up", "series": ["0.40", "0.41"]}
    assert report["plugin"] == {"registered": True, "vllm_plugins": None, "loaded": True}
    assert report["counts"] == {"found": 2, "missing": 0, "changed": 0}
    assert {one["name"] for one in report["symbols"]} == {"Kept", "Called"}
    suppliers = {one["name"]: one["supplier"] for one in report["behaviours"]}
    assert set(suppliers) == {behaviour.value for behaviour in Behaviour}
    assert suppliers["draft_logits_in_replay"] == "stock"
    assert suppliers["actual_max_seq_len"] == "eagle_mrv2"
    assert suppliers["dynamic_draft_length"] == "-"
    assert report["families"] == ["eagle", "eagle3", "mtp"]


def test_what_is_replaced(install: Install) -> None:
    """What the release needs, and only where it is asked for in the report for a person."""
    install()
    targets = {one["target"] for one in run_json()["patches"]}
    assert "vllm.v1.worker.gpu.spec_decode:init_speculator" in targets
    assert not any("MambaHybridModelState" in target for target in targets), "of 0.22 alone"
    lines = [line.strip() for line in run("--patches")[1].splitlines()]
    assert "replaced in a worker that drafts with eagle_mrv2:" in lines
    assert targets <= set(lines)
    assert not targets & {line.strip() for line in run()[1].splitlines()}


def test_the_report_for_a_person(install: Install) -> None:
    install()
    code, output = run()
    assert code == 0
    assert "\x1b" not in output
    assert "stock symbols that it needs: 2: 2 found, 0 missing, 0 changed" in output
    assert "made_up_surface:Kept" not in output
    assert "OK: eagle_mrv2 runs on this vLLM" in output
    for behaviour in Behaviour:
        assert behaviour.value in output
        assert behaviour.summary in output
    assert "made_up_surface:Kept" in run("--verbose")[1]


def test_a_missing_symbol_is_named(install: Install) -> None:
    install(lacking="Called")
    report = run_json()
    assert report["exit_code"] == 1
    assert report["counts"] == {"found": 1, "missing": 1, "changed": 0}
    (lost,) = (one for one in report["symbols"] if one["status"] == "missing")
    assert (lost["module"], lost["name"], lost["why"]) == ("made_up_surface", "Called", "the draft loop")
    assert "made_up_surface:Called (missing)" in report["problems"][0]
    code, output = run()
    assert code == 1
    assert "missing made_up_surface:Called: made_up_surface has no attribute Called (needed: the draft loop)" in output
    assert "FAILED" in output


def test_many_missing_symbols_are_all_listed(install: Install) -> None:
    install(symbols=tuple(Symbol("made_up_surface", f"lost_{number}") for number in range(9)))
    code, output = run()
    assert code == 1
    assert "and 6 more." in output
    assert all(f"missing made_up_surface:lost_{number}" in output for number in range(9))


def test_a_module_of_vllm_that_cannot_be_imported(install: Install, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "made_up_broken.py").write_text("print('noise')\nraise OSError('libcuda.so.1: no such file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    install(symbols=(Symbol("made_up_broken", "anything"),))
    report = run_json()
    assert report["exit_code"] == 1
    assert "OSError: libcuda.so.1" in report["symbols"][0]["detail"]


def test_vllm_itself_cannot_be_imported(install: Install, tmp_path: Path, monkeypatch: Any) -> None:
    install()
    monkeypatch.delitem(sys.modules, "vllm")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('no torch to speak of')\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = run_json()
    assert report["exit_code"] == 1
    assert "cannot be imported (RuntimeError: no torch to speak of)" in report["problems"][0]


@pytest.mark.parametrize(
    ("capability", "left"), [((9, 0), None), ((8, 0), "leaves the draft's products to PyTorch on NVIDIA X, as")]
)
def test_a_gpu_that_nobody_measured_on_is_a_note(
    capability: tuple[int, int], left: str | None, install: Install, monkeypatch: Any
) -> None:
    install()
    gpu = SimpleNamespace(
        device_type="cuda",
        get_device_capability=lambda: SimpleNamespace(major=capability[0], minor=capability[1]),
        get_device_name=lambda: "NVIDIA X",
    )
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", gpu)
    report = run_json()
    assert report["exit_code"] == 0
    assert [left in note for note in report["notes"] if left] == [True] * bool(left)


def test_a_platform_that_cannot_be_told_is_a_note(install: Install, monkeypatch: Any) -> None:
    install()
    monkeypatch.setitem(sys.modules, "vllm.platforms", ModuleType("vllm.platforms"))
    report = run_json()
    assert report["exit_code"] == 0
    assert report["platform"] is None
    assert "cannot tell its platform" in report["notes"][0]


def test_no_device_is_a_note(install: Install, monkeypatch: Any) -> None:
    install()
    monkeypatch.setattr(sys.modules["vllm.platforms"], "current_platform", SimpleNamespace(device_type=""))
    report = run_json()
    assert report["exit_code"] == 0
    assert "sees no device" in report["notes"][0]


@pytest.mark.parametrize("case", ["absent", "a folder of that name"])
def test_vllm_is_not_installed(case: str, install: Install, monkeypatch: Any) -> None:
    install()
    found = None if case == "absent" else ModuleSpec("vllm", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    report = run_json()
    assert report["exit_code"] == 2
    assert report["vllm_version"] is None
    assert report["adapter"] is None
    (problem,) = report["problems"]
    assert problem.startswith("vLLM is not installed here")
    assert "FAILED" in run()[1]


@pytest.mark.parametrize(("release", "newer"), [("0.39.2", False), ("0.42.0", True), ("0.42.0.dev3+gabc", True)])
def test_a_release_without_a_host(release: str, newer: bool, install: Install) -> None:
    install(version=release)
    report = run_json()
    assert report["exit_code"] == 1
    with pytest.raises(EagleMRV2Error) as refused:
        releases.release_for(release)
    assert report["problems"] == [str(refused.value)]
    assert report["adapter"] is None
    assert report["symbols"] == []
    assert any("tools/record_surface.py --drift 0.42.0 prints" in note for note in report["notes"]) == newer


def test_a_broken_host_of_another_package(install: Install, monkeypatch: Any) -> None:
    install()

    def fail() -> list[Release]:
        raise ImportError("no module named fork")

    monkeypatch.setattr(releases, "all_releases", fail)
    report = run_json()
    assert report["exit_code"] == 1
    assert "vllm_eagle_mrv2.releases is broken (ImportError: no module named fork)" in report["problems"][0]


def test_a_speculator_that_cannot_be_made(install: Install) -> None:
    def fail(family: str) -> type:
        raise TypeError(f"no {family} today")

    install(stock_class=fail)
    report = run_json()
    assert report["exit_code"] == 1
    assert report["problems"] == ["the speculator of adapter made_up cannot be made (TypeError: no eagle today)."]


def test_what_the_host_refuses_is_listed(install: Install) -> None:
    install(families=("eagle", "eagle3"))
    listed = run_json()["unsupported"]
    assert any("draft_logits_dtype" in phrase for phrase in listed)
    assert "mtp drafts: use method=mtp" in listed
    assert not any("Gemma" in phrase for phrase in listed)
    install(logits_of_any_dtype=True)
    listed = run_json()["unsupported"]
    assert not any("draft_logits_dtype" in phrase for phrase in listed)
    assert any("Gemma 4" in phrase for phrase in listed)


# The environment


@pytest.mark.parametrize(
    ("value", "loaded"),
    [("eagle_mrv2", True), ("lora,eagle_mrv2", True), ("lora", False), ("", False), ("lora, eagle_mrv2", False)],
)
def test_vllm_plugins(value: str, loaded: bool, install: Install, monkeypatch: Any) -> None:
    """vLLM splits the list at commas and strips nothing."""
    install()
    monkeypatch.setenv("VLLM_PLUGINS", value)
    report = run_json()
    assert report["plugin"] == {"registered": True, "vllm_plugins": value, "loaded": loaded}
    assert report["exit_code"] == (0 if loaded else 1)
    if not loaded:
        assert f"VLLM_PLUGINS={value} keeps vLLM from loading this plugin" in report["problems"][0]
    if not loaded and value:
        assert "set VLLM_PLUGINS=lora,eagle_mrv2, or unset it" in report["problems"][0]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("1", "EAGLE_MRV2_DISABLE switches eagle_mrv2 off, and stock vLLM drafts; unset it."),
        ("maybe", "EAGLE_MRV2_DISABLE='maybe' is neither on nor off"),
    ],
)
def test_the_kill_switch(value: str, problem: str, install: Install, monkeypatch: Any) -> None:
    install()
    monkeypatch.setenv("EAGLE_MRV2_DISABLE", value)
    report = run_json()
    assert report["exit_code"] == 1
    assert report["problems"][0].startswith(problem)


def test_the_entry_point_is_not_registered(install: Install) -> None:
    install(plugin=False)
    report = run_json()
    assert report["exit_code"] == 1
    assert "vllm.general_plugins is not registered" in report["problems"][0]


def test_model_runner_v1_forced(install: Install, monkeypatch: Any) -> None:
    install()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    report = run_json()
    assert report["exit_code"] == 1
    assert "VLLM_USE_V2_MODEL_RUNNER=0 forbids" in report["problems"][0]


# Recorded releases


@pytest.mark.parametrize("release", list(recorded()))
def test_a_recorded_release(release: str, monkeypatch: Any) -> None:
    """Without vLLM, and whatever the environment says."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    report = run_json("--surface", release)
    assert report["problems"] == []
    assert report["vllm_version"] == release
    adapter = releases.release_for(release)
    assert report["adapter"] == {"name": adapter.name, "series": list(adapter.series)}
    assert report["counts"]["found"] == len(adapter.symbols_of(Version(release))) > 0
    assert report["plugin"] is None


def test_every_supported_minor_is_recorded() -> None:
    series = {minor for adapter in releases.all_releases() for minor in adapter.series}
    assert {".".join(release.split(".")[:2]) for release in recorded()} == series


def test_the_recordings_are_those_of_the_checkout() -> None:
    assert {file.parent for file in recorded().values()} == {SURFACES}


def test_a_recording_by_its_path(tmp_path: Path) -> None:
    release, file = next(reversed(recorded().items()))
    surface = json.loads(file.read_text())
    copy = tmp_path / "mine.json"
    copy.write_text(json.dumps(surface))
    assert run_json("--surface", str(copy))["vllm_version"] == release

    symbol = releases.release_for(release).symbols_of(Version(release))[0]
    del surface["symbols"][symbol.key]
    surface["missing"].append(symbol.key)
    copy.write_text(json.dumps(surface))
    report = run_json("--surface", str(copy))
    assert report["exit_code"] == 1
    assert f"{symbol.key} (missing)" in report["problems"][0]
    assert "FAILED" in run("--surface", str(copy))[1]


def test_a_recording_of_an_unsupported_release(tmp_path: Path) -> None:
    copy = tmp_path / "next.json"
    copy.write_text(json.dumps({"vllm_version": "0.99.0", "symbols": {}, "missing": []}))
    report = run_json("--surface", str(copy))
    assert report["exit_code"] == 1
    assert "does not support vLLM 0.99.0" in report["problems"][0]
    assert "--drift 0.99.0" in report["notes"][0]


def test_no_such_recording(tmp_path: Path) -> None:
    report = run_json("--surface", "0.1.2")
    assert report["exit_code"] == 2
    assert "0.1.2 is no file and no recorded release" in report["problems"][0]
    for text in ("not JSON", "[]", "{}", '{"vllm_version": 3, "symbols": {}}'):
        (tmp_path / "bad.json").write_text(text)
        report = run_json("--surface", str(tmp_path / "bad.json"))
        assert report["exit_code"] == 2
        assert "is not a surface" in report["problems"][0]


# The real thing


@pytest.mark.slow
def test_the_installed_vllm() -> None:
    """In a process of its own: the first import of vLLM, with nothing but the report on standard output."""
    pytest.importorskip("vllm")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    command = [sys.executable, "-c", "from vllm_eagle_mrv2.cli import app; app()", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert done.returncode == 0
    assert report["counts"]["missing"] == report["counts"]["changed"] == 0


def test_help_does_not_import_vllm() -> None:
    code = "import sys; from vllm_eagle_mrv2.cli import app; print({'vllm', 'torch', 'triton'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()"
