"""Progress of a command's runs on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

OnProgress = Callable[[int], None]
Track = Callable[[str, int], OnProgress]
"""(name of a run, maximum amount of work) -> callback for the work done so far."""


@contextmanager
def progress(console: Console, live: bool, quiet: bool) -> Iterator[Track]:
    """Show progress bars on a terminal; elsewhere print one line as each run starts, unless quiet."""
    if not (live and console.is_terminal):

        def announce(name: str, total: int) -> OnProgress:
            if not quiet:
                console.print(f"running {name} ...", highlight=False)
            return lambda done: None

        yield announce
        return

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, expand=True, refresh_per_second=4) as bars:

        def finish_all() -> None:
            for task in bars.tasks:  # a request may end before max_tokens
                bars.update(task.id, completed=task.total)

        def add(name: str, total: int) -> OnProgress:
            finish_all()
            bar = bars.add_task(name, total=None)  # pulses while the engine starts
            return lambda done: bars.update(bar, total=total, completed=done)

        yield add
        finish_all()
