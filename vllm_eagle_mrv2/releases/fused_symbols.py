"""Symbols of private vLLM modules that the adapters of 0.28 to 0.33 rely on."""

from vllm_eagle_mrv2.releases.surface import Symbol, words
from vllm_eagle_mrv2.releases.symbols import CAPTURE_INPUTS, COMMON, DISPATCH, GPU, PROPOSE, RUN_MODEL, SPECULATOR

_PCP = f"{GPU}.pcp_manager"
_GROUP = "vllm.v1.worker.utils"
_SAMPLE = ("idx_mapping", "temperature", "seeds", "draft_step", "draft_logits")


def _propose(dp_sync: str, *more: str) -> tuple[str, ...]:
    return (*(dp_sync if name == "num_tokens_across_dp" else name for name in PROPOSE), *more)


def _of_class(module: str, name: str, releases: str) -> tuple[Symbol, ...]:
    """Symbols of the base class of this package's speculators, which 0.32 renamed."""
    return (
        Symbol(module, f"{name}._run_model", RUN_MODEL, releases=releases),
        *(
            Symbol(module, f"{name}.{attribute}", why="read or replaced by us", releases=releases)
            for attribute in ("hidden_states", "last_token_indices", "current_draft_step")
        ),
        *(
            Symbol(module, f"{name}.{hook}", ("num_reqs",), releases=releases)
            for hook in ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end")
        ),
    )


_AR = f"{GPU}.spec_decode.autoregressive.speculator"
_TARGET_DEPENDENT = f"{GPU}.spec_decode.target_dependent_ar.speculator"

