"""vLLM 0.20: stock builds decode metadata once for all draft steps, and the draft prefill builds its own metadata."""

from vllm_eagle_mrv2.config.behaviours import Behaviour
from vllm_eagle_mrv2.releases.spec import Release, hookimpl
from vllm_eagle_mrv2.releases.surface import Symbol
from vllm_eagle_mrv2.releases.symbols import GPU, MONOLITH

RELEASE = Release(
    name="v0_20",
    series=("0.20",),
    stock={Behaviour.DRAFT_LOGITS_IN_REPLAY: "", Behaviour.FULL_DECODE_ONLY: ""},
    not_offered={Behaviour.DYNAMIC_DRAFT_LENGTH: "", Behaviour.LOCAL_ARGMAX: ""},
    logits_of_any_dtype=False,
    adapter="vllm_eagle_mrv2.releases.v0_20.adapter",
    v2_by_environment=True,
    symbols=(
        *MONOLITH,
        Symbol(f"{GPU}.spec_decode.eagle.speculator", "EagleSpeculator.capture_model", ()),
        Symbol("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER", why="set to select Model Runner V2"),
    ),
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.20."""
    return RELEASE
