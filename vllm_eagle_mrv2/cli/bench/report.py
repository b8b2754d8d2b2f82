"""The results of the bench as a table, as JSON and as a plot."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_eagle_mrv2.cli.bench.types import SIDES, Row, Side
from vllm_eagle_mrv2.cli.common.report import Report


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
