"""The hosts, and which of them is for the installed vLLM.  Only rooms below this one import vLLM's private modules."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pluggy
from packaging.version import InvalidVersion, Version

from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.hosts import v0_20, v0_22, v0_23, v0_26, v0_28, v0_29, v0_32
from vllm_eagle_mrv2.hosts.spec import PROJECT, Host, HostSpec
from vllm_eagle_mrv2.method import METHOD
from vllm_eagle_mrv2.surface import Symbol, check_installed

ENTRY_POINTS = "vllm_eagle_mrv2.hosts"


def all_hosts() -> list[Host]:
    """Every known host: those of other packages first, then ours from the newest to the oldest."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HostSpec)
    for module in (v0_20, v0_22, v0_23, v0_26, v0_28, v0_29, v0_32):
        manager.register(module)
    manager.load_setuptools_entrypoints(ENTRY_POINTS)
    hosts: list[Host] = manager.hook.eagle_mrv2_host()
    return hosts


def all_required_symbols() -> Iterable[Symbol]:
    """Every symbol of vLLM's that some host relies on, each once."""
    return dict.fromkeys(symbol for host in all_hosts() for symbol in host.symbols)


def supported() -> str:
    """The releases that this package supports, for a person."""
    *some, last = sorted((series for host in all_hosts() for series in host.series), key=Version)
    return f"{', '.join(f'{series}.x' for series in some)} and {last}.x" if some else f"{last}.x"


def release_version(release: str) -> Version:
    """The release that a version is a build of: 0.32.0+cpu and 0.32.0.post1 have the surface of 0.32.0.

    What is no version becomes 0, which no host covers.
    """
    try:
        return Version(Version(release).base_version)
    except InvalidVersion:
        return Version("0")


def host_for(release: str) -> Host:
    """The host of a vLLM release.

    Raises:
        EagleMRV2Error: no host covers the release.
    """
    version = release_version(release)
    for host in all_hosts():
        if host.covers(version):
            return host
    raise EagleMRV2Error(
        f"vllm-eagle-mrv2 does not support vLLM {release}: supported are {supported()}; "
        f"install one of these, or use the stock method instead of {METHOD}."
    )


def installed_release() -> Version:
    """The installed vLLM, as `release_version` has it."""
    import vllm

    return release_version(vllm.__version__)


@functools.cache
def installed_host() -> Host:
    """The host of the installed vLLM, its needed symbols checked.

    Raises:
        EagleMRV2Error: no host covers the release, or a symbol that the host needs is missing or has changed.
    """
    import vllm

    host = host_for(vllm.__version__)
    needed = host.symbols_of(installed_release())
    drift = [finding for finding in check_installed(needed) if finding.status != "found"]
    if drift:
        first = drift[0]
        more = f" (and {len(drift) - 1} more)" if len(drift) > 1 else ""
        raise EagleMRV2Error(
            f"vLLM {vllm.__version__} is not the stock release that host {host.name} knows: "
            f"{first.symbol.module}:{first.symbol.name} is {first.status}, {first.detail}{more}; "
            f"reinstall the stock wheel, or use the stock method instead of {METHOD}."
        )
    return host
