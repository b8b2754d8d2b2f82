"""The results of the bench as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from vllm_eagle_mrv2.cli.bench.types import SIDES, Row, Side, Started
from vllm_eagle_mrv2.cli.errors import print_error
from vllm_eagle_mrv2.cli.on_cpu import TIMES_MEAN_NOTHING


class Report(BaseModel):
    """A run: the machine and models that it measured, and the error that ended it early."""

    plain_width: ClassVar[int] = 160
    """Columns of the table where no terminal says how many it has."""

    title: str
    versions: dict[str, str | None]
    started: Started
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the run ended without an error."""
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "title": self.title,
            "versions": {"vllm": self.started.vllm_version, **self.versions},
            "device": self.started.device,
            "device_name": self.started.device_name,
            "passed": self.passed,
            "error": self.error,
        }

    def print_on(self, console: Console) -> None:
        """Print the report."""
        started = self.started
        console.print(f"vLLM {started.vllm_version} on {started.device_name}: {self.title}", highlight=False)
        self._print_rows(console)
        if started.device == "cpu":
            console.print(TIMES_MEAN_NOTHING, style="bold")

    def draw(self, path: Path) -> None:
        """Plot the report.

        Args:
            path: output file; its extension selects the format, as in matplotlib.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        key = self._draw_rows(figure)
        started, warning = self.started, "; on a CPU these times mean nothing" if self.started.device == "cpu" else ""
        where = f"vLLM {started.vllm_version}, {started.device_name}{warning}"
        figure.suptitle(f"{self.title}\n{where}\n{key}", fontsize="medium", wrap=True)
        figure.savefig(path, dpi=150)

    def end(self, options: dict[str, Any], json_output: str | None, plot: Path | None, errors: Console) -> NoReturn:
        """Print the report, write its files, and exit with 0 if the run passed, else with 1.

        Args:
            options: those of the command, for the JSON.
            json_output: file for the JSON, or ``-`` to print it instead of the report.
            plot: file for the plot.
            errors: gets the error that ended the run early.
        """
        text = json.dumps(self.to_json() | {"options": options}, indent=1, default=str)
        if json_output == "-":
            typer.echo(text)
        else:
            console = Console()
            self.print_on(console if console.is_terminal else Console(width=self.plain_width))
            if json_output:
                Path(json_output).write_text(text + "\n", encoding="utf-8")
        if plot:
            self.draw(plot)
        if self.error:
            print_error(errors, self.error)
        raise typer.Exit(0 if self.passed else 1)

    def _print_rows(self, console: Console) -> None:
        """Print what was measured."""
        raise NotImplementedError

    def _draw_rows(self, figure: Any) -> str:
        """Plot what was measured; return the key to the lines."""
        raise NotImplementedError


class BenchReport(Report):
    """All rows of a run of ``bench``."""

    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether every row has its ratio."""
        return super().passed and not any(row.refusals for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, without the token ids of the rounds."""
        return super().to_json() | {"rows": [_row_to_json(row) for row in self.rows]}

    def _print_rows(self, console: Console) -> None:
        """Print the table, then the reasons for missing ratios."""
        table = Table(title="Medians over the rounds; milliseconds", title_justify="left")
        for heading in ("K", "batch", "method"):
            table.add_column(heading, overflow="fold")
        figures = ("iteration", "tokens/s", "token p50", "token p99", "first token", "accepted by position", "ratio")
        for heading in figures:
            table.add_column(heading, justify="right", overflow="fold")
        for row in self.rows:
            ratios = ("", _ratio(row))
            for side, name, ratio in zip(SIDES, row.names, ratios, strict=True):
                table.add_row(str(row.k), str(row.batch), name, *_cells(row, side), ratio, end_section=bool(ratio))
        console.print(table)
        against, ours = self.rows[0].names
        console.print(
            f"ratio: time an iteration, {against} / {ours}, the median over neighbouring rounds (quartiles)",
            style="dim",
            highlight=False,
        )
        for row in self.rows:
            for reason in row.refusals:
                console.print(f"K={row.k}, batch {row.batch}: no ratio; {reason}", style="red", highlight=False)

    def _draw_rows(self, figure: Any) -> str:
        """Plot iteration times and ratios by batch size, one colour for each K; a refused row has times only."""
        times, ratios = figure.subplots(1, 2)
        batches = sorted({row.batch for row in self.rows})
        for number, k in enumerate(sorted({row.k for row in self.rows})):
            rows = sorted((row for row in self.rows if row.k == k), key=lambda row: row.batch)
            at, color = [batches.index(row.batch) for row in rows], f"C{number}"
            for side, line, label in zip(SIDES, ("--", "-"), (None, f"K={k}"), strict=True):
                times.plot(
                    at, [row.figures(side).iteration_ms for row in rows], line, marker="o", color=color, label=label
                )
            points = [(place, *row.quartiles) for place, row in zip(at, rows, strict=True) if row.quartiles]
            for place, low, middle, high in points:
                ratios.errorbar(place, middle, yerr=[[middle - low], [high - middle]], capsize=3, color=color)
            ratios.plot([p[0] for p in points], [p[2] for p in points], "o", color=color, label=f"K={k}")
        ratios.axhline(1, color="grey", linewidth=0.8)
        times.set_ylabel("milliseconds an engine iteration")
        times.set_ylim(bottom=0)
        ratios.set_ylabel("time an iteration, dashed / solid (quartiles)")
        for axes in (times, ratios):
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set_xlabel("batch")
            axes.legend()
        against, ours = self.rows[0].names
        return f"dashed: {against}; solid: {ours}"


def _row_to_json(row: Row) -> dict[str, Any]:
    low, ratio, high = row.quartiles or (None, None, None)
    return {
        "k": row.k,
        "batch": row.batch,
        "names": dict(zip(SIDES, row.names, strict=True)),
        "ratio": ratio,
        "quartiles": None if ratio is None else [low, high],
        "refusals": row.refusals,
        **{side: row.figures(side).model_dump() | {"rounds": _rounds_to_json(row, side)} for side in SIDES},
    }


def _rounds_to_json(row: Row, side: Side) -> list[dict[str, Any]]:
    return [taken.model_dump(exclude={"token_ids"}) for taken in getattr(row, side)]


def _cells(row: Row, side: Side) -> tuple[str, ...]:
    figures = row.figures(side)
    return (
        f"{figures.iteration_ms:.3f}",
        f"{figures.tokens_per_second:.1f}",
        f"{figures.itl_p50_ms:.3f}",
        f"{figures.itl_p99_ms:.3f}",
        f"{figures.ttft_p50_ms:.2f}",
        " ".join(f"{share:.0%}" for share in figures.acceptance) or "-",
    )


def _ratio(row: Row) -> str:
    if row.quartiles is None:
        return "refused"
    low, ratio, high = row.quartiles
    return f"{ratio:.3f} ({low:.3f}-{high:.3f})"
