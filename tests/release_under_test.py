"""What the tests must know of the vLLM release under test."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from packaging.version import Version

release = Version(Version(version("vllm")).base_version)

PROBABILISTIC: dict[str, Any] = (
    {"draft_sample_method": "probabilistic"}
    if release >= Version("0.22")
    else {"rejection_sample_method": "probabilistic"}
)
"""The setting that has draft logits kept."""


def supplied(behaviour: str) -> bool:
    """Whether the behaviour is this package's on the release, and not vLLM's own or not offered."""
    from vllm_eagle_mrv2 import releases
    from vllm_eagle_mrv2.config.behaviours import Behaviour

    return releases.release_for(str(release)).supplier(Behaviour(behaviour), release) == "eagle_mrv2"
