"""Symbols of private vLLM modules that several adapters rely on."""

from vllm_eagle_mrv2.releases import draft_loading
from vllm_eagle_mrv2.releases.surface import Symbol, words

GPU = "vllm.v1.worker.gpu"
SPECULATOR = f"{GPU}.spec_decode.speculator"
_SCHEDULER = "vllm.v1.core.sched.scheduler"

PROPOSE = words(
    "input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled "
    "num_rejected last_sampled next_prefill_tokens temperature seeds num_tokens_across_dp "
    "dummy_run skip_attn_for_dummy_run mm_inputs is_profile"
)
"""Parameters of ``propose`` in 0.20 to 0.28."""

RUN_MODEL = words("num_tokens attn_metadata slot_mappings num_tokens_across_dp cudagraph_runtime_mode mm_inputs")

_INPUT_BATCH = words(
    "num_reqs num_tokens num_tokens_after_padding num_scheduled_tokens num_draft_tokens "
    "input_ids positions query_start_loc query_start_loc_np seq_lens seq_lens_cpu_upper_bound "
    "idx_mapping idx_mapping_np"
)

STOCK_ATTRIBUTES = words(
    "vllm_config device method speculative_config input_buffers idx_mapping temperature seeds "
    "draft_tokens draft_logits draft_attn_layer_names attn_groups block_tables model_state "
    "kv_cache_config dp_size dp_rank max_model_len max_num_reqs num_speculative_steps"
)
"""Attributes of the speculator on every release, on whichever class."""

