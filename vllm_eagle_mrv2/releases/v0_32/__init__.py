"""vLLM 0.32 and 0.33: one graph for all draft decodes that refreshes its own metadata, and a dynamic K."""

from vllm_eagle_mrv2.config.behaviours import BEYOND_STOCK, Behaviour
from vllm_eagle_mrv2.releases.fused_symbols import FUSED
from vllm_eagle_mrv2.releases.spec import Release, hookimpl

_SUPPLIED = {Behaviour.DRAFT_ENFORCE_EAGER, *BEYOND_STOCK}
_SINCE = {Behaviour.SKIP_UNUSED_DRAFTS: ">=0.33"}

RELEASE = Release(
    name="v0_32",
    series=("0.32", "0.33"),
    stock={behaviour: _SINCE.get(behaviour, "") for behaviour in Behaviour if behaviour not in _SUPPLIED},
    adapter="vllm_eagle_mrv2.releases.v0_32.adapter",
    symbols=FUSED,
)


@hookimpl
def eagle_mrv2_release() -> Release:
    """Return the release vLLM 0.32 and 0.33."""
    return RELEASE
