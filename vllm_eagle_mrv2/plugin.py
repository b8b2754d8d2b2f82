"""The ``vllm.general_plugins`` entry point."""

from __future__ import annotations

from vllm_eagle_mrv2 import patches


def register() -> None:
    """Install the patches into vLLM.

    vLLM calls this in each of its processes before it builds a configuration.  The call is cheap, may be repeated, does
    not import vLLM and changes nothing for an engine that does not ask for ``eagle_mrv2``.
    """
    patches.install()