FUSED: tuple[Symbol, ...] = (
    *COMMON,
    # Construction, calls and inputs of the speculator
    Symbol(f"{GPU}.spec_decode", "init_speculator", ("vllm_config", "device"), releases="<0.32"),
    Symbol(f"{GPU}.spec_decode", "init_speculator", ("vllm_config", "device", "req_states"), releases=">=0.32"),
    Symbol(_AR, "AutoRegressiveSpeculator.propose", PROPOSE, releases="<0.29"),
    Symbol(_AR, "AutoRegressiveSpeculator.propose", _propose("dp_sync"), releases=">=0.29,<0.32"),
    Symbol(
        _TARGET_DEPENDENT,
        "TargetDependentARSpeculator.propose",
        _propose("dp_sync_state", "num_speculative_tokens"),
        releases=">=0.32",
    ),
    *_of_class(_AR, "AutoRegressiveSpeculator", "<0.32"),
    *_of_class(_TARGET_DEPENDENT, "TargetDependentARSpeculator", ">=0.32"),
    Symbol(f"{GPU}.input_batch", "InputBatch.has_prefill", releases="<0.31"),
    Symbol(f"{GPU}.input_batch", "InputBatch.decode_graph_eligible", releases=">=0.31"),
    *(
        Symbol(
            _GROUP,
            "get_uniform_decode_token_count",
            ("num_reqs", "num_tokens", "max_query_len", flag),
            why="the last argument is a field of the batch",
            releases=releases,
        )
        for flag, releases in (("has_prefill", "<0.31"), ("decode_graph_eligible", ">=0.31"))
    ),
    # Sampling
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator.sample_draft",
        ("hidden_states", "positions", *_SAMPLE),
        why="adds 1 to the positions",
        releases="<0.29",
    ),
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator.sample_draft",
        ("hidden_states", "sample_src_positions", *_SAMPLE),
        releases=">=0.29",
    ),
    Symbol(SPECULATOR, "DraftModelSpeculator.draft_logits_spec", ("vllm_config",)),
    Symbol(SPECULATOR, "DraftModelSpeculator.use_fp64_gumbel", releases="<0.29"),
    Symbol(
        SPECULATOR, "DraftModelSpeculator.compute_draft_logits", ("hidden_states", "spec_step_idx"), releases=">=0.32"
    ),
    # Attention metadata of draft decodes
    Symbol(_AR, "AutoRegressiveSpeculator.use_fused_multi_step_decode", releases="<0.32"),
    Symbol(SPECULATOR, "DraftModelSpeculator.supports_decode_metadata_update", releases=">=0.32"),
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator._build_draft_attn_metadata",
        words("num_reqs num_reqs_padded num_tokens_padded seq_lens_cpu_upper_bound step query_start_loc_np"),
        releases="<0.30",
    ),
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator._build_uniform_attn_metadata",
        ("batch_desc", "num_reqs", "num_query_per_req", "seq_lens_cpu_upper_bound", "step"),
        releases=">=0.30",
    ),
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator._build_attn_metadata",
        ("num_reqs", "batch_desc", "query_start_loc_np", "seq_lens_cpu_upper_bound", "step"),
        releases=">=0.30",
    ),
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator._update_draft_decode_metadata",
        ("attn_metadata", "num_reqs"),
        releases=">=0.32",
    ),
    Symbol(_GROUP, "AttentionGroup.update_draft_decode_metadata", ("attn_metadata",), releases="<0.32"),
    Symbol("vllm.v1.worker.workspace", "use_workspace_lane", ("lane",)),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner._draft_workspace_lane"),
    Symbol(_GROUP, "AttentionGroup.map_to_kernel_block_table", ("block_table",), releases=">=0.32"),
    Symbol(_GROUP, "AttentionGroup.kv_cache_group_id", releases=">=0.32"),
    # CUDA graphs and data parallelism
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.graphs"),
    Symbol(
        f"{GPU}.cudagraph_utils",
        "BatchExecutionDescriptor",
        ("cg_mode", "num_tokens", "num_reqs", "uniform_token_count", "max_query_len"),
    ),
    Symbol(f"{GPU}.cudagraph_utils", "prepare_inputs_to_capture", (*CAPTURE_INPUTS, "full_cudagraph", "max_query_len")),
    Symbol(f"{GPU}.dp_utils", "dispatch_cg_and_sync_dp", DISPATCH, releases="<0.29"),
    Symbol(f"{GPU}.dp_utils", "dispatch_cg_and_sync_dp", (*DISPATCH, "dp_sync"), releases=">=0.29,<0.32"),
    Symbol(f"{GPU}.dp_utils", "dispatch_cg_and_sync_dp", (*DISPATCH, "dp_sync_state"), releases=">=0.32"),
    Symbol(f"{GPU}.dp_utils", "DPSyncState", ("num_tokens_across_dp",), releases=">=0.29"),
    Symbol(f"{GPU}.dp_utils", "DPSyncState", ("num_tokens_across_dp", "num_reqs"), releases=">=0.32"),
    *(
        Symbol(
            SPECULATOR,
            "DraftModelSpeculator._build_uniform_batch_dp_sync",
            (target, "num_reqs", "num_query_per_req"),
            releases=releases,
        )
        for target, releases in (("target_dp_sync", ">=0.30,<0.32"), ("target_dp_sync_state", ">=0.32"))
    ),
    # Prefill context parallelism
    Symbol(SPECULATOR, "DraftModelSpeculator.pcp_manager", releases=">=0.30"),
    Symbol(_PCP, "PCPManager.draft_prefill_batch", releases=">=0.30"),
    Symbol(_PCP, "PCPManager.prepare_draft_prefill", ("input_batch", "input_ids"), releases=">=0.30"),
    Symbol(_PCP, "PCPManager.restore_draft_prefill", ("last_hidden_states", "hidden_states"), releases=">=0.30"),
    Symbol(
        f"{GPU}.block_table", "BlockTables.gather_block_tables", ("idx_mapping", "num_reqs_padded"), releases=">=0.30"
    ),
    # Dynamic number of draft tokens
    Symbol(
        "vllm.v1.spec_decode.dynamic.utils",
        "build_dynamic_sd_schedule_lookup",
        ("num_speculative_tokens_per_batch_size", "vllm_max_batch_size", "vllm_num_speculative_tokens"),
    ),
    Symbol(
        "vllm.config.speculative",
        "SpeculativeConfig.num_speculative_tokens_per_batch_size",
        why="hidden from the manager of draft decodes, which would divide by zero",
    ),
    Symbol(
        f"{GPU}.spec_decode.utils",
        "DraftTokensHandler.set_draft_tokens",
        ("input_batch", "draft_tokens"),
        why="wrapped where the number of draft tokens is dynamic",
        releases="<0.32",
    ),
)
