"""The results of the demo, as text and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vllm_eagle_mrv2.cli.common.report import TIMES_MEAN_NOTHING, first_difference
from vllm_eagle_mrv2.cli.demo.types import Measurement


@dataclass(frozen=True)
class FamilyReport:
    """The three runs of one family of heads."""

    family: str
    dtype: str
    num_speculative_tokens: int
    max_tokens: int
    prompts: list[str]
    baseline: Measurement
    stock: Measurement
    eagle_mrv2: Measurement

    @property
    def outputs_match_baseline(self) -> bool:
        """Whether ``eagle_mrv2`` gave the same tokens as the run without speculation."""
        return self.eagle_mrv2.token_ids == self.baseline.token_ids

    @property
    def stock_outputs_match_baseline(self) -> bool:
        """Whether stock speculation gave the same tokens as the run without speculation."""
        return self.stock.token_ids == self.baseline.token_ids

    @property
    def outputs_match_stock(self) -> bool:
        """Whether ``eagle_mrv2`` gave the same tokens as stock speculation."""
        return self.eagle_mrv2.token_ids == self.stock.token_ids

    @property
    def drafted(self) -> bool:
        """Whether this package's speculator was made and drafted."""
        return self.eagle_mrv2.is_eagle_mrv2 and self.eagle_mrv2.num_drafts > 0

    @property
    def passed(self) -> bool:
        """Whether ``eagle_mrv2`` drafted and its tokens are right, as far as the precision can tell."""
        right = self.outputs_match_baseline or (self.dtype != "float32" and self.outputs_match_stock)
        return self.drafted and right


def to_json(reports: list[FamilyReport]) -> dict[str, Any]:
    """The report of a single family; for several, an object with the report of each under ``families``."""
    if len(reports) == 1:
        return _report_to_json(reports[0])
    return {
        **_machine(reports[0]),
        "passed": all(report.passed for report in reports),
        "families": {report.family: _report_to_json(report) for report in reports},
    }


def _machine(report: FamilyReport) -> dict[str, Any]:
    ours = report.eagle_mrv2
    return {
        "vllm_version": ours.vllm_version,
        "device": ours.device,
        "device_name": ours.device_name,
        "dtype": report.dtype,
    }


def _report_to_json(report: FamilyReport) -> dict[str, Any]:
    ours, baseline = report.eagle_mrv2, report.baseline
    return {
        **_machine(report),
        "family": report.family,
        "num_speculative_tokens": report.num_speculative_tokens,
        "max_tokens": report.max_tokens,
        "num_prompts": len(report.prompts),
        "speculator_class": ours.speculator_class,
        "graph_manager_classes": ours.graph_manager_classes,
        "outputs_match_baseline": report.outputs_match_baseline,
        "stock_outputs_match_baseline": report.stock_outputs_match_baseline,
        "outputs_match_stock": report.outputs_match_stock,
        "passed": report.passed,
        "baseline": {"tokens_per_second": baseline.tokens_per_second, "num_iterations": baseline.iterations},
        "stock": _run_to_json(report.stock),
        "eagle_mrv2": _run_to_json(ours),
        "outputs": [{"prompt": prompt, "text": text} for prompt, text in zip(report.prompts, ours.texts, strict=True)],
    }


def _run_to_json(run: Measurement) -> dict[str, Any]:
    return {
        "speculator_class": run.speculator_class,
        "graph_manager_classes": run.graph_manager_classes,
        "num_drafts": run.num_drafts,
        "num_draft_tokens": run.num_draft_tokens,
        "num_accepted_tokens": run.num_accepted_tokens,
        "mean_acceptance_length": run.mean_acceptance_length,
        "per_position_acceptance": run.per_position_acceptance,
        "tokens_per_second": run.tokens_per_second,
        "num_iterations": run.iterations,
    }


def print_reports(reports: list[FamilyReport], console: Console) -> None:
    """Print the texts, and a table and the verdict for each family.

    The texts are those of the first family; the verdict of another family says where its texts differ.
    """
    first = reports[0]
    for prompt, text in zip(first.prompts, first.eagle_mrv2.texts, strict=True):
        console.print(Text(prompt, style="dim"))
        console.print(Padding(Text(text.strip() or "(end of text)"), (0, 0, 1, 4)))
    ours = first.eagle_mrv2
    console.print(f"vLLM {ours.vllm_version} on {ours.device_name}, {first.dtype}, greedy", highlight=False)
    for report in reports:
        console.print()
        console.print(_table(report))
        _print_classes(report, console)
        _print_verdict(report, console)
    if ours.device == "cpu":
        console.print(TIMES_MEAN_NOTHING, style="bold")


def _table(report: FamilyReport) -> Table:
    baseline, stock, ours = report.baseline, report.stock, report.eagle_mrv2
    table = Table(title=f"{report.family}, K={report.num_speculative_tokens}", title_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("none", "stock", "eagle_mrv2"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_row(
        "mean acceptance length", "", _number(stock.mean_acceptance_length), _number(ours.mean_acceptance_length)
    )
    for position in range(report.num_speculative_tokens):
        table.add_row(
            f"accepted at position {position + 1}",
            "",
            *(_percentage(run.per_position_acceptance, position) for run in (stock, ours)),
        )
    table.add_row("drafts", "", str(stock.num_drafts), str(ours.num_drafts))
    table.add_row("engine iterations", *(str(run.iterations) for run in (baseline, stock, ours)))
    table.add_row("tokens per second", *(f"{run.tokens_per_second:.1f}" for run in (baseline, stock, ours)))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percentage(shares: list[float], position: int) -> str:
    return f"{shares[position]:.0%}" if position < len(shares) else "-"


def _print_classes(report: FamilyReport, console: Console) -> None:
    for name, run in (("stock", report.stock), ("eagle_mrv2", report.eagle_mrv2)):
        classes = [run.speculator_class or "no speculator", *run.graph_manager_classes]
        short = ", ".join(path.rpartition(".")[2] for path in classes)
        console.print(f"{name} ran {short}", highlight=False)


def _print_verdict(report: FamilyReport, console: Console) -> None:
    comparisons = (
        ("eagle_mrv2 and no speculation", report.eagle_mrv2, report.baseline),
        ("stock and no speculation", report.stock, report.baseline),
        ("eagle_mrv2 and stock", report.eagle_mrv2, report.stock),
    )
    for names, left, right in comparisons:
        difference = first_difference(left.token_ids, right.token_ids)
        console.print(f"tokens of {names}: {difference or 'equal'}", highlight=False)
    if not report.drafted:
        console.print("FAILED: the speculator of eagle_mrv2 did not draft", style="bold red")
    elif not report.passed:
        console.print("FAILED: the tokens of eagle_mrv2 are not the target's", style="bold red")
    else:
        console.print("PASSED", style="bold green")
