"""GPUs on which the kernels that replace a library's were measured.

Does not import torch, for the sake of `doctor`."""

from __future__ import annotations

from vllm_eagle_mrv2.config.families import METHOD

MEASURED = frozenset({(9, 0)})
"""Compute capabilities of H100 and H200."""


def about(name: str, capability: tuple[int, int]) -> str | None:
    """Return a sentence on what is left to PyTorch on this NVIDIA GPU; None if nothing is."""
    if capability in MEASURED:
        return None
    measured = ", ".join(f"{major}.{minor}" for major, minor in sorted(MEASURED))
    return (
        f"{METHOD} leaves the draft's products to PyTorch on {name}, as row_products was measured on compute "
        f"capability {measured} and not on {capability[0]}.{capability[1]}; "
        "vllm-eagle-mrv2 bench says what the rest gains."
    )
