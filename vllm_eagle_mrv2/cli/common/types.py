"""The job that starts an engine, and its answer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Job(BaseModel):
    """The engine to start.  The worker answers with `Started`."""

    model: str
    speculative_config: dict[str, Any] | None
    """None for no speculation."""
    arguments: dict[str, Any]
    """Arguments for ``LLM``, which the worker reduces on a CPU."""
    overrides: dict[str, Any]
    """The user's own arguments for ``LLM``, which take precedence."""
    prompts: list[str] | list[list[int]]
    """Texts or token ids; a batch takes as many as it needs, starting with the first."""
    ignore_eos: bool

    @property
    def method(self) -> str | None:
        """The method that drafts; None for no speculation."""
        return None if self.speculative_config is None else str(self.speculative_config["method"])


class Started(BaseModel):
    """The versions and the device of a started engine."""

    vllm_version: str
    device: str
    device_name: str
