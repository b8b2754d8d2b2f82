"""The named behaviours of the drafter, each of which can be switched off for a measurement."""

from __future__ import annotations

from enum import Enum


class Behaviour(str, Enum):
    """One drafting behaviour; the value is the name that ``disable`` takes."""

    DRAFT_LOGITS_IN_REPLAY = "draft_logits_in_replay"
    DECODE_METADATA_REBUILD = "decode_metadata_rebuild"
    FULL_DECODE_ONLY = "full_decode_only"
    TARGET_METADATA_REUSE = "target_metadata_reuse"
    ACTUAL_MAX_SEQ_LEN = "actual_max_seq_len"

    def __str__(self) -> str:
        return self.value

    @property
    def summary(self) -> str:
        """One line of what it does and the upstream changes that it follows."""
        return _SUMMARIES[self]


_SUMMARIES = {
    Behaviour.DRAFT_LOGITS_IN_REPLAY: "draft logits of every step are stored, in a replayed graph too (#37639)",
    Behaviour.DECODE_METADATA_REBUILD: "attention metadata describes each draft step (#38311, #41162)",
    Behaviour.FULL_DECODE_ONLY: "draft decode never runs in PIECEWISE graphs (#39773)",
    Behaviour.TARGET_METADATA_REUSE: "draft prefill reads the target's metadata (#40410, #44253, #48261)",
    Behaviour.ACTUAL_MAX_SEQ_LEN: "the draft's maximum length is that of the batch (#43991)",
}
