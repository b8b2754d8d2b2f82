"""vLLM 0.28: one graph for all draft decodes, metadata refreshed by some backends, this package's own sampler."""

from vllm_eagle_mrv2.config.behaviours import BEYOND_STOCK, Behaviour
from vllm_eagle_mrv2.releases.fused_symbols import FUSED
from vllm_eagle_mrv2.releases.spec import Release, hookimpl

_SUPPLIED = {
    Behaviour.INDEPENDENT_DRAFT_NOISE,
    Behaviour.DYNAMIC_DRAFT_LENGTH,
    Behaviour.DRAFT_ENFORCE_EAGER,
    Behaviour.SKIP_UNUSED_DRAFTS,
    *BEYOND_STOCK,
}

RELEASE = Release(
    name="v0_28",
    series=("0.28",),
    stock={behaviour: "" for behaviour in Behaviour if behaviour not in _SUPPLIED},
    adapter="vllm_eagle_mrv2.releases.v0_28.adapter",
    symbols=FUSED,
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.28."""
    return RELEASE
