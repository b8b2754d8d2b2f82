"""``vllm-eagle-mrv2 doctor``: tells whether ``eagle_mrv2`` will run on the installed vLLM and, if not, why.

It imports the vLLM modules that it checks but makes no engine, so it needs neither a GPU nor a model.

Exit codes: 0, eagle_mrv2 will run; 1, it will not; 2, there is nothing to check: no vLLM, or no such recording.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from typing import Annotated, Any

import typer
from packaging.version import Version
from rich.console import Console

from vllm_eagle_mrv2 import __version__, releases
from vllm_eagle_mrv2.cli.common.installed import is_registered, quiet, version_of, why_not_loaded
from vllm_eagle_mrv2.cli.doctor.preflight import Deployment, examine_deployment
from vllm_eagle_mrv2.cli.doctor.recorded import NoSurface, load_surface
from vllm_eagle_mrv2.cli.doctor.report import (
    AdapterReport,
    BehaviourReport,
    DeploymentReport,
    DoctorReport,
    PluginReport,
    SymbolReport,
    print_report,
)
from vllm_eagle_mrv2.config import kill_switch
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.config.families import FAMILIES, METHOD
from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.kernels.measured import about
from vllm_eagle_mrv2.patches import of_release
from vllm_eagle_mrv2.releases.spec import Release
from vllm_eagle_mrv2.releases.surface import check_installed, check_recorded
from vllm_eagle_mrv2.releases.v2_limits import limits_of

_PLAIN_WIDTH = 140
_NAMED = 3


def doctor(
    surface: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y.Z|FILE", help="Check the adapter of a recorded release against its recording instead."
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every stock symbol, the healthy ones too.")] = False,
    patches: Annotated[bool, typer.Option("--patches", help="List what of vLLM's is replaced, and why.")] = False,
    model: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Look at a deployment too: the target, a folder or hub name.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="HEAD", help="Its draft head; left out, the target has MTP layers.")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option("--num-speculative-tokens", "-k", metavar="K", min=1, help="Draft tokens a step.")
    ] = 3,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="As for the server; left out, vLLM's own number here.")
    ] = None,
    probabilistic: Annotated[
        bool, typer.Option("--probabilistic", help="Drafts are sampled, so that their logits are kept.")
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="As for the server.")] = False,
) -> None:
    """Check that eagle_mrv2 will run on the installed vLLM, and show what it brings there.

    With --model also whether it will draft for that deployment, from the configurations of target and head alone.

    Needs no GPU and no weights. Exit status 0: it will run; 1: it will not; 2: vLLM is not installed.
    """
    if model is None and (draft is not None or max_num_seqs is not None or probabilistic):
        raise typer.BadParameter("a deployment needs --model", param_hint="--model")
    if model is not None and surface is not None:
        raise typer.BadParameter("a recording serves no model", param_hint="--surface")
    deployment = None
    if model is not None:
        deployment = Deployment(model, draft, num_speculative_tokens, max_num_seqs, probabilistic, trust_remote_code)
    with quiet():
        report = examine(deployment) if surface is None else examine_recorded(surface)
    if json_output:
        typer.echo(report.model_dump_json(indent=2))
    else:
        console = Console()
        print_report(report, console if console.is_terminal else Console(width=_PLAIN_WIDTH), verbose, patches)
    raise typer.Exit(report.exit_code)


def examine(deployment: Deployment | None = None) -> DoctorReport:
    """Check the installed vLLM and, if one is given, a deployment on it."""
    report = DoctorReport(
        package_version=__version__,
        source="installed",
        python=platform.python_version(),
        torch=version_of("torch"),
        triton=version_of("triton", "pytorch-triton"),
        plugin=_plugin(),
    )
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # without an origin it is only a folder with this name
        report.problems.append("vLLM is not installed here: install a release that this package supports.")
        report.exit_code = 2
        return report
    _check_plugin(report)
    _check_kill_switch(report)
    try:
        report.vllm_version = str(importlib.import_module("vllm").__version__)
    except Exception as error:  # a broken installation may raise anything; the reason is reported
        report.problems.append(f"vLLM is installed but cannot be imported ({_reason(error)}); reinstall it.")
    else:
        report.platform = _platform(report)
        adapter = _adapter(report, report.vllm_version)
        if adapter is not None:
            _check_adapter(report, adapter, report.vllm_version)
    if deployment is not None:
        _check_deployment(report, deployment)
    report.exit_code = 1 if report.problems else 0
    return report


def examine_recorded(wanted: str) -> DoctorReport:
    """Check a recording; this environment does not matter.

    Args:
        wanted: a recorded release, or the path of a recording.
    """
    report = DoctorReport(package_version=__version__, source=wanted)
    try:
        surface = load_surface(wanted)
    except NoSurface as error:
        report.problems.append(str(error))
        report.exit_code = 2
        return report
    report.vllm_version = release = surface["vllm_version"]
    adapter = _adapter(report, release)
    if adapter is not None:
        needed = adapter.symbols_of(releases.stock_version(release))
        report.symbols = [SymbolReport.of(finding) for finding in check_recorded(needed, surface)]
        _blame_symbols(report, f"the recorded vLLM {release} is not what adapter {adapter.name} knows")
    report.exit_code = 1 if report.problems else 0
    return report


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# The plugin


def _plugin() -> PluginReport:
    return PluginReport(
        registered=is_registered(), vllm_plugins=os.environ.get("VLLM_PLUGINS"), loaded=why_not_loaded() is None
    )


def _check_plugin(report: DoctorReport) -> None:
    why = None if report.plugin is None else why_not_loaded()
    if why is not None:
        report.problems.append(why)


def _check_kill_switch(report: DoctorReport) -> None:
    try:
        if kill_switch.is_on():
            report.problems.append(f"{kill_switch.VARIABLE} switches {METHOD} off, and stock vLLM drafts; unset it.")
    except EagleMRV2Error as error:
        report.problems.append(str(error))


# The release


def _platform(report: DoctorReport) -> str | None:
    try:
        current = importlib.import_module("vllm.platforms").current_platform
        name = type(current).__name__
        kind = str(getattr(current, "device_type", "") or "")
    except Exception as error:  # as above
        report.notes.append(f"vLLM cannot tell its platform ({_reason(error)}).")
        return None
    if not kind:
        report.notes.append(
            "vLLM sees no device that it could run on here; the rest of this report holds all the same."
        )
    elif kind == "cuda":
        _check_device(report, current)
    return f"{name} ({kind})" if kind else name


def _check_device(report: DoctorReport, platform: Any) -> None:
    try:
        capability = platform.get_device_capability()
        left = about(platform.get_device_name(), (capability.major, capability.minor))
    except Exception as error:  # as above
        report.notes.append(f"vLLM cannot tell its device ({_reason(error)}).")
        return
    if left is not None:
        report.notes.append(left)


def _adapter(report: DoctorReport, release: str) -> Release | None:
    """Choose the release's adapter and describe it, or report why there is none."""
    version = releases.stock_version(release)
    try:
        newest = max(Version(series) for known in releases.all_releases() for series in known.series)
        adapter = releases.release_for(release)
    except EagleMRV2Error as error:
        report.problems.append(str(error))
        if version.release[:2] > newest.release[:2]:
            report.notes.append(
                f"vLLM {release} is newer than every adapter: in a checkout of this package, "
                f"python tools/record_surface.py --drift {version} prints what an adapter for it has to take up."
            )
        return None
    except Exception as error:  # an adapter of another package may raise anything when it loads
        report.problems.append(
            f"an adapter of the entry-point group {releases.ENTRY_POINTS} is broken ({_reason(error)})."
        )
        return None
    report.adapter = AdapterReport(name=adapter.name, series=list(adapter.series))
    report.behaviours = [
        BehaviourReport(name=str(one), supplier=adapter.supplier(one, version), summary=one.summary)
        for one in Behaviour
    ]
    report.patches = list(of_release(version))
    report.families = list(adapter.families)
    report.unsupported = _unsupported(adapter, version)
    return adapter


