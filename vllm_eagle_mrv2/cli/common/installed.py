"""What is installed here."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.cli.common.errors import CommandError
from vllm_eagle_mrv2.config.families import METHOD

PLUGIN_GROUP = "vllm.general_plugins"


def require_vllm() -> None:
    """Raise `CommandError` if vLLM is not installed, or does not load the plugin."""
    if importlib.util.find_spec("vllm") is None:
        raise CommandError("vLLM is not installed here: install a release that this package supports.", 2)
    if (why := why_not_loaded()) is not None:
        raise CommandError(why, 2)


def is_registered() -> bool:
    """Whether the plugin has its entry point in this environment."""
    return any(entry.name == METHOD for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP))


def why_not_loaded() -> str | None:
    """What keeps vLLM from loading the plugin, with the remedy; None if nothing.

    By vLLM's rule VLLM_PLUGINS, if set, lists the names, spaces included.
    """
    if not is_registered():
        return (
            f"the entry point {METHOD} of the group {PLUGIN_GROUP} is not registered, so vLLM never loads the plugin; "
            "install vllm-eagle-mrv2 with pip into the environment of vLLM."
        )
    wanted = os.environ.get("VLLM_PLUGINS")
    if wanted is None or METHOD in wanted.split(","):
        return None
    others = [name.strip() for name in wanted.split(",") if name.strip() not in ("", METHOD)]
    return (
        f"VLLM_PLUGINS={wanted} keeps vLLM from loading this plugin; "
        f"set VLLM_PLUGINS={','.join([*others, METHOD])}, or unset it."
    )


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
