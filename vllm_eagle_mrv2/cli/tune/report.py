"""The results of tuning as a table, as the setting that follows from them, as JSON and as a plot."""

from __future__ import annotations

import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_eagle_mrv2.cli.common.report import Report
from vllm_eagle_mrv2.cli.tune.types import AUTO, Range, Setting, TuneRow, schedule_of
from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.releases import release_for, stock_version

SCHEDULE = "num_speculative_tokens_per_batch_size"


class TuneReport(Report):
    """All rows of a run of ``tune``, by ascending concurrency."""

    speculative: dict[str, Any]
    """The speculative configuration to complete."""
    max_num_seqs: int
    rows: list[TuneRow]

    @property
    def passed(self) -> bool:
        """Whether every row was measured with all requests in flight."""
        return super().passed and all(row.measured and row.waited is None for row in self.rows)

    @property
    def settings(self) -> list[Setting]:
        """What was measured, the engine's own choice last."""
        return list(self.rows[0].rounds)

    @property
    def schedule(self) -> list[Range]:
        """The best number of draft tokens by batch size; empty unless every row was measured."""
        return schedule_of(self.rows, self.max_num_seqs) if self.passed else []

    @property
    def offered(self) -> bool:
        """Whether this vLLM has the setting `SCHEDULE`."""
        version = self.started.vllm_version
        supplier = release_for(version).supplier(Behaviour.DYNAMIC_DRAFT_LENGTH, stock_version(version))
        return supplier != "-"

    @property
    def speculative_config(self) -> dict[str, Any] | None:
        """The speculative configuration that follows from the schedule; None where there is none."""
        lengths = [one.length for one in self.schedule]
        if not any(lengths) or (len(lengths) > 1 and not self.offered):
            return None
        found = self.speculative | {"num_speculative_tokens": max(lengths)}
        return found | ({SCHEDULE: [list(one) for one in self.schedule]} if len(lengths) > 1 else {})

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, with every round."""
        return super().to_json() | {
            "rows": [_row_to_json(row) for row in self.rows],
            "schedule": [list(one) for one in self.schedule],
            "speculative_config": self.speculative_config,
        }

    def _print_rows(self, console: Console) -> None:
        """Print the table, and the setting that follows from it."""
        table = Table(title="Tokens a second", title_justify="left")
        for heading in ("in flight", *map(name_of, self.settings), "best", "auto/best", "auto/K=0"):
            table.add_column(heading, justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(*_cells(row))
        console.print(table)
        if not all(row.measured for row in self.rows):
            console.print("a round was too short, raise --requests or --output-tokens", style="red", highlight=False)
        for problem in filter(None, (row.waited for row in self.rows)):
            console.print(problem, style="red", highlight=False)
        for line in _advice(self):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw_rows(self, figure: Any) -> str:
        """Plot tokens a second over those at K=0 by requests in flight, a line for each setting."""
        figure.set_figwidth(7)
        axes = figure.subplots()
        rows = [row for row in self.rows if row.measured]
        at = [row.concurrency for row in rows]
        for setting in self.settings:
            speeds = [row.speeds[setting] / row.speeds[0] for row in rows]
            style: dict[str, Any] = {"color": "black", "linewidth": 3, "zorder": 1} if setting == AUTO else {}
            axes.plot(at, speeds, marker="o", label=name_of(setting), **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(one) for one in at])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("tokens a second, over those at K=0")
        axes.legend()
        return "thick: the engine's own choice"


def _row_to_json(row: TuneRow) -> dict[str, Any]:
    shares = {"auto_of_best": row.auto_of_best, "auto_of_none": row.auto_of_none} if row.measured else {}
    return {
        "concurrency": row.concurrency,
        "tokens_per_second": row.speeds,
        "best": row.best,
        **shares,
        "rounds": {setting: [one.model_dump() for one in rounds] for setting, rounds in row.rounds.items()},
    }


def name_of(setting: Setting) -> str:
    """The name of a setting in the table and in the plot."""
    return AUTO if setting == AUTO else f"K={setting}"


def _cells(row: TuneRow) -> list[str]:
    best = row.best
    speeds = [
        f"[bold green]{speed:.1f}[/]" if setting == best else f"{speed:.1f}" for setting, speed in row.speeds.items()
    ]
    shares = [f"{row.auto_of_best:.3f}", f"{row.auto_of_none:.3f}"] if row.measured else ["-", "-"]
    return [str(row.concurrency), *speeds, f"K={best}", *shares]


def _advice(report: TuneReport) -> list[str]:
    """What to set, a line each."""
    lengths = [one.length for one in report.schedule]
    if not lengths:
        return []
    most, config = max(lengths), report.speculative_config
    measured = f"Measured with up to {max(row.concurrency for row in report.rows)} requests in flight."
    if not most:
        return [f"{measured} K=0 makes the most tokens a second throughout: serve without speculation."]
    if config is None:
        version = report.started.vllm_version
        runner = f"Model Runner V2 of vLLM {version}"
        return [f"{runner} has no {SCHEDULE}: set draft_length: auto and num_speculative_tokens: {most}."]
    heading = "A fixed schedule:" if SCHEDULE in config else f"num_speculative_tokens: {most} will do throughout:"
    return [measured, heading, f"--speculative-config {shlex.quote(json.dumps(config))}"]