_LAYERS = "vllm.model_executor.layers"
_OPS = "vllm._custom_ops"
_VOCAB = f"{_LAYERS}.vocab_parallel_embedding"
_PRODUCT = ("layer", "x", "bias")
_FLASH = "vllm.v1.attention.backends.flash_attn"
_ATTENTION = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_UPDATE = ("layer", "key", "value", "kv_cache", "slot_mapping")
_HEAD = ("lm_head", "hidden_states", "embedding_bias")
_ROPE = f"{_LAYERS}.rotary_embedding.base"
DRAFT_LAYERS: tuple[Symbol, ...] = (
    Symbol("vllm.config.model", "ModelConfig.get_vocab_size", ()),
    Symbol("vllm.config.vllm", "VllmConfig.additional_config", why="our name goes there"),
    Symbol(
        f"{_LAYERS}.logits_processor",
        "LogitsProcessor.forward",
        _HEAD,
        why="replaced on the draft's instance, called for EAGLE-3",
    ),
    Symbol(f"{_LAYERS}.logits_processor", "LogitsProcessor.get_top_tokens", _HEAD, why="replaced there too"),
    Symbol(f"{_LAYERS}.logits_processor", "LogitsProcessor._gather_logits", ("logits",), why="replaced there too"),
    *(
        Symbol(f"{_LAYERS}.logits_processor", f"LogitsProcessor.{name}")
        for name in ("org_vocab_size", "scale", "soft_cap", "logits_as_input")
    ),
    Symbol(_VOCAB, "ParallelLMHead.__init__", ("num_embeddings", "embedding_dim", "params_dtype", "prefix")),
    Symbol(_VOCAB, "ParallelLMHead.weight_loader", ("param", "loaded_weight")),
    Symbol(_VOCAB, "ParallelLMHead.shard_indices"),
    Symbol(_VOCAB, "ParallelLMHead.tp_size"),
    Symbol(_VOCAB, "VocabParallelEmbeddingShardIndices.org_vocab_start_index"),
    Symbol(_VOCAB, "VocabParallelEmbeddingShardIndices.org_vocab_end_index"),
    Symbol(_VOCAB, "UnquantizedEmbeddingMethod.process_weights_after_loading", ("layer",)),
    Symbol(f"{_LAYERS}.linear", "UnquantizedLinearMethod"),
    Symbol(f"{_LAYERS}.linear", "UnquantizedLinearMethod.apply", _PRODUCT, why="replaced on the draft's instances"),
    Symbol(_VOCAB, "UnquantizedEmbeddingMethod.apply", _PRODUCT, why="replaced for the draft's head"),
    Symbol(f"{_LAYERS}.linear", "LinearBase", why="the layers that draft_quantization rounds"),
    Symbol(
        f"{_LAYERS}.linear",
        "UnquantizedLinearMethod.process_weights_after_loading",
        ("layer",),
        why="replaced for layers that are rounded",
    ),
    Symbol(_OPS, "scaled_fp8_quant", ("input", "use_per_token_if_dynamic"), why="rounds the rows of an FP8 product"),
    Symbol(_OPS, "cutlass_scaled_mm", ("a", "b", "scale_a", "scale_b", "out_dtype", "bias"), why="that product"),
    Symbol(_OPS, "cutlass_scaled_mm_supports_fp8", ("cuda_device_capability",)),
    Symbol(f"{_LAYERS}.utils", "default_unquantized_gemm", why="what may be replaced"),
    Symbol(f"{_LAYERS}.utils", "dispatch_unquantized_gemm", (), why="says what vLLM would multiply with"),
    Symbol(_FLASH, "FlashAttentionImpl.forward", _ATTENTION, why="replaced on the draft's instances"),
    Symbol(_FLASH, "FlashAttentionImpl.do_kv_cache_update", _UPDATE, why="replaced there too"),
    Symbol("vllm.forward_context", "get_forward_context", (), why="says what a layer will attend by"),
    Symbol("vllm.forward_context", "ForwardContext.attn_metadata"),
    Symbol(_ROPE, "RotaryEmbedding.forward_cuda", ("positions", "query", "key"), why="called ahead of attention"),
    *(
        Symbol(_ROPE, f"RotaryEmbedding.{name}")
        for name in ("head_size", "rotary_dim", "is_neox_style", "cos_sin_cache")
    ),
    *(
        Symbol(_FLASH, f"FlashAttentionImpl.{name}")
        for name in words(
            "num_heads num_kv_heads head_size scale alibi_slopes sliding_window logits_soft_cap sinks "
            "attn_type kv_cache_dtype"
        )
    ),
    *(
        Symbol(_FLASH, f"FlashAttentionMetadata.{name}")
        for name in ("max_query_len", "num_actual_tokens", "seq_lens", "block_table", "causal")
    ),
    Symbol(_FLASH, "FlashAttentionMetadata.use_cascade", releases="<0.32"),
    Symbol(_FLASH, "FlashAttentionBackend.get_kv_cache_shape", why="tells how keys and values lie", releases="<0.29"),
    Symbol(_FLASH, "FlashAttentionMetadataBuilder.aot_schedule", why="switched off where nobody reads the schedule"),
    Symbol(_FLASH, "FlashAttentionMetadataBuilder.max_cudagraph_size", why="says which batches are split"),
    Symbol(
        _FLASH,
        "FlashAttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata"),
        why="wrapped there",
    ),
    Symbol("vllm.v1.attention.backend", "CommonAttentionMetadata.max_query_len"),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.metadata_builders"),
    Symbol("vllm.config.compilation", "CUDAGraphMode.mixed_mode"),
    Symbol("vllm.distributed.communication_op", "tensor_model_parallel_all_reduce", ("input_",)),
    Symbol("vllm.distributed.communication_op", "tensor_model_parallel_all_gather", ("input_",)),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.reload_weights", why="wrapped to copy rows again"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.update_weights", why="wrapped there", releases="<0.21"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", why="wrapped there", releases=">=0.22"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.model_runner"),
    Symbol(
        "vllm.v1.worker.gpu_worker",
        "warmup_kernels",
        ("model_runner", "worker_execute_model", "worker_sample_tokens"),
        why="wrapped to forget what it counts",
    ),
    Symbol(f"{_LAYERS}.linear", "LinearMethodBase", why="tells quantized layers"),
)
"""Symbols that the draft model's head, layers and attention rely on (draft_model/)."""

