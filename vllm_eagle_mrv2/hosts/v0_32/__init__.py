"""vLLM 0.32: one graph for all draft decodes where the backends refresh their metadata on the device, dynamic K."""

from packaging.specifiers import SpecifierSet

from vllm_eagle_mrv2.behaviours import Behaviour
from vllm_eagle_mrv2.hosts.spec import Host, hookimpl
from vllm_eagle_mrv2.hosts.symbols import COMMON, GPU
from vllm_eagle_mrv2.surface import Symbol

_SPECULATOR = f"{GPU}.spec_decode.speculator"
_TARGET_DEPENDENT = f"{GPU}.spec_decode.target_dependent_ar"

HOST = Host(
    name="v0_32",
    series="0.32.x",
    releases=SpecifierSet(">=0.32.0,<0.33"),
    stock=frozenset(Behaviour),
    speculators="vllm_eagle_mrv2.hosts.v0_32.speculator",
    eagle3_over_pp=True,
    symbols=(
        *COMMON,
        Symbol(f"{GPU}.spec_decode", "init_speculator", ("vllm_config", "device", "req_states")),
        Symbol(
            f"{_TARGET_DEPENDENT}.speculator",
            "TargetDependentARSpeculator.propose",
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
                "dp_sync_state",
                "dummy_run",
                "skip_attn_for_dummy_run",
                "mm_inputs",
                "is_profile",
                "num_speculative_tokens",
            ),
        ),
        Symbol(
            f"{_TARGET_DEPENDENT}.speculator",
            "TargetDependentARSpeculator._run_model",
            (
                "num_tokens",
                "attn_metadata",
                "slot_mappings",
                "num_tokens_across_dp",
                "cudagraph_runtime_mode",
                "mm_inputs",
            ),
        ),
        *(
            Symbol(f"{_TARGET_DEPENDENT}.speculator", f"TargetDependentARSpeculator.{hook}", ("num_reqs",))
            for hook in (
                "on_prefill_begin",
                "on_prefill_end",
                "on_multi_step_decode_begin",
                "on_multi_step_decode_end",
            )
        ),
        Symbol(
            f"{_TARGET_DEPENDENT}.cudagraph_utils",
            "SpeculatorCudaGraphManager.specialize_spec_tokens",
            ("desc", "num_speculative_tokens"),
        ),
        Symbol(
            f"{_TARGET_DEPENDENT}.cudagraph_utils",
            "SpeculatorBatchDescriptor",
            ("cg_mode", "num_tokens", "num_reqs", "num_speculative_tokens"),
        ),
        Symbol(f"{GPU}.spec_decode.eagle.speculator", "EagleSpeculator"),
        Symbol(f"{GPU}.spec_decode.mtp.speculator", "MTPSpeculator"),
        Symbol(
            _SPECULATOR,
            "DraftModelSpeculator.sample_draft",
            (
                "hidden_states",
                "sample_src_positions",
                "idx_mapping",
                "temperature",
                "seeds",
                "draft_step",
                "draft_logits",
            ),
        ),
        Symbol(_SPECULATOR, "DraftModelSpeculator.draft_logits_spec", ("vllm_config",)),
        Symbol(_SPECULATOR, "DraftModelSpeculator.compute_draft_logits", ("hidden_states", "spec_step_idx")),
        Symbol(_SPECULATOR, "DraftModelSpeculator.supports_decode_metadata_update"),
        Symbol(_SPECULATOR, "DraftModelSpeculator.pcp_manager"),
        Symbol(
            _SPECULATOR,
            "DraftModelSpeculator._build_uniform_attn_metadata",
            ("batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound", "step"),
        ),
        Symbol(
            _SPECULATOR,
            "DraftModelSpeculator._build_attn_metadata",
            ("num_reqs", "batch_desc", "query_start_loc_np", "seq_lens_cpu_upper_bound", "step"),
        ),
        Symbol(
            _SPECULATOR,
            "DraftModelSpeculator._build_uniform_batch_dp_sync",
            ("target_dp_sync_state", "num_reqs", "num_query_per_req"),
        ),
        Symbol(_SPECULATOR, "DraftModelSpeculator._update_draft_decode_metadata", ("attn_metadata", "num_reqs")),
        Symbol(
            f"{GPU}.cudagraph_utils",
            "CudaGraphManager.__init__",
            ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
        ),
        Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager._capture_descs"),
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
                "full_cudagraph",
                "max_query_len",
            ),
        ),
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
                "dp_sync_state",
            ),
        ),
        Symbol(f"{GPU}.input_batch", "InputBatch.decode_graph_eligible"),
        Symbol(
            "vllm.v1.worker.utils",
            "get_uniform_decode_token_count",
            ("num_reqs", "num_tokens", "max_query_len", "decode_graph_eligible"),
        ),
        Symbol(
            "vllm.v1.spec_decode.dynamic.utils",
            "build_dynamic_sd_schedule_lookup",
            ("vllm_max_batch_size", "vllm_num_speculative_tokens"),
        ),
    ),
)


@hookimpl
def eagle_mrv2_host() -> Host:
    """The host of vLLM 0.32."""
    return HOST
