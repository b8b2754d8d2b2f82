"""The results of a load bench as a table, as JSON and as a plot."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from vllm_eagle_mrv2.cli.bench_load.types import LoadRow
from vllm_eagle_mrv2.cli.common.load.types import Level
from vllm_eagle_mrv2.cli.common.report import Report


class LoadReport(Report):
    """All rows of a run of ``bench-load``."""

    plain_width: ClassVar[int] = 180
    rows: list[LoadRow]

    @property
    def passed(self) -> bool:
        """Whether every row allows a verdict."""
        return super().passed and all(row.decided for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, with every round."""
        return super().to_json() | {"rows": [_row_to_json(row) for row in self.rows]}

    def _print_rows(self, console: Console) -> None:
        """Print the table, with a verdict for each K and level of load."""
        table = Table(
            title="Tokens a second over all rounds, medians of the others; milliseconds", title_justify="left"
        )
        for heading in ("K", "load", "method"):
            table.add_column(heading, overflow="fold")
        for heading in ("tokens/s", "token", "first token", "first p99", "gap p99", "accepted", "gain"):
            table.add_column(heading, justify="right", overflow="fold")
        table.add_column("verdict", overflow="fold")
        for row in self.rows:
            for place, name in enumerate(row.names):
                last = place == len(row.names) - 1
                gain = str(row.gain(place)) if place else ""
                table.add_row(
                    str(row.k),
                    str(row.level),
                    name,
                    *_cells(row.figures(place)),
                    gain,
                    row.verdict if last else "",
                    end_section=last,
                )
        console.print(table)
        console.print(
            f"gain over {self.rows[0].names[0]}, over all rounds (lowest-highest of a round): in tokens a second, at a "
            "fixed rate in time per output token",
            style="dim",
            highlight=False,
        )

    def _draw_rows(self, figure: Any) -> str:
        """Plot throughput and gain by level of load, one colour for each K."""
        throughput, gains = figure.subplots(1, 2)
        levels: list[Level] = list(dict.fromkeys(row.level for row in self.rows))
        for number, k in enumerate(sorted({row.k for row in self.rows})):
            rows = [row for row in self.rows if row.k == k]
            at, color = [levels.index(row.level) for row in rows], f"C{number}"
            for engine, line, label in ((0, "--", None), (-1, "-", f"K={k}")):
                speeds = [row.figures(engine)["tokens_per_second"] for row in rows]
                throughput.plot(at, speeds, line, marker="o", color=color, label=label)
            for place, row in zip(at, rows, strict=True):
                middle, low, high = row.gain(-1)
                gains.errorbar(place, middle, yerr=[[middle - low], [high - middle]], capsize=3, color=color)
                if row.noise is not None:
                    gains.bar(place, 2 * row.noise, width=0.5, bottom=1 - row.noise, color="lightgrey", zorder=0)
            gains.plot(at, [row.gain(-1).overall for row in rows], "o", color=color, label=f"K={k}")
        gains.axhline(1, color="grey", linewidth=0.8)
        throughput.set_ylabel("tokens a second")
        throughput.set_ylim(bottom=0)
        gains.set_ylabel("gain (lowest to highest); grey: two equal engines")
        for axes in (throughput, gains):
            axes.set_xticks(range(len(levels)), [str(level) for level in levels])
            axes.legend()
        names = self.rows[0].names
        return f"dashed: {names[0]}; solid: {names[-1]}"


def _row_to_json(row: LoadRow) -> dict[str, Any]:
    others = range(1, len(row.names))
    return {
        "k": row.k,
        **{name: value for name, value in row.level._asdict().items() if value is not None},
        "figures": {name: row.figures(place) for place, name in enumerate(row.names)},
        "gain": {row.names[place]: row.gain(place)._asdict() for place in others},
        "decided_by": row.decisive,
        "noise": row.noise,
        "verdict": row.verdict,
        "rounds": _rounds(row),
    }


def _rounds(row: LoadRow) -> dict[str, Any]:
    return {name: [one.model_dump() for one in rounds] for name, rounds in zip(row.names, row.rounds, strict=True)}


def _cells(figures: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['tpot_p50_ms']:.2f}",
        f"{figures['ttft_p50_ms']:.1f}",
        f"{figures['ttft_p99_ms']:.1f}",
        f"{figures['gap_p99_ms']:.1f}",
        f"{figures['accepted_length']:.2f}",
    )
