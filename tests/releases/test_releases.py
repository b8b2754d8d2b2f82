"""The adapters: which release each is for, and that every release has the symbols that its adapter needs."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2 import releases
from vllm_eagle_mrv2.cli.doctor.recorded import recorded
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.families import FAMILIES
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases import all_releases, all_required_symbols, release_for
from vllm_eagle_mrv2.releases.spec import Release, hookimpl
from vllm_eagle_mrv2.releases.surface import Symbol, check_installed, check_recorded

SURFACES = sorted(recorded().values(), key=lambda path: path.stem)
RELEASES = all_releases()
SERIES = sorted((series for adapter in RELEASES for series in adapter.series), key=Version)
NEXT = f"0.{Version(SERIES[-1]).minor + 1}.0"


def needed(release: str) -> tuple[Symbol, ...]:
    return release_for(release).symbols_of(Version(release))


def record(path: Path) -> dict[str, Any]:
    surface: dict[str, Any] = json.loads(path.read_text())
    return surface


# Which adapter


@pytest.mark.parametrize("patch", [".0", ".9"])
@pytest.mark.parametrize("series", SERIES)
def test_host_of_a_release(series: str, patch: str) -> None:
    """An adapter has the name of its first series, and the series from there to the next adapter's."""
    first = max(
        (adapter.series[0] for adapter in RELEASES if Version(adapter.series[0]) <= Version(series)), key=Version
    )
    assert release_for(series + patch).name == f"v{first.replace('.', '_')}"


@pytest.mark.parametrize("build", [".0.post1", ".0+cu129", ".0+cpu", ".1.dev3+gabc", ".0rc1"])
def test_host_of_a_build(build: str) -> None:
    assert release_for(SERIES[-1] + build).name == RELEASES[0].name


@pytest.mark.parametrize("release", ["0.19.1", "0.21.0", NEXT, "1.0", "dev", ""])
def test_releases_without_a_host(release: str) -> None:
    with pytest.raises(EagleMRV2Error) as refused:
        release_for(release)
    message = str(refused.value)
    assert f"does not support vLLM {release}:" in message
    assert "\n" not in message
    assert f"supported are {', '.join(f'{series}.x' for series in SERIES[:-1])} and {SERIES[-1]}.x;" in message


def test_supported_counts_the_hosts_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Release(
        name="fork",
        series=("0.999",),
        symbols=(),
        stock={},
        adapter="fork",
    )
    monkeypatch.setattr(releases, "all_releases", lambda: [theirs, *RELEASES])
    assert releases.supported().endswith(f", {SERIES[-1]}.x and 0.999.x")
    monkeypatch.setattr(releases, "all_releases", lambda: [theirs])
    assert releases.supported() == "0.999.x"


def test_adapters_have_names_of_their_own_and_no_release_twice() -> None:
    assert len({adapter.name for adapter in RELEASES}) == len(RELEASES)
    assert len(set(SERIES)) == len(SERIES)


