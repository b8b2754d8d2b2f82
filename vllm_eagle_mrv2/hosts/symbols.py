"""Symbols of vLLM's private modules that every host relies on."""

from vllm_eagle_mrv2.surface import Symbol

GPU = "vllm.v1.worker.gpu"
_SPECULATOR = f"{GPU}.spec_decode.speculator"
_STOCK_ATTRIBUTES = (
    "vllm_config",
    "device",
    "method",
    "speculative_config",
    "input_buffers",
    "idx_mapping",
    "temperature",
    "seeds",
    "draft_tokens",
    "draft_logits",
    "draft_max_seq_len",
    "draft_attn_layer_names",
    "attn_groups",
    "block_tables",
    "model_state",
    "kv_cache_config",
    "target_input_buffers",
    "target_attn_groups",
    "dp_size",
    "dp_rank",
    "max_model_len",
    "max_num_reqs",
    "num_speculative_steps",
)

COMMON: tuple[Symbol, ...] = (
    Symbol(
        _SPECULATOR,
        "DraftModelSpeculator.set_attn",
        ("model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups"),
        why="gives the target's builders and buffers",
    ),
    *(Symbol(_SPECULATOR, f"DraftModelSpeculator.{name}", why="read or replaced by us") for name in _STOCK_ATTRIBUTES),
    Symbol(_SPECULATOR, "DraftModelSpeculator._prepare_eplb_forward", ("num_unpadded_tokens",)),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.capture", ("create_forward_fn", "progress_bar_desc")),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.run_fullgraph", ("desc",)),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.init_breakable_cg_runner", ("model",)),
    Symbol(f"{GPU}.cudagraph_utils", "BatchExecutionDescriptor", ("cg_mode", "num_tokens", "num_reqs")),
    Symbol(
        f"{GPU}.attn_utils",
        "build_attn_metadata",
        (
            "attn_groups",
            "num_reqs",
            "num_tokens",
            "query_start_loc_gpu",
            "query_start_loc_cpu",
            "max_query_len",
            "seq_lens",
            "max_seq_len",
            "block_tables",
            "slot_mappings",
            "kv_cache_config",
            "seq_lens_cpu_upper_bound",
        ),
    ),
    Symbol(f"{GPU}.attn_utils", "build_slot_mappings_by_layer", ("slot_mappings", "kv_cache_config")),
    Symbol(
        f"{GPU}.block_table",
        "BlockTables.compute_slot_mappings",
        ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded"),
    ),
    Symbol(f"{GPU}.block_table", "BlockTables.get_dummy_slot_mappings", ("num_tokens",)),
    Symbol(f"{GPU}.input_batch", "InputBatch.seq_lens_cpu_upper_bound"),
    Symbol("vllm.config.compilation", "CUDAGraphMode.decode_mode"),
)
