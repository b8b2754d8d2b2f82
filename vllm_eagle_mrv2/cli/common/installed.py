"""What is installed here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import platform
import sys
import warnings
from collections.abc import Iterator

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.config.families import METHOD


def require_vllm() -> None:
    """Raise `CommandError` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise CommandError("vLLM is not installed here: install a release that this package supports.", 2)


def version_of(*names: str) -> str | None:
    """The version of the first installed distribution among these; None if none is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def versions() -> dict[str, str | None]:
    """The versions that a measurement depends on, beside vLLM's."""
    return {
        METHOD: __version__,
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton", "pytorch-triton"),
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the output of vLLM's imports away from standard output, which is for the report alone."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
