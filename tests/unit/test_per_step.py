"""What the adapters below vLLM 0.28 do to metadata builders while a graph is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from release_under_test import release

if release >= Version("0.28"):
    pytest.skip("from 0.28 on stock refreshes metadata itself", allow_module_level=True)

from vllm_eagle_mrv2.releases.per_step import _schedules_kept


class Builder:
    """Stores schedules as FlashAttention's builder does with full graphs."""

    def __init__(self) -> None:
        self.scheduler_metadata = torch.full((9,), 7, dtype=torch.int32)

    def build(self, schedule: torch.Tensor) -> Any:
        size = len(schedule)
        self.scheduler_metadata[:size] = schedule
        self.scheduler_metadata[size:] = 0
        return self.scheduler_metadata[:size]


def test_a_captured_schedule_stays_where_it_was_made() -> None:
    builder, without = Builder(), SimpleNamespace()
    buffer, schedules = builder.scheduler_metadata, [torch.arange(5), torch.arange(3)]
    with _schedules_kept([builder, without]):
        assert [builder.build(schedule) for schedule in schedules] == schedules
    assert builder.scheduler_metadata is buffer
    assert buffer.tolist() == [7] * 9
    assert not hasattr(without, "scheduler_metadata")
    assert builder.build(schedules[0]).data_ptr() == buffer.data_ptr(), "as ever where the host builds"
