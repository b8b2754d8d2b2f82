"""The job and the result of a demo engine."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class DemoJob(BaseModel):
    """What one engine has to run."""

    model: str
    speculative_config: dict[str, Any] | None
    additional_config: dict[str, Any] = {}
    prompts: list[str]
    chat: bool = False
    max_tokens: int
    dtype: str
    gpu_memory_utilization: float


class Measurement(BaseModel):
    """The result of one engine; its counters cover the measured generation only."""

    vllm_version: str
    device: str
    device_name: str
    token_ids: list[list[int]]
    texts: list[str]
    seconds: float
    iterations: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    speculator_class: str | None = None
    graph_manager_classes: list[str] = []
    is_eagle_mrv2: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all requests."""
        return sum(map(len, self.token_ids)) / self.seconds

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that one iteration of a request yields, including the target's own."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def per_position_acceptance(self) -> list[float]:
        """For each draft position, the share of drafts that were accepted up to it."""
        return [accepted / self.num_drafts for accepted in self.num_accepted_tokens_per_pos if self.num_drafts]
