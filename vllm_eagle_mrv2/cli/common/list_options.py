"""Options that take several values at once: ``-k 3 5 7``, ``-k 3,5,7`` and ``-k 3 -k 5 -k 7`` are the same."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class ListOptionsCommand(TyperCommand):
    """A command without positional arguments: bare words are values of the preceding list option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, which is the form that click accepts."""
        names = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        return super().parse_args(ctx, expand(args, names))


def expand(arguments: list[str], names: set[str]) -> list[str]:
    """Repeat an option before each of its values.

    Args:
        arguments: a command line.
        names: the options that take several values.
    """
    expanded: list[str] = []
    current: str | None = None  # the option that bare words are values of
    for argument in arguments:
        name, _, joined = argument.partition("=")
        if argument.startswith("-"):
            current = name if name in names else None
            if current is None or not joined:
                expanded.append(argument)
                continue
            argument = joined
        values = argument.split(",") if current else []
        if current is None or expanded[-1:] == [current]:  # an option that still lacks its first value
            expanded.append(values.pop(0) if values else argument)
        expanded += [part for value in values for part in (str(current), value)]
    return expanded
