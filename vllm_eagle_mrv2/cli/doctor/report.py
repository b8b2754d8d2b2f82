"""The findings of the doctor, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Literal

from pydantic import BaseModel, Field, computed_field
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_eagle_mrv2.config.families import METHOD
from vllm_eagle_mrv2.patches import Patch
from vllm_eagle_mrv2.releases.surface import Finding, Status

_CHECKED = {
    "nothing": "nothing that can be served",
    "models": "the configurations of target and draft, as vLLM makes none of the engine on this machine",
    "engine": "the configuration of the whole engine, made by vLLM",
}
_STYLES = {"found": "green", "missing": "bold red", "changed": "bold red"}


class AdapterReport(BaseModel):
    """The adapter that was chosen."""

    name: str
    series: list[str]

    def __str__(self) -> str:
        return f"{self.name}, for {', '.join(f'{one}.x' for one in self.series)}"


class SymbolReport(BaseModel):
    """One stock symbol that the adapter needs, and whether it is there."""

    module: str
    name: str
    status: Status
    detail: str
    why: str

    @classmethod
    def of(cls, finding: Finding) -> SymbolReport:
        symbol = finding.symbol
        return cls(module=symbol.module, name=symbol.name, status=finding.status, detail=finding.detail, why=symbol.why)

    def __str__(self) -> str:
        why = f" (needed: {self.why})" if self.why and self.status != "found" else ""
        return f"{self.module}:{self.name}{': ' if self.detail else ''}{self.detail}{why}"


class BehaviourReport(BaseModel):
    """One drafting behaviour and who supplies it on this release."""

    name: str
    supplier: str
    summary: str


class PluginReport(BaseModel):
    """Whether vLLM loads this package's plugin."""

    registered: bool
    vllm_plugins: str | None = Field(description="the environment variable VLLM_PLUGINS; null where it is not set")
    loaded: bool

    def __str__(self) -> str:
        state = "registered" if self.registered else "not registered"
        return f"{state}, VLLM_PLUGINS" + (" not set" if self.vllm_plugins is None else f"={self.vllm_plugins}")


class PathReport(BaseModel):
    """How a draft phase runs with these attention backends, on a GPU with graphs."""

    backends: str
    path: str


class DeploymentReport(BaseModel):
    """The findings on one deployment; unknown values are null or empty."""

    target: str
    draft: str | None = Field(description="null where the target has the head in it")
    num_speculative_tokens: int
    max_num_seqs: int | None = None
    checked: Literal["nothing", "models", "engine"] = Field(
        default="nothing",
        description="which configuration answers: the whole engine's, made by vLLM, or those of target and draft",
    )
    draft_logits_bytes: int | None = Field(default=None, description="of one rank; 0 where drafting is greedy")
    paths: list[PathReport] = []
    own_kernels: bool | None = Field(default=None, description="whether the draft's layers attend by kernels of ours")

    @property
    def name(self) -> str:
        """The target and the draft as text."""
        return f"{self.target} with {self.draft or 'the head in it'}, K={self.num_speculative_tokens}"

    @property
    def draft_logits(self) -> str:
        """The memory that the draft logits take, as text."""
        if self.draft_logits_bytes is None:
            return "unknown"
        if not self.draft_logits_bytes:
            return "none, greedy"
        return f"{self.draft_logits_bytes / 2**20:.1f} MiB a rank at max_num_seqs={self.max_num_seqs}"


class DoctorReport(BaseModel):
    """All findings of the doctor; values that do not apply are null or empty."""

    package_version: str
    source: str = Field(description="installed, or the recording that was read instead")
    vllm_version: str | None = None
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    platform: str | None = None
    adapter: AdapterReport | None = None
    plugin: PluginReport | None = None
    symbols: list[SymbolReport] = []
    behaviours: list[BehaviourReport] = []
    patches: list[Patch] = Field(default=[], description="what is replaced on this release")
    families: list[str] = []
    unsupported: list[str] = []
    family: str | None = Field(default=None, description="of the deployment's draft")
    deployment: DeploymentReport | None = None
    problems: list[str] = Field(default=[], description="why eagle_mrv2 will not run, a sentence each")
    notes: list[str] = []
    exit_code: Literal[0, 1, 2] = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def counts(self) -> dict[str, int]:
        """The numbers of found, missing and changed symbols."""
        counted = Counter(symbol.status for symbol in self.symbols)
        return {status: counted[status] for status in ("found", "missing", "changed")}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def accepted(self) -> bool | None:
        """Whether the deployment will draft with eagle_mrv2; null if no deployment was given."""
        return None if self.deployment is None else not self.problems

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> str | None:
        """Why the deployment is refused."""
        return None if self.deployment is None or not self.problems else self.problems[0]

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.deployment is not None:
            return f"FAILED: {METHOD} will not draft" if self.exit_code else f"OK: {METHOD} drafts as {self.family}"
        if self.source == "installed":
            return "FAILED: eagle_mrv2 will not run" if self.exit_code else "OK: eagle_mrv2 runs on this vLLM"
        if self.exit_code:
            return "FAILED: no adapter for it, or not what its adapter needs" if self.exit_code == 1 else "FAILED"
        return "OK: the recorded release has what its adapter needs"


