"""Prints a refusal that ends a vLLM command as one line without a traceback; programs still get the exception."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

from vllm_eagle_mrv2.errors import EagleMRV2Error


def install() -> None:
    """Replace ``sys.excepthook`` in a vLLM command: it prints refusals, and passes other exceptions to the old hook."""
    if not _is_vllms_command():
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, EagleMRV2Error):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    sys.excepthook = hook


def _is_vllms_command() -> bool:
    """Whether this process was started as ``vllm ...`` or ``python -m vllm...``."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec is not None else Path(sys.argv[0]).name
    return bool(name.partition(".")[0] == "vllm")
