"""The named behaviours of the drafter; most of them can be switched off for a measurement."""

from __future__ import annotations

from enum import Enum


class Behaviour(str, Enum):
    """One drafting behaviour."""

    DRAFT_LOGITS_IN_REPLAY = "draft_logits_in_replay"
    DECODE_METADATA_REBUILD = "decode_metadata_rebuild"
    FULL_DECODE_ONLY = "full_decode_only"
    TARGET_METADATA_REUSE = "target_metadata_reuse"
    ACTUAL_MAX_SEQ_LEN = "actual_max_seq_len"
    SHARED_GRAPH_POOL = "shared_graph_pool"
    PADDING_WITHOUT_LOGITS = "padding_without_logits"
    SINGLE_TOKEN_CAPTURE_SIZES = "single_token_capture_sizes"
    LENGTHS_WITHOUT_SYNC = "lengths_without_sync"
    INDEPENDENT_DRAFT_NOISE = "independent_draft_noise"
    DYNAMIC_DRAFT_LENGTH = "dynamic_draft_length"
    DRAFT_ENFORCE_EAGER = "draft_enforce_eager"
    FUSED_DRAFT_DECODE = "fused_draft_decode"
    SKIP_UNUSED_DRAFTS = "skip_unused_drafts"
    TWO_STAGE_ARGMAX = "two_stage_argmax"
    LOCAL_ARGMAX = "local_argmax"
    ONE_DRAFT_GRAPH = "one_draft_graph"
    DRAFT_GRAPHS_BY_SUPPORT = "draft_graphs_by_support"
    DRAFT_TOP_K_TOP_P = "draft_top_k_top_p"
    ROW_PRODUCTS = "row_products"
    SINGLE_TOKEN_ATTENTION = "single_token_attention"

    def __str__(self) -> str:
        return self.value

    @property
    def summary(self) -> str:
        """One line: what the behaviour does, and the upstream changes that it follows."""
        return _SUMMARIES[self]


SWITCHES = frozenset(Behaviour) - {
    Behaviour.SHARED_GRAPH_POOL,
    Behaviour.PADDING_WITHOUT_LOGITS,
    Behaviour.SINGLE_TOKEN_CAPTURE_SIZES,
    Behaviour.LENGTHS_WITHOUT_SYNC,
    Behaviour.INDEPENDENT_DRAFT_NOISE,
    Behaviour.DYNAMIC_DRAFT_LENGTH,
    Behaviour.DRAFT_ENFORCE_EAGER,
}
"""Behaviours that ``disable`` accepts; of any other nothing but a defect of vLLM would be left."""

BEYOND_STOCK = frozenset(
    {
        Behaviour.TWO_STAGE_ARGMAX,
        Behaviour.LOCAL_ARGMAX,
        Behaviour.ONE_DRAFT_GRAPH,
        Behaviour.DRAFT_GRAPHS_BY_SUPPORT,
        Behaviour.DRAFT_TOP_K_TOP_P,
        Behaviour.ROW_PRODUCTS,
        Behaviour.SINGLE_TOKEN_ATTENTION,
    }
)
"""Behaviours that even the newest vLLM release's own speculator lacks."""

_SUMMARIES = {
    Behaviour.DRAFT_LOGITS_IN_REPLAY: "draft logits of every step are stored, in a replayed graph too (#37639)",
    Behaviour.DECODE_METADATA_REBUILD: "attention metadata describes each draft step (#38311, #41162)",
    Behaviour.FULL_DECODE_ONLY: "draft decode never runs in PIECEWISE graphs (#39773)",
    Behaviour.TARGET_METADATA_REUSE: "draft prefill reads the target's metadata (#40410, #44253, #48261)",
    Behaviour.ACTUAL_MAX_SEQ_LEN: "the draft's maximum length is that of the batch (#43991)",
    Behaviour.SHARED_GRAPH_POOL: "the draft's graphs live in the target's memory pool (#44078)",
    Behaviour.PADDING_WITHOUT_LOGITS: "rows of padding never write into a live request's draft logits",
    Behaviour.SINGLE_TOKEN_CAPTURE_SIZES: "draft decode has graphs of the sizes asked for, not of multiples of K+1",
    Behaviour.LENGTHS_WITHOUT_SYNC: "draft metadata is built from lengths on the CPU, with no device synchronization",
    Behaviour.INDEPENDENT_DRAFT_NOISE: "drafts are sampled with other random numbers than the target's tokens",
    Behaviour.DYNAMIC_DRAFT_LENGTH: "num_speculative_tokens_per_batch_size decides how many are drafted (#51510)",
    Behaviour.DRAFT_ENFORCE_EAGER: "enforce_eager of the speculative configuration is honoured",
    Behaviour.FUSED_DRAFT_DECODE: "all draft decodes are one graph, metadata refreshed on the device (#46849)",
    Behaviour.SKIP_UNUSED_DRAFTS: "nothing is drafted for a batch none of whose requests can use it (#48244)",
    Behaviour.TWO_STAGE_ARGMAX: "greedy drafts: an argmax over the draft's own vocabulary, spread over the chip",
    Behaviour.LOCAL_ARGMAX: "greedy drafts: tensor-parallel ranks exchange their best tokens instead of their logits",
    Behaviour.ONE_DRAFT_GRAPH: "draft prefill and all draft decodes of a uniform decode batch are one graph",
    Behaviour.DRAFT_GRAPHS_BY_SUPPORT: "draft decode has graphs where its own backend supports them",
    Behaviour.DRAFT_TOP_K_TOP_P: "probabilistic drafts honour the request's top-k and top-p (#56724)",
    Behaviour.ROW_PRODUCTS: "products of few rows with the draft's plain weights run at the speed of memory",
    Behaviour.SINGLE_TOKEN_ATTENTION: "RoPE, attention and the cache write of a draft decode are one kernel",
}