def test_the_host_of_a_fork_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package offers its adapter through an entry point; here one registered the same way, after ours."""
    theirs = Release(
        name="fork",
        series=RELEASES[0].series,
        symbols=(),
        stock={},
        adapter="fork",
        families=("eagle",),
    )

    class Fork:
        @hookimpl
        def eagle_mrv2_release(self) -> Release:
            return theirs

    def load(manager: Any, group: str) -> int:
        assert group == "vllm_eagle_mrv2.releases"
        manager.register(Fork())
        return 1

    monkeypatch.setattr("pluggy.PluginManager.load_setuptools_entrypoints", load)
    assert [adapter.name for adapter in all_releases()] == ["fork", *(adapter.name for adapter in RELEASES)]


# What they refuse


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", RELEASES, ids=lambda adapter: adapter.name)
def test_every_family(adapter: Release, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    adapter.check_settings(Settings(family, Options()))


def test_a_family_that_a_host_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    adapter = Release(
        name="some",
        series=RELEASES[0].series,
        symbols=(),
        stock={},
        adapter="nowhere",
        families=("eagle",),
    )
    with pytest.raises(EagleMRV2Error, match=r"does not support the family mtp .* use method=mtp"):
        adapter.check_settings(Settings("mtp", Options()))


# The symbols they need


def test_every_supported_minor_is_recorded() -> None:
    minors = {path.stem.rpartition(".")[0] for path in SURFACES}
    assert minors == {series for adapter in RELEASES for series in adapter.series}
    assert all(record(path)["vllm_version"] == path.stem for path in SURFACES)


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_a_recorded_release_has_what_its_host_needs(path: Path) -> None:
    drift = [str(finding) for finding in check_recorded(needed(path.stem), record(path)) if not finding.ok]
    assert drift == []


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_records_know_every_symbol(path: Path) -> None:
    """A record made before an adapter asked for a symbol says nothing about it."""
    surface = record(path)
    known = {*surface["symbols"], *surface["missing"]}
    assert [symbol.key for symbol in all_required_symbols() if symbol.key not in known] == []


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_a_symbol_that_a_release_loses_is_found_out(path: Path) -> None:
    """The check itself: without any one of the needed symbols, that one and no other is reported."""
    symbols, surface = needed(path.stem), record(path)
    for key in dict.fromkeys(symbol.key for symbol in symbols):
        lacking = copy.deepcopy(surface)
        del lacking["symbols"][key]
        lacking["missing"].append(key)
        drift = {(finding.symbol.key, finding.status) for finding in check_recorded(symbols, lacking) if not finding.ok}
        assert drift == {(key, "missing")}


@pytest.mark.parametrize("path", SURFACES, ids=lambda path: path.stem)
def test_a_parameter_that_a_release_loses_is_found_out(path: Path) -> None:
    symbols, surface = needed(path.stem), record(path)
    with_parameters = [symbol for symbol in symbols if symbol.parameters]
    assert with_parameters
    for symbol in with_parameters:
        assert symbol.parameters is not None
        lacking = copy.deepcopy(surface)
        lacking["symbols"][symbol.key]["parameters"].remove(symbol.parameters[-1])
        (drift,) = (finding for finding in check_recorded([symbol], lacking) if not finding.ok)
        assert drift.status == "changed"
        assert symbol.parameters[-1] in drift.detail


def installed() -> Release:
    vllm = pytest.importorskip("vllm")
    return release_for(vllm.__version__)


def test_the_installed_release_has_what_its_host_needs() -> None:
    assert [
        str(finding) for finding in check_installed(needed(releases.installed_version().base_version)) if not finding.ok
    ] == []


def test_the_installed_release_is_told_from_one_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = installed()
    needy = Release(
        name="needy",
        series=adapter.series,
        symbols=(*adapter.symbols, Symbol("vllm.v1.worker.gpu.attn_utils", "no_such_thing")),
        stock=adapter.stock,
        adapter=adapter.adapter,
    )
    monkeypatch.setattr(releases, "all_releases", lambda: [needy])
    releases.installed_release.cache_clear()
    try:
        with pytest.raises(EagleMRV2Error, match="attn_utils:no_such_thing is missing"):
            releases.installed_release()
    finally:
        releases.installed_release.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_installed_release_has_a_speculator_for_every_family(family: Any) -> None:
    release = installed()
    adapter = importlib.import_module(release.adapter).Adapter
    assert adapter.release is release
    speculator = release.speculator_class(family)
    stock = speculator.__base__
    assert stock is adapter.stock_class(family)
    one_class = releases.installed_version() < Version("0.23")
    assert stock.__name__ == ("MTPSpeculator" if family == "mtp" and not one_class else "EagleSpeculator")
    # What drafts must not be the stock speculator's.
    for name in ("propose", "capture", "init_cudagraph_manager"):
        assert getattr(speculator, name).__module__.startswith("vllm_eagle_mrv2.")


# Who supplies a behaviour


@pytest.mark.parametrize(
    ("behaviour", "ours"),
    [
        (Behaviour.DRAFT_LOGITS_IN_REPLAY, "<0"),
        (Behaviour.DECODE_METADATA_REBUILD, "<0.22"),
        (Behaviour.FULL_DECODE_ONLY, "<0"),
        (Behaviour.TARGET_METADATA_REUSE, "<0.26"),
        (Behaviour.ACTUAL_MAX_SEQ_LEN, "<0.23"),
        (Behaviour.SHARED_GRAPH_POOL, "<0.23"),
        (Behaviour.PADDING_WITHOUT_LOGITS, "<0.25"),
        (Behaviour.SINGLE_TOKEN_CAPTURE_SIZES, "<0.25"),
        (Behaviour.LENGTHS_WITHOUT_SYNC, "<0.27"),
        (Behaviour.INDEPENDENT_DRAFT_NOISE, "<0.29"),
        (Behaviour.DYNAMIC_DRAFT_LENGTH, ">=0.25,<0.32"),
        (Behaviour.DRAFT_ENFORCE_EAGER, ""),
        (Behaviour.FUSED_DRAFT_DECODE, "<0.28"),
        (Behaviour.TWO_STAGE_ARGMAX, ""),
        (Behaviour.LOCAL_ARGMAX, ">=0.22"),
        (Behaviour.ONE_DRAFT_GRAPH, ""),
        (Behaviour.DRAFT_GRAPHS_BY_SUPPORT, ""),
        (Behaviour.DRAFT_TOP_K_TOP_P, ""),
    ],
)
def test_what_is_supplied_where(behaviour: Behaviour, ours: str) -> None:
    """What was read in the releases up to 0.33; of newer ones their adapter says it, and the next test looks at it."""
    known = [series for series in SERIES if Version(series) < Version("0.34")]
    supplied = [series for series in known if supplier(behaviour, series) == "eagle_mrv2"]
    assert supplied == [series for series in known if Version(series) in SpecifierSet(ours)]


@pytest.mark.parametrize("behaviour", Behaviour)
def test_what_stock_has_once_it_keeps(behaviour: Behaviour) -> None:
    """A setting is offered, then supplied by us, then by stock, in this order over the releases."""
    order = ["-", "eagle_mrv2", "stock"]
    ranks = [order.index(supplier(behaviour, series)) for series in SERIES]
    assert ranks == sorted(ranks)


def supplier(behaviour: Behaviour, series: str) -> str:
    return release_for(series).supplier(behaviour, Version(series))


def test_only_what_is_ours_can_be_disabled() -> None:
    old, new = release_for("0.20.2"), release_for("0.32.0")
    old.check_disabled([Behaviour.FUSED_DRAFT_DECODE, Behaviour.DRAFT_LOGITS_IN_REPLAY], Version("0.20.2"))
    with pytest.raises(EagleMRV2Error, match=r"cannot be disabled: it is vLLM's own on vLLM 0.32.0; take it out"):
        new.check_disabled([Behaviour.FUSED_DRAFT_DECODE], Version("0.32.0"))
