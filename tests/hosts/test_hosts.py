"""The hosts: which release each is for, and that every release has the symbols that its host needs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_eagle_mrv2 import hosts
from vllm_eagle_mrv2.behaviours import Behaviour
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.hosts import all_hosts, all_required_symbols, host_for
from vllm_eagle_mrv2.hosts.spec import Host, hookimpl
from vllm_eagle_mrv2.method import FAMILIES, Request
from vllm_eagle_mrv2.options import Options
from vllm_eagle_mrv2.surface import Symbol, check_installed, check_recorded

SURFACES = sorted((Path(__file__).parents[2] / "ci" / "surfaces").glob("*.json"), key=lambda path: path.stem)
HOSTS = all_hosts()


def record(path: Path) -> dict[str, Any]:
    surface: dict[str, Any] = json.loads(path.read_text())
    return surface


# Which host


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ("0.26.0", "v0_26"),
        ("0.26.1", "v0_26"),
        ("0.26.0.post1", "v0_26"),
        ("0.26.0+cu129", "v0_26"),
        ("0.32.0", "v0_32"),
        ("0.32.0+cpu", "v0_32"),
        ("0.32.1.dev3+gabc", "v0_32"),
        ("0.32.0rc1", "v0_32"),
    ],
)
def test_host_of_a_release(release: str, name: str) -> None:
    assert host_for(release).name == name


@pytest.mark.parametrize("release", ["0.19.1", "0.25.9", "0.27.0", "0.31.0", "0.33.0", "0.34.0", "1.0", "dev", ""])
def test_releases_without_a_host(release: str) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        host_for(release)
    message = str(refused.value)
    assert f"does not support vLLM {release}:" in message
    assert "\n" not in message
    assert "supported are 0.26.x and 0.32.x;" in message
    for host in HOSTS:
        assert host.series in message
        assert str(host.releases) not in message


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_the_series_names_the_releases(host: Host) -> None:
    """What a person reads (``0.26.x``) and what is compared are two fields; they say the same."""
    major, minor, rest = host.series.split(".")
    assert rest == "x"
    for patch in range(10):
        assert host.releases.contains(f"{major}.{minor}.{patch}")
    for neighbour in (int(minor) - 1, int(minor) + 1):
        assert not host.releases.contains(f"{major}.{neighbour}.0")


def test_supported_counts_the_hosts_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Host(
        name="fork",
        series="0.40.x",
        releases=HOSTS[0].releases,
        symbols=(),
        stock=frozenset(),
        speculators="fork",
    )
    monkeypatch.setattr(hosts, "all_hosts", lambda: [theirs, *HOSTS])
    assert hosts.supported() == "0.26.x and 0.32.x and 0.40.x"


def test_hosts_have_names_of_their_own_and_no_release_twice() -> None:
    assert len({host.name for host in HOSTS}) == len(HOSTS)
    for minor in range(20, 40):
        assert sum(host.releases.contains(f"0.{minor}.0") for host in HOSTS) <= 1


def test_the_host_of_a_fork_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package offers its host through an entry point; here one registered the same way, after ours."""
    theirs = Host(
        name="fork",
        series=HOSTS[0].series,
        releases=HOSTS[0].releases,
        symbols=(),
        stock=frozenset(),
        speculators="fork",
        families=("eagle",),
    )

    class Fork:
        @hookimpl
        def eagle_mrv2_host(self) -> Host:
            return theirs

    def load(manager: Any, group: str) -> int:
        assert group == "vllm_eagle_mrv2.hosts"
        manager.register(Fork())
        return 1

    monkeypatch.setattr("pluggy.PluginManager.load_setuptools_entrypoints", load)
    assert [host.name for host in all_hosts()] == ["fork", *(host.name for host in HOSTS)]