def print_report(report: DoctorReport, console: Console, verbose: bool, patches: bool = False) -> None:
    """Print the report as text: healthy symbols only if ``verbose``, and the patches if asked for."""
    _print(console, f"vllm-eagle-mrv2 {report.package_version}", "bold")
    console.print(_facts(report))
    if report.adapter is not None:
        _print_symbols(report, console, verbose)
        console.print()
        console.print(_behaviours(report, console))
        _print(console, f"families: {', '.join(report.families)}")
        _print(console, "not supported there:")
        for phrase in report.unsupported:
            _print(console, f"  {phrase}")
    if patches:
        _print_patches(report, console)
    if report.deployment is not None:
        _print_deployment(report, report.deployment, console)
    for note in report.notes:
        _print(console, f"note: {note}", "yellow")
    for problem in report.problems:
        _print(console, f"problem: {problem}", "red")
    _print(console, report.verdict, "bold red" if report.exit_code else "bold green")


def _print_deployment(report: DoctorReport, deployment: DeploymentReport, console: Console) -> None:
    _print(console, f"deployment: {deployment.name}", "bold")
    _print(console, f"  family: {report.family or 'unknown'}")
    _print(console, f"  looked at: {_CHECKED[deployment.checked]}")
    _print(console, f"  draft logits: {deployment.draft_logits}")
    if not deployment.paths:
        _print(console, "  draft phase: not known without the configuration of the engine")
    for path in deployment.paths:
        _print(console, f"  draft phase with {path.backends}: {path.path}")
    if deployment.own_kernels is not None:
        _print(console, f"  layers that attend by our kernels: {'yes' if deployment.own_kernels else 'no'}")


def _print_patches(report: DoctorReport, console: Console) -> None:
    for scope, patches in groupby(report.patches, key=lambda patch: patch.scope.value):
        _print(console, f"replaced in {scope}:")
        for patch in patches:
            _print(console, f"  {patch.target}", "bold")
            _print(console, f"    {patch.what}: {patch.why} ({patch.by}; until: {patch.until})")


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style=style), soft_wrap=True)


def _facts(report: DoctorReport) -> Table:
    rows: list[tuple[str, object]] = [
        ("vLLM", report.vllm_version),
        ("read from", None if report.source == "installed" else report.source),
        ("adapter", report.adapter),
        ("torch", report.torch),
        ("triton", report.triton),
        ("platform", report.platform),
        ("Python", report.python),
        ("plugin", report.plugin),
    ]
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        if value is not None:
            table.add_row(name, Text(str(value)))
    return table


def _print_symbols(report: DoctorReport, console: Console, verbose: bool) -> None:
    counts = ", ".join(f"{number} {status}" for status, number in report.counts.items())
    hint = "" if verbose else " (--verbose lists all)"
    _print(console, f"stock symbols that it needs: {len(report.symbols)}: {counts}{hint}")
    for symbol in report.symbols:
        if verbose or symbol.status != "found":
            console.print(Text(f"  {symbol.status} ", _STYLES[symbol.status]) + Text(str(symbol)), soft_wrap=True)


def _behaviours(report: DoctorReport, console: Console) -> Table:
    table = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    table.add_column("behaviour", no_wrap=True)
    table.add_column("supplied by", no_wrap=True)
    table.add_column("what", overflow="fold")
    for behaviour in report.behaviours:
        style = "bold green" if behaviour.supplier == "eagle_mrv2" else ""
        table.add_row(behaviour.name, Text(behaviour.supplier, style), Text(behaviour.summary))
    return table
