"""The method's name, and the draft families that it supports."""

from __future__ import annotations

from typing import Literal, get_args

METHOD = "eagle_mrv2"
Family = Literal["eagle", "eagle3", "mtp"]
FAMILIES: tuple[Family, ...] = get_args(Family)
