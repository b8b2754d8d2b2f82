"""Draw the measurements of benchmarks/draft_lengths.py that lie in benchmarks/results, for docs/draft-length.md.

    python tools/draft_length_plots.py

Each release and card has two plots: tokens a second with each number of draft tokens and with the engine's own choice,
by requests in flight, and the course of the engine's own choice while the load or the acceptance changes.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from readme_tables import AUTO, DOCS, Changes, Lengths, Result, plot_of, read_results

BIN_S = 0.5
"""Seconds of a figure of a course, as in benchmarks/changing_load.py."""
STYLE = {"svg.hashsalt": "vllm-eagle-mrv2", "svg.fonttype": "none"}
"""The same plot is the same file, and its text stays text."""


def draw_lengths(lines: list[Lengths]) -> Figure:
    """Tokens a second over those without drafts: a panel for each kind of acceptance, a line for each number."""
    kinds = list(dict.fromkeys(one.accepted for one in lines))
    figure = Figure(figsize=(4 * len(kinds), 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rows = [one for one in lines if one.accepted == kind]
        at = [one.concurrency for one in rows]
        for name in dict.fromkeys(itertools.chain.from_iterable(one.tokens_per_second for one in rows)):
            speeds = [one.tokens_per_second for one in rows]
            shares = [each.get(name, math.nan) / each["0"] for each in speeds]
            own = name == AUTO
            color, label = ("black", AUTO) if own else (None, f"K={name}")
            axes.plot(
                at, shares, marker="o", label=label, color=color, linewidth=3 if own else 1, zorder=1 if own else 2
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(one) for one in at])
        axes.set_xlabel("requests in flight")
        axes.set_title(f"{kind} acceptance")
    figure.axes[0].set_ylabel("tokens a second, over those at K=0")
    figure.axes[-1].legend()
    return figure


def draw_changes(changes: list[Changes]) -> Figure:
    """Tokens a second above and the number of draft tokens below, over time; dashed: the best held number."""
    figure = Figure(figsize=(6 * len(changes), 5), layout="constrained")
    columns = figure.subplots(2, len(changes), sharex="col", squeeze=False, height_ratios=(2, 1)).T
    for (speed, number), one in zip(columns, changes, strict=True):
        held = [speeds for name, speeds in one.tokens_per_second.items() if name != AUTO]
        best = [max(speeds) for speeds in zip(*held, strict=True)]
        begin = 0.0
        for phase, (speeds, lengths) in enumerate(
            zip(one.course["tokens_per_second"], one.course["draft_length"], strict=True)
        ):
            at = [begin + place * BIN_S for place in range(len(speeds) + 1)]
            speed.stairs(speeds, at, color="C0", linewidth=1.5)
            speed.plot([at[0], at[-1]], 2 * [best[phase]], "--", color="grey")
            number.stairs(lengths, at, color="C0", linewidth=1.5)
            begin = at[-1]
        speed.set_title(one.change)
        speed.set_ylim(bottom=0)
        speed.set_ylabel("tokens a second")
        number.set_ylabel("draft tokens")
        number.set_xlabel("seconds")
    return figure


def draw_all(results: dict[str, list[Result]], folder: Path) -> list[Path]:
    """Draw the plots of all results into a folder; returns their files."""
    written = []
    for run in (run for runs in results.values() for run in runs):
        steady = [one for one in run.draft_lengths if isinstance(one, Lengths)]
        changing = [one for one in run.draft_lengths if isinstance(one, Changes)]
        figures = [("lengths", draw_lengths(steady))] if steady else []
        figures += [("changes", draw_changes(changing))] if changing else []
        for what, figure in figures:
            written.append(folder / plot_of(run, what))
            with mpl.rc_context(STYLE):
                figure.savefig(written[-1], metadata={"Date": None})
    return written


if __name__ == "__main__":
    for path in draw_all(read_results(), DOCS):
        print(path.name)
