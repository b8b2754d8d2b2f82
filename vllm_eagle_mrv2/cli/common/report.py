"""What the reports of several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import typer
from pydantic import BaseModel
from rich.console import Console

from vllm_eagle_mrv2.cli.common.errors import print_error
from vllm_eagle_mrv2.cli.common.types import Started

TIMES_MEAN_NOTHING = "On a CPU these times mean nothing; only the counts do."


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


def first_difference(left: list[list[int]], right: list[list[int]]) -> str:
    """A description of the first difference between the token ids of two runs; empty if there is none."""
    for number, (ours, theirs) in enumerate(zip(left, right, strict=True), start=1):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False), start=1)
            place = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)) + 1)
            return f"differ, first at token {place} of prompt {number}"
    return ""
