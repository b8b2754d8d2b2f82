"""The supported vLLM releases, and the one that is installed."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pluggy
from packaging.version import InvalidVersion, Version

from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.releases import v0_20, v0_22, v0_23, v0_26, v0_28, v0_29, v0_32
from vllm_eagle_mrv2.releases.spec import PROJECT, Release, ReleaseSpec
from vllm_eagle_mrv2.releases.surface import Symbol, check_installed

ENTRY_POINTS = "vllm_eagle_mrv2.releases"
SERIES = (v0_20, v0_22, v0_23, v0_26, v0_28, v0_29, v0_32)
"""The releases of this package, oldest first."""


def all_releases() -> list[Release]:
    """Every known release: those of other packages first, then this package's from newest to oldest."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ReleaseSpec)
    for module in SERIES:
        manager.register(module)
    manager.load_setuptools_entrypoints(ENTRY_POINTS)
    known: list[Release] = manager.hook.eagle_mrv2_release()
    return known


def all_required_symbols() -> Iterable[Symbol]:
    """Every vLLM symbol that some adapter relies on, each once."""
    return dict.fromkeys(symbol for release in all_releases() for symbol in release.symbols)


def supported() -> str:
    """The releases that this package supports, as text for messages."""
    *some, last = sorted((series for release in all_releases() for series in release.series), key=Version)
    return f"{', '.join(f'{series}.x' for series in some)} and {last}.x" if some else f"{last}.x"


def stock_version(version: str) -> Version:
    """The stock release of a build's version: 0.32.0+cpu and 0.32.0.post1 have the surface of 0.32.0.

    Text that is not a version becomes 0, which no release covers.
    """
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version("0")


def release_for(version: str) -> Release:
    """The `Release` that covers a vLLM version.

    Raises:
        EagleMRV2Error: no release covers the version.
    """
    stock = stock_version(version)
    for release in all_releases():
        if release.covers(stock):
            return release
    raise EagleMRV2Error(
        f"vllm-eagle-mrv2 does not support vLLM {version}: supported are {supported()}; "
        f"install one of these, or use the stock method instead of {METHOD}."
    )


def installed_version() -> Version:
    """The version of the installed vLLM, reduced by `stock_version`."""
    import vllm

    return stock_version(vllm.__version__)


@functools.cache
def installed_release() -> Release:
    """The `Release` of the installed vLLM, after a check of the symbols that it needs.

    Raises:
        EagleMRV2Error: no release covers the version, or a symbol that its adapter needs is missing or has changed.
    """
    import vllm

    release = release_for(vllm.__version__)
    needed = release.symbols_of(installed_version())
    drift = [finding for finding in check_installed(needed) if finding.status != "found"]
    if drift:
        first = drift[0]
        more = f" (and {len(drift) - 1} more)" if len(drift) > 1 else ""
        raise EagleMRV2Error(
            f"vLLM {vllm.__version__} is not the stock release that adapter {release.name} knows: "
            f"{first.symbol.module}:{first.symbol.name} is {first.status}, {first.detail}{more}; "
            f"reinstall the stock wheel, or use the stock method instead of {METHOD}."
        )
    return release


def installed() -> tuple[Release, Version]:
    """The `Release` of the installed vLLM and its version, as `installed_release` and `installed_version`."""
    return installed_release(), installed_version()
