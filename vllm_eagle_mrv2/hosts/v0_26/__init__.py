"""vLLM 0.26: one graph a draft step, metadata built by the host between steps."""

from packaging.specifiers import SpecifierSet

from vllm_eagle_mrv2.behaviours import Behaviour
from vllm_eagle_mrv2.hosts.spec import Host, hookimpl
from vllm_eagle_mrv2.hosts.symbols import COMMON, GPU
from vllm_eagle_mrv2.surface import Symbol

_AUTOREGRESSIVE = f"{GPU}.spec_decode.autoregressive.speculator"

HOST = Host(
    name="v0_26",
    series="0.26.x",
    releases=SpecifierSet(">=0.26.0,<0.27"),
    stock=frozenset(Behaviour),
    speculators="vllm_eagle_mrv2.hosts.v0_26.speculator",
    symbols=(
        *COMMON,
        Symbol(f"{GPU}.spec_decode", "init_speculator", ("vllm_config", "device")),
        Symbol(
            _AUTOREGRESSIVE,
            "AutoRegressiveSpeculator.propose",
            (
                "input_batch",
                "attn_metadata",
                "slot_mappings",
                "last_hidden_states",
                "aux_hidden_states",
                "num_sampled",
                "num_rejected",
                "last_sampled",
                "next_prefill_tokens",
                "temperature",
                "seeds",
                "num_tokens_across_dp",
                "dummy_run",
                "skip_attn_for_dummy_run",
                "mm_inputs",
                "is_profile",
            ),
        ),
        Symbol(
            _AUTOREGRESSIVE,
            "AutoRegressiveSpeculator._run_model",
            (
                "num_tokens",
                "attn_metadata",
                "slot_mappings",
                "num_tokens_across_dp",
                "cudagraph_runtime_mode",
                "mm_inputs",
            ),
        ),
        Symbol(f"{GPU}.spec_decode.eagle.speculator", "EagleSpeculator"),
        Symbol(f"{GPU}.spec_decode.mtp.speculator", "MTPSpeculator"),
        Symbol(
            f"{GPU}.spec_decode.speculator",
            "DraftModelSpeculator.sample_draft",
            ("hidden_states", "positions", "idx_mapping", "temperature", "seeds", "draft_step", "draft_logits"),
        ),
        Symbol(
            f"{GPU}.cudagraph_utils",
            "CudaGraphManager.__init__",
            ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
        ),
        Symbol(
            f"{GPU}.cudagraph_utils",
            "prepare_inputs_to_capture",
            (
                "num_reqs",
                "num_tokens",
                "model_state",
                "input_buffers",
                "block_tables",
                "attn_groups",
                "kv_cache_config",
                "skip_attn",
            ),
        ),
        Symbol(f"{GPU}.cudagraph_utils", "get_uniform_token_count", ("num_reqs", "num_tokens", "max_query_len")),
        Symbol(
            f"{GPU}.dp_utils",
            "dispatch_cg_and_sync_dp",
            (
                "cudagraph_manager",
                "num_reqs",
                "num_tokens",
                "uniform_token_count",
                "dp_size",
                "dp_rank",
                "need_eager",
            ),
        ),
    ),
)


@hookimpl
def eagle_mrv2_host() -> Host:
    """The host of vLLM 0.26."""
    return HOST
