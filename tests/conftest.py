"""What tests of several folders use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def mtp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with an MTP layer."""
    from mtp_model import write_mtp_model

    return write_mtp_model(tmp_path_factory.mktemp("mimo") / "target")