_SPECULATIVE = "vllm.config.speculative"
_READING = "vllm.transformers_utils.config"
CONFIGURATIONS: tuple[Symbol, ...] = (
    Symbol(_SPECULATIVE, "SpeculativeConfig.hf_config_override", ("hf_config",), why="says what has MTP layers"),
    Symbol(_SPECULATIVE, "MTPModelTypes", why="says it, too"),
    Symbol(_SPECULATIVE, "SpeculativeMethod", why="says which drafts of other kinds the release knows"),
    Symbol("vllm.config.model", "ModelConfig.get_hidden_size", ()),
    Symbol(
        _READING,
        "get_config",
        ("model", "trust_remote_code", "revision", "config_format", "hf_overrides_fn"),
        why="reads configurations as the engine will",
    ),
    Symbol(
        _READING,
        "maybe_override_with_speculators",
        ("model", "tokenizer", "trust_remote_code", "revision", "hf_token"),
        why="takes target and draft from one checkpoint",
    ),
    *(
        Symbol("vllm.engine.arg_utils", f"EngineArgs.{name}")
        for name in ("trust_remote_code", "config_format", "hf_token", "load_format")
    ),
)
"""Symbols for the checks before anything is loaded."""

EVERYWHERE: tuple[Symbol, ...] = (
    *DRAFT_LAYERS,
    *draft_loading.SYMBOLS,
    *CONFIGURATIONS,
    *(
        Symbol("vllm.engine.arg_utils", f"EngineArgs.{name}", why="wrapped to accept the method")
        for name in ("create_engine_config", "create_speculative_config", "add_cli_args")
    ),
    Symbol(
        "vllm.config.vllm", "VllmConfig.use_v2_model_runner", why="wrapped to select Model Runner V2", releases=">=0.22"
    ),
    Symbol("vllm.config.vllm", "VllmConfig._validate_v2_model_runner", (), why="wrapped to refuse in our words"),
    Symbol("vllm.config.vllm", "VllmConfig._set_cudagraph_sizes", (), why="wrapped to capture batches with prefills"),
    *(
        Symbol("vllm.config.compilation", f"CompilationConfig.{name}", why="larger ones are added there")
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    ),
    Symbol(
        "vllm.config.vllm",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        (),
        why="says what Model Runner V2 does not serve",
        releases=">=0.22",
    ),
    *(
        Symbol("vllm.config.parallel", f"ParallelConfig.{name}", why="says which rank counts and speaks")
        for name in ("rank", "tensor_parallel_size", "data_parallel_index", "data_parallel_rank_local")
    ),
    Symbol(f"{GPU}.model_runner", "init_speculator", why="wrapped to make our speculator"),
    Symbol(
        "vllm.v1.engine.core",
        "EngineCore._initialize_kv_caches",
        ("vllm_config",),
        why="wrapped to ask the workers what they draft with",
    ),
    Symbol("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method",), why="asks them"),
    Symbol("vllm.v1.engine.core", "EngineCore.model_executor", why="shut down where one drafts otherwise"),
    Symbol("vllm.v1.executor.abstract", "Executor.shutdown", (), why="that"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.speculator", why="looked at there"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.is_last_pp_rank", why="looked at there too"),
    *(
        Symbol("vllm.config.speculative", f"SpeculativeConfig.{name}", why="the draft is fitted to the target")
        for name in ("draft_model_config", "target_model_config", "target_parallel_config")
    ),
    *(
        Symbol("vllm.config.model", f"ModelConfig.{name}", why="read or replaced there")
        for name in ("hf_config", "hf_text_config", "max_model_len")
    ),
    Symbol("vllm.config.model", "ModelConfig.compute_hash", (), why="tells drafts apart in caches"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.load_model", why="wrapped to spare auxiliary hidden states"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.use_aux_hidden_state_outputs", why="set there"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.speculative_config"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.capture_model", why="wrapped for a draft whose target has no graphs"),
    Symbol(
        f"{GPU}.model_runner",
        "GPUModelRunner.initialize_kv_cache",
        ("kv_cache_config",),
        why="wrapped to hand over what vLLM does not",
    ),
    Symbol(
        f"{GPU}.model_runner",
        "GPUModelRunner.post_kv_cache_wake_up",
        (),
        why="wrapped for graphs that hold slot mappings",
        releases=">=0.22,<0.29",
    ),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.block_tables"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.cudagraph_manager"),
    Symbol(f"{GPU}.cudagraph_utils", "ModelCudaGraphManager.hidden_states", why="read by the draft's graphs"),
    Symbol(f"{GPU}.cudagraph_utils", "ModelCudaGraphManager.aux_hidden_states", why="read there too"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.kv_connector"),
    Symbol("vllm.v1.worker.workspace", "is_workspace_manager_initialized", ()),
    Symbol("vllm.v1.worker.workspace", "current_workspace_manager", ()),
    Symbol("vllm.v1.worker.workspace", "WorkspaceManager.get_simultaneous"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.sampler"),
    Symbol(f"{GPU}.sample.sampler", "Sampler.sampling_states"),
    Symbol(
        f"{GPU}.sample.sampler",
        "Sampler.add_request",
        ("req_idx", "prompt_len", "sampling_params"),
        why="replaced on the runner's instance, to keep where a request ends",
        releases="<0.23",
    ),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.req_states"),
    Symbol(
        f"{GPU}.states",
        "RequestState.add_request",
        why="replaced on the runner's instance, for placeholders of drafts and for sessions",
        releases="<0.31",
    ),
    Symbol(f"{GPU}.states", "RequestState.remove_request", ("req_id",), why="replaced likewise", releases="<0.31"),
    Symbol(f"{GPU}.states", "RequestState.req_id_to_index", releases="<0.31"),
    Symbol(f"{GPU}.states", "RequestState.prefill_len", why="tells which drafts nobody can use"),
    Symbol(f"{GPU}.states", "RequestState.max_seq_len", why="tells it too", releases=">=0.23"),
    Symbol(f"{GPU}.states", "RequestState.max_num_reqs", releases="<0.31"),
    Symbol(f"{GPU}.states", "RequestState.all_token_ids", why="the texts in which drafts are looked up"),
    Symbol(f"{GPU}.states", "RequestState.total_len", why="their lengths"),
    *(Symbol(f"{GPU}.buffer_utils", f"StagedWriteTensor.{name}") for name in ("gpu", "dtype", "device")),
    Symbol(f"{GPU}.buffer_utils", "StagedWriteTensor._uva_buf", why="there where a tensor is in the host's memory"),
    *(Symbol(f"{GPU}.sample.states", f"SamplingStates.{name}") for name in ("top_k", "top_p")),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.needs_capture", ()),
    Symbol(f"{GPU}.cudagraph_utils", "BatchExecutionDescriptor.uniform_token_count"),
    Symbol(
        "vllm.v1.attention.backend",
        "AttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
        why="says whether draft decodes can have graphs",
    ),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.get_metadata_builder", ("ubatch_id",)),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.kv_cache_spec"),
    Symbol("vllm.v1.worker.utils", "AttentionGroup.backend", why="named in the start-up warnings"),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.cudagraph_mode", why="named in the start-up line"),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager._capture_descs", why="says which graphs there will be"),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager._init_candidates", (), why="wrapped for graphs of more lengths"),
    *(
        Symbol(f"{GPU}.cudagraph_utils", f"CudaGraphManager.{name}", why="read and written there")
        for name in ("vllm_config", "compilation_config", "decode_query_len", "max_num_reqs", "_candidates")
    ),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.graphs", why="says which graphs there are"),
    Symbol(_SCHEDULER, "Scheduler.schedule", (), why="wrapped to pad new decodes", releases=">=0.25"),
    Symbol(
        _SCHEDULER, "Scheduler._update_after_schedule", ("scheduler_output",), why="wrapped to choose draft lengths"
    ),
    Symbol(
        _SCHEDULER,
        "Scheduler.update_from_output",
        ("scheduler_output", "model_runner_output"),
        why="wrapped to learn from outcomes",
    ),
    *(Symbol(_SCHEDULER, f"Scheduler.{name}") for name in ("vllm_config", "requests", "num_spec_tokens")),
    *(
        Symbol("vllm.v1.core.sched.output", f"SchedulerOutput.{name}")
        for name in ("num_scheduled_tokens", "scheduled_spec_decode_tokens", "scheduled_new_reqs")
    ),
    Symbol(
        "vllm.v1.core.sched.output",
        "SchedulerOutput.num_spec_tokens_to_schedule",
        why="the number of draft tokens",
        releases=">=0.24",
    ),
    Symbol("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._spec_token_placeholders", why="replaced"),
    *(Symbol("vllm.v1.request", f"Request.{name}") for name in ("num_computed_tokens", "num_tokens")),
    *(Symbol("vllm.v1.outputs", f"ModelRunnerOutput.{name}") for name in ("sampled_token_ids", "req_id_to_index")),
    Symbol(
        f"{GPU}.model_runner",
        "GPUModelRunner.prepare_inputs",
        why="wrapped to hand on the number of draft tokens",
        releases="<0.32",
    ),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.capture", ("create_forward_fn", "progress_bar_desc")),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.run_fullgraph", ("desc",)),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.pool"),
    Symbol(f"{GPU}.cudagraph_utils", "BatchExecutionDescriptor", ("cg_mode", "num_tokens", "num_reqs")),
    Symbol(
        f"{GPU}.cudagraph_utils",
        "CudaGraphManager.__init__",
        ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
    ),
    Symbol(
        f"{GPU}.attn_utils",
        "build_attn_metadata",
        words(
            "attn_groups num_reqs num_tokens query_start_loc_gpu query_start_loc_cpu max_query_len "
            "seq_lens max_seq_len block_tables slot_mappings kv_cache_config seq_lens_cpu_upper_bound"
        ),
    ),
    Symbol(f"{GPU}.attn_utils", "build_slot_mappings_by_layer", ("slot_mappings", "kv_cache_config")),
    Symbol(
        f"{GPU}.block_table",
        "BlockTables.compute_slot_mappings",
        ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded"),
    ),
    Symbol(f"{GPU}.block_table", "BlockTables.get_dummy_slot_mappings", ("num_tokens",)),
    Symbol(f"{GPU}.block_table", "BlockTables.input_block_tables"),
    *(
        Symbol(f"{GPU}.block_table", f"BlockTables.{name}", why="read or written for the next step's slots")
        for name in ("slot_mappings", "block_tables", "block_sizes_tensor", "num_kv_cache_groups", "cp_size")
    ),
    Symbol(f"{GPU}.block_table", "BlockTables.kernel_block_sizes", releases=">=0.22,<0.32"),
    *(Symbol(f"{GPU}.input_batch", f"InputBatch.{name}") for name in _INPUT_BATCH),
    Symbol("vllm.config.compilation", "CUDAGraphMode.decode_mode"),
)

