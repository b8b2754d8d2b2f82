"""vLLM 0.26 and 0.27: stock passes the target's buffers to the speculator, and replays one graph per draft step."""

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.releases.spec import Release, hookimpl
from vllm_eagle_mrv2.releases.surface import Symbol
from vllm_eagle_mrv2.releases.symbols import COMMON, GPU, PER_STEP, PROPOSE, RUN_MODEL, SPECULATOR

_AUTOREGRESSIVE = f"{GPU}.spec_decode.autoregressive.speculator"

RELEASE = Release(
    name="v0_26",
    series=("0.26", "0.27"),
    stock={
        Behaviour.DRAFT_LOGITS_IN_REPLAY: "",
        Behaviour.DECODE_METADATA_REBUILD: "",
        Behaviour.FULL_DECODE_ONLY: "",
        Behaviour.TARGET_METADATA_REUSE: "",
        Behaviour.ACTUAL_MAX_SEQ_LEN: "",
        Behaviour.SHARED_GRAPH_POOL: "",
        Behaviour.PADDING_WITHOUT_LOGITS: "",
        Behaviour.SINGLE_TOKEN_CAPTURE_SIZES: "",
        Behaviour.LENGTHS_WITHOUT_SYNC: ">=0.27",
    },
    logits_of_any_dtype=False,
    adapter="vllm_eagle_mrv2.releases.v0_26.adapter",
    symbols=(
        *COMMON,
        *PER_STEP,
        Symbol(_AUTOREGRESSIVE, "AutoRegressiveSpeculator.propose", PROPOSE),
        Symbol(_AUTOREGRESSIVE, "AutoRegressiveSpeculator._run_model", RUN_MODEL),
        Symbol(
            SPECULATOR,
            "DraftModelSpeculator.sample_draft",
            ("hidden_states", "positions", "idx_mapping", "temperature", "seeds", "draft_step", "draft_logits"),
        ),
        Symbol(SPECULATOR, "DraftModelSpeculator.use_fp64_gumbel"),
    ),
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.26 and 0.27."""
    return RELEASE
