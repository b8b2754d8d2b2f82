"""The recorded surfaces in the package, written by ``tools/record_surface.py`` for each release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packaging.version import Version

SURFACES = Path(__file__).resolve().parents[2] / "surfaces"


class NoSurface(Exception):
    """One line for the user: there is no such recording, or the file is not a recording."""


def recorded() -> dict[str, Path]:
    """Release -> path of its recording, oldest first."""
    return {file.stem: file for file in sorted(SURFACES.glob("*.json"), key=lambda file: Version(file.stem))}


def load_surface(wanted: str) -> dict[str, Any]:
    """Read a recording.

    Args:
        wanted: a recorded release, or the path of a recording.

    Raises:
        NoSurface: it is neither.
    """
    known = recorded()
    file = Path(wanted) if Path(wanted).is_file() else known.get(wanted)
    if file is None:
        raise NoSurface(f"{wanted} is no file and no recorded release (recorded: {', '.join(known) or 'none'}).")
    try:
        surface = json.loads(file.read_text(encoding="utf-8"))
        ok = isinstance(surface["symbols"], dict) and isinstance(surface["vllm_version"], str)
    except (OSError, ValueError, KeyError, TypeError):
        ok = False
    if not ok:
        raise NoSurface(f"{file} is not a surface that tools/record_surface.py recorded.")
    return dict(surface)
