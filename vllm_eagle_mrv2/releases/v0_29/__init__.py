"""vLLM 0.29 to 0.31: one graph for all draft decodes, metadata refreshed by some backends."""

from vllm_eagle_mrv2.config.behaviours import BEYOND_STOCK, Behaviour
from vllm_eagle_mrv2.releases.fused_symbols import FUSED
from vllm_eagle_mrv2.releases.spec import Release, hookimpl

_SUPPLIED = {Behaviour.DYNAMIC_DRAFT_LENGTH, Behaviour.DRAFT_ENFORCE_EAGER, Behaviour.SKIP_UNUSED_DRAFTS, *BEYOND_STOCK}

RELEASE = Release(
    name="v0_29",
    series=("0.29", "0.30", "0.31"),
    stock={behaviour: "" for behaviour in Behaviour if behaviour not in _SUPPLIED},
    adapter="vllm_eagle_mrv2.releases.v0_29.adapter",
    symbols=FUSED,
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.29 to 0.31."""
    return RELEASE
