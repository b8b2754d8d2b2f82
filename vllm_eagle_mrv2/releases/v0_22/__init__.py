"""vLLM 0.22: one speculator class for all families; draft attention is bounded by ``max_model_len``."""

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.releases.spec import Release, hookimpl
from vllm_eagle_mrv2.releases.surface import Symbol, words
from vllm_eagle_mrv2.releases.symbols import GPU, MONOLITH

_EAGLE = f"{GPU}.spec_decode.eagle.speculator"

RELEASE = Release(
    name="v0_22",
    series=("0.22",),
    stock={Behaviour.DRAFT_LOGITS_IN_REPLAY: "", Behaviour.DECODE_METADATA_REBUILD: "", Behaviour.FULL_DECODE_ONLY: ""},
    not_offered={Behaviour.DYNAMIC_DRAFT_LENGTH: ""},
    logits_of_any_dtype=False,
    adapter="vllm_eagle_mrv2.releases.v0_22.adapter",
    symbols=(
        *MONOLITH,
        Symbol(_EAGLE, "EagleSpeculator.capture", ("attn_states",)),
        Symbol(_EAGLE, "EagleSpeculator.current_draft_step"),
        Symbol(_EAGLE, "EagleSpeculator.use_fp64_gumbel"),
        Symbol(
            f"{GPU}.model_states.mamba_hybrid",
            "MambaHybridModelState.prepare_attn",
            words("input_batch cudagraph_mode block_tables slot_mappings attn_groups kv_cache_config for_capture"),
            why="wrapped to take the batch's own maximum length",
        ),
    ),
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.22."""
    return RELEASE