# From 0.23 on: speculators with a draft model have a common base class.
DRAFT_MODEL: tuple[Symbol, ...] = (
    *EVERYWHERE,
    *(Symbol(SPECULATOR, f"DraftModelSpeculator.{name}", why="read or replaced by us") for name in STOCK_ATTRIBUTES),
    Symbol(SPECULATOR, "DraftModelSpeculator.draft_max_seq_len"),
    Symbol(SPECULATOR, "DraftModelSpeculator.load_model", ("target_model",)),
    Symbol(SPECULATOR, "DraftModelSpeculator._prepare_eplb_forward", ("num_unpadded_tokens",), releases=">=0.25"),
    Symbol(f"{GPU}.cudagraph_utils", "CudaGraphManager.init_breakable_cg_runner", ("model",)),
    Symbol(f"{GPU}.spec_decode.eagle.speculator", "EagleSpeculator"),
    Symbol(f"{GPU}.spec_decode.mtp.speculator", "MTPSpeculator"),
)

# From 0.26 on: vLLM passes the target's metadata builders and buffers to the speculator.
COMMON: tuple[Symbol, ...] = (
    *DRAFT_MODEL,
    Symbol(
        SPECULATOR,
        "DraftModelSpeculator.set_attn",
        ("model_state", "kv_cache_config", "block_tables", "target_input_buffers", "target_attn_groups"),
        why="gives the target's builders and buffers",
    ),
    Symbol(SPECULATOR, "DraftModelSpeculator.target_input_buffers"),
    Symbol(SPECULATOR, "DraftModelSpeculator.target_attn_groups"),
)

