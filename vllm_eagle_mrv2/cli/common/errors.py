"""The error that ends a command, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console


class CommandError(Exception):
    """One line for the user.  The exit code is 1 for a failure, 2 for a command that cannot start as asked."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def print_error(console: Console, error: object) -> None:
    """Print an error as one line, without wrapping."""
    console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def reported(console: Console, as_json: bool) -> Iterator[None]:
    """Print the `CommandError` that ends a command, as JSON on stdout too if asked for, and exit with its code."""
    try:
        yield
    except CommandError as error:
        if as_json:
            typer.echo(json.dumps({"error": str(error)}))
        print_error(console, error)
        raise typer.Exit(error.exit_code) from None
