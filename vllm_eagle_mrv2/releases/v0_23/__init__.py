"""vLLM 0.23 to 0.25: stock captures the draft prefill with the attention states of the target's capture."""

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.releases.spec import Release, hookimpl
from vllm_eagle_mrv2.releases.surface import Symbol
from vllm_eagle_mrv2.releases.symbols import DRAFT_MODEL, GPU, PER_STEP, PROPOSE, RUN_MODEL, SPECULATOR, TARGET_INPUTS

_AUTOREGRESSIVE = f"{GPU}.spec_decode.autoregressive.speculator"
_SAMPLE_DRAFT = ("hidden_states", "positions", "idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")

RELEASE = Release(
    name="v0_23",
    series=("0.23", "0.24", "0.25"),
    stock={
        Behaviour.DRAFT_LOGITS_IN_REPLAY: "",
        Behaviour.DECODE_METADATA_REBUILD: "",
        Behaviour.FULL_DECODE_ONLY: "",
        Behaviour.ACTUAL_MAX_SEQ_LEN: "",
        Behaviour.SHARED_GRAPH_POOL: "",
        Behaviour.PADDING_WITHOUT_LOGITS: ">=0.25",
        Behaviour.SINGLE_TOKEN_CAPTURE_SIZES: ">=0.25",
    },
    not_offered={Behaviour.DYNAMIC_DRAFT_LENGTH: "<0.25"},
    logits_of_any_dtype=False,
    adapter="vllm_eagle_mrv2.releases.v0_23.adapter",
    symbols=(
        *DRAFT_MODEL,
        *PER_STEP,
        *TARGET_INPUTS,
        Symbol(SPECULATOR, "DraftModelSpeculator.set_attn", ("model_state", "kv_cache_config", "block_tables")),
        Symbol(_AUTOREGRESSIVE, "AutoRegressiveSpeculator.capture", ("attn_states",)),
        Symbol(_AUTOREGRESSIVE, "AutoRegressiveSpeculator.propose", PROPOSE),
        Symbol(_AUTOREGRESSIVE, "AutoRegressiveSpeculator._run_model", RUN_MODEL),
        Symbol(_AUTOREGRESSIVE, "AutoRegressiveSpeculator.sample_draft", _SAMPLE_DRAFT),
        Symbol(SPECULATOR, "DraftModelSpeculator.use_fp64_gumbel"),
    ),
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.23 to 0.25."""
    return RELEASE