DISPATCH = ("cudagraph_manager", "num_reqs", "num_tokens", "uniform_token_count", "dp_size", "dp_rank", "need_eager")
CAPTURE_INPUTS = words("num_reqs num_tokens model_state input_buffers block_tables attn_groups kv_cache_config")

# Below 0.28: the host builds attention metadata between steps (releases/per_step.py).
PER_STEP: tuple[Symbol, ...] = (
    Symbol(f"{GPU}.spec_decode", "init_speculator", ("vllm_config", "device")),
    Symbol(f"{GPU}.cudagraph_utils", "prepare_inputs_to_capture", CAPTURE_INPUTS, releases="<0.21"),
    Symbol(
        f"{GPU}.cudagraph_utils", "prepare_inputs_to_capture", (*CAPTURE_INPUTS, "skip_attn"), releases=">=0.22,<0.27"
    ),
    Symbol(
        f"{GPU}.cudagraph_utils", "prepare_inputs_to_capture", (*CAPTURE_INPUTS, "full_cudagraph"), releases=">=0.27"
    ),
    Symbol(f"{GPU}.cudagraph_utils", "get_uniform_token_count", ("num_reqs", "num_tokens", "max_query_len")),
    Symbol(f"{GPU}.dp_utils", "dispatch_cg_and_sync_dp", DISPATCH),
    Symbol(
        "vllm.v1.worker.gpu_worker",
        "Worker.sleep",
        ("level",),
        why="wrapped to keep the draft's buffers",
        releases="<0.27",
    ),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",), why="wrapped there too", releases="<0.27"),
    Symbol(
        "vllm.v1.spec_decode.dynamic.utils",
        "build_dynamic_sd_schedule_lookup",
        ("num_speculative_tokens_per_batch_size", "vllm_max_batch_size", "vllm_num_speculative_tokens"),
        why="dynamic numbers of draft tokens",
        releases=">=0.25",
    ),
    Symbol(
        f"{GPU}.spec_decode.utils",
        "DraftTokensHandler.set_draft_tokens",
        ("input_batch", "draft_tokens"),
        why="wrapped to report what was drafted",
    ),
)

# Below 0.26: the target's metadata builders and buffers come from the runner (patches/model_runner.py).
TARGET_INPUTS: tuple[Symbol, ...] = (
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.speculator"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.input_buffers"),
    Symbol(f"{GPU}.model_runner", "GPUModelRunner.attn_groups"),
)

# Below 0.23: one speculator class for all families (releases/monolith.py).
_EAGLE = f"{GPU}.spec_decode.eagle.speculator"
MONOLITH: tuple[Symbol, ...] = (
    *EVERYWHERE,
    *PER_STEP,
    *TARGET_INPUTS,
    *(Symbol(_EAGLE, f"EagleSpeculator.{name}", why="read or replaced by us") for name in STOCK_ATTRIBUTES),
    Symbol(_EAGLE, "EagleSpeculator.propose", PROPOSE),
    Symbol(_EAGLE, "EagleSpeculator.load_model", ("target_model",)),
    Symbol(_EAGLE, "EagleSpeculator.run_model", RUN_MODEL),
    Symbol(_EAGLE, "EagleSpeculator.set_attn", ("model_state", "kv_cache_config", "block_tables")),
    Symbol(_EAGLE, "EagleSpeculator.init_cudagraph_manager", ("cudagraph_mode",)),
)