# What they refuse


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_every_family_on_one_stage(host: Host, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    host.check_request(Request(family, Options()), SimpleNamespace(pipeline_parallel_size=1))


@pytest.mark.parametrize(("release", "runs"), [("0.26.0", False), ("0.32.0", True)])
def test_eagle3_over_pipeline_stages(release: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    host, two_stages = host_for(release), SimpleNamespace(pipeline_parallel_size=2)
    host.check_request(Request("eagle", Options()), two_stages)
    if runs:
        host.check_request(Request("eagle3", Options()), two_stages)
    else:
        with pytest.raises(EagleMRV2Error, match="EAGLE-3 does not run with pipeline_parallel_size=2"):
            host.check_request(Request("eagle3", Options()), two_stages)


def test_a_family_that_a_host_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    host = Host(
        name="some",
        series=HOSTS[0].series,
        releases=HOSTS[0].releases,
        symbols=(),
        stock=frozenset(Behaviour),
        speculators="nowhere",
        families=("eagle",),
    )
    with pytest.raises(EagleMRV2Error, match=r"does not support the family mtp .* use method=mtp"):
        host.check_request(Request("mtp", Options()), SimpleNamespace())


# The symbols they need


def test_both_ends_of_the_supported_releases_are_recorded() -> None:
    assert {host_for(path.stem).name for path in SURFACES} == {host.name for host in HOSTS}
    assert all(record(path)["vllm_version"] == path.stem for path in SURFACES)


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_a_recorded_release_has_what_its_host_needs(path: Path) -> None:
    drift = [str(finding) for finding in check_recorded(host_for(path.stem).symbols, record(path)) if not finding.ok]
    assert drift == []


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_records_know_every_symbol(path: Path) -> None:
    """A record made before a host asked for a symbol says nothing about it."""
    surface = record(path)
    known = {*surface["symbols"], *surface["missing"]}
    assert [symbol.key for symbol in all_required_symbols() if symbol.key not in known] == []


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_a_symbol_that_a_release_loses_is_found_out(path: Path) -> None:
    """The check itself: without any one of the needed symbols, that one and no other is reported."""
    symbols, surface = host_for(path.stem).symbols, record(path)
    for key in dict.fromkeys(symbol.key for symbol in symbols):
        lacking = copy.deepcopy(surface)
        del lacking["symbols"][key]
        lacking["missing"].append(key)
        drift = {(finding.symbol.key, finding.status) for finding in check_recorded(symbols, lacking) if not finding.ok}
        assert drift == {(key, "missing")}


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_a_parameter_that_a_release_loses_is_found_out(path: Path) -> None:
    symbols, surface = host_for(path.stem).symbols, record(path)
    with_parameters = [symbol for symbol in symbols if symbol.parameters]
    assert with_parameters
    for symbol in with_parameters:
        assert symbol.parameters is not None
        lacking = copy.deepcopy(surface)
        lacking["symbols"][symbol.key]["parameters"].remove(symbol.parameters[-1])
        (drift,) = (finding for finding in check_recorded([symbol], lacking) if not finding.ok)
        assert drift.status == "changed"
        assert symbol.parameters[-1] in drift.detail


def installed() -> Host:
    vllm = pytest.importorskip("vllm")
    return host_for(vllm.__version__)


def test_the_installed_release_has_what_its_host_needs() -> None:
    assert [str(finding) for finding in check_installed(installed().symbols) if not finding.ok] == []


def test_the_installed_release_is_told_from_one_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    host = installed()
    needy = Host(
        name="needy",
        series=host.series,
        releases=host.releases,
        symbols=(*host.symbols, Symbol("vllm.v1.worker.gpu.attn_utils", "no_such_thing")),
        stock=host.stock,
        speculators=host.speculators,
    )
    monkeypatch.setattr(hosts, "all_hosts", lambda: [needy])
    hosts.installed_host.cache_clear()
    try:
        with pytest.raises(EagleMRV2Error, match="attn_utils:no_such_thing is missing"):
            hosts.installed_host()
    finally:
        hosts.installed_host.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_release_has_a_speculator_for_every_family(family: Any) -> None:
    import importlib

    host = installed()
    speculator = importlib.import_module(host.speculators).speculator_class(family)
    stock = next(base for base in speculator.__mro__ if base.__module__.startswith("vllm."))
    assert stock.__name__ == ("MTPSpeculator" if family == "mtp" else "EagleSpeculator")
    assert speculator.host is host
    # Ours come first: what the draft loop replaces must not be the stock speculator's.
    for name in ("propose", "capture", "init_cudagraph_manager"):
        assert getattr(speculator, name).__module__.startswith("vllm_eagle_mrv2.")