def _unsupported(adapter: Release, version: Version) -> list[str]:
    """What `Release.check_settings` and the patches refuse on a release, and what Model Runner V2 does not serve."""
    phrases = [f"{family} drafts: use method={family}" for family in FAMILIES if family not in adapter.families]
    if not adapter.logits_of_any_dtype:
        phrases.append("draft_logits_dtype other than float32: the rejection sampler reads logits after temperature")
    if "mtp" in adapter.families:
        phrases.append("MTP heads of Gemma 4 and of several modules: vLLM has speculators of their own for them")
    phrases.append("VLLM_USE_V2_MODEL_RUNNER=0 in the environment")
    return list(dict.fromkeys([*phrases, *(limit.what for limit in limits_of(version))]))


def _check_adapter(report: DoctorReport, adapter: Release, release: str) -> None:
    needed = adapter.symbols_of(releases.stock_version(release))
    report.symbols = [SymbolReport.of(finding) for finding in check_installed(needed)]
    _blame_symbols(report, f"vLLM {release} is not the stock release that adapter {adapter.name} knows")
    try:
        adapter.check_settings(Settings(adapter.families[0], Options()))
    except EagleMRV2Error as error:  # refused for every deployment in this environment
        report.problems.append(str(error))
    if all(symbol.status == "found" for symbol in report.symbols):
        _check_speculators(report, adapter)


def _check_deployment(report: DoctorReport, deployment: Deployment) -> None:
    if report.problems or report.vllm_version is None:
        report.deployment = DeploymentReport(
            target=deployment.target, draft=deployment.draft, num_speculative_tokens=deployment.num_speculative_tokens
        )
        return
    examine_deployment(report, deployment, releases.stock_version(report.vllm_version))


def _blame_symbols(report: DoctorReport, what: str) -> None:
    drift = [symbol for symbol in report.symbols if symbol.status != "found"]
    if drift:
        named = ", ".join(f"{symbol.module}:{symbol.name} ({symbol.status})" for symbol in drift[:_NAMED])
        more = f" and {len(drift) - _NAMED} more" if len(drift) > _NAMED else ""
        report.problems.append(f"{what}: {named}{more}.")


def _check_speculators(report: DoctorReport, adapter: Release) -> None:
    """Check that this package's speculator classes can be derived from the release's, which needs no device."""
    try:
        for family in adapter.families:
            adapter.speculator_class(family)
    except Exception as error:  # as above
        report.problems.append(f"the speculator of adapter {adapter.name} cannot be made ({_reason(error)}).")
