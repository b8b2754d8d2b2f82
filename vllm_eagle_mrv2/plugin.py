"""The ``vllm.general_plugins`` entry point."""

from __future__ import annotations


def register() -> None:
    """Install the seams into vLLM.

    vLLM calls this once in every one of its processes, before it builds a configuration.  It is cheap, may be called
    again, imports nothing of vLLM's and changes nothing for an engine that does not ask for ``eagle_mrv2``.
    """
    from vllm_eagle_mrv2.patches import engine_args

    engine_args.install()
