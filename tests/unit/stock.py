"""Stand-ins for what vLLM gives to this package."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from vllm_eagle_mrv2.config.method import Settings
from vllm_eagle_mrv2.config.options import Options
from vllm_eagle_mrv2.drafting.capture import AskedGraphs
from vllm_eagle_mrv2.drafting.drafter import Drafter
from vllm_eagle_mrv2.releases import installed_release
from vllm_eagle_mrv2.releases.adapter import ReleaseAdapter

K = 4
MAX_NUM_REQS = 8
MAX_LEN = 64  # max_model_len
ASKED = AskedGraphs(None, None, None)
HOOKS = ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end")


def stock_speculator(
    *, device: str = "cpu", schedule: Any = None, parallel: dict[str, Any] | None = None, **changed: Any
) -> Any:
    """vLLM's speculator after its ``__init__``, as adapters, graphs and drafters look at it.

    Args:
        device: of the buffers.
        schedule: ``num_speculative_tokens_per_batch_size``.
        parallel: changes to the ``ParallelConfig`` of one rank.
        changed: changed or further attributes.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    ranks = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_index": 0,
        "data_parallel_rank_local": None,
        "enable_eplb": False,
    }
    draft = SimpleNamespace(
        num_speculative_tokens=K, num_speculative_tokens_per_batch_size=schedule, attention_backend=None
    )
    attributes = {
        "device": torch.device(device),
        "vllm_config": SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
            cache_config=SimpleNamespace(block_size=16),
            parallel_config=SimpleNamespace(**{**ranks, **(parallel or {})}),
            compilation_config=SimpleNamespace(
                cudagraph_mode=None, cudagraph_capture_sizes=None, max_cudagraph_capture_size=None
            ),
            speculative_config=draft,
            additional_config={"eagle_mrv2": {}},
        ),
        "speculative_config": draft,
        "num_speculative_steps": K,
        "max_num_reqs": MAX_NUM_REQS,
        "max_model_len": MAX_LEN,
        "dp_size": 1,
        "dp_rank": 0,
        "draft_logits": None,
        "use_fp64_gumbel": False,
        "input_buffers": SimpleNamespace(
            input_ids=zeros(16, dtype=torch.int32),
            positions=zeros(16),
            query_start_loc=torch.arange(MAX_NUM_REQS + 1, dtype=torch.int32, device=device),
            seq_lens=zeros(MAX_NUM_REQS, dtype=torch.int32),
        ),
        "idx_mapping": torch.arange(MAX_NUM_REQS, dtype=torch.int32, device=device),
        "temperature": zeros(MAX_NUM_REQS, dtype=torch.float32),
        "seeds": zeros(MAX_NUM_REQS),
        "hidden_states": zeros(16, 2, dtype=torch.float32),
        "last_token_indices": zeros(MAX_NUM_REQS),
        "draft_tokens": zeros(MAX_NUM_REQS, K),
        "attn_groups": [],
        "block_tables": SimpleNamespace(num_kv_cache_groups=2, cp_size=1),
        "kv_cache_config": None,
        "use_fused_multi_step_decode": False,  # of 0.28 to 0.31
        "supports_decode_metadata_update": False,  # from 0.32 on
    }
    return SimpleNamespace(**dict.fromkeys(HOOKS, lambda num_reqs: None), **{**attributes, **changed})


def installed_adapter() -> type[ReleaseAdapter]:
    """The adapter of the installed vLLM."""
    adapter: type[ReleaseAdapter] = importlib.import_module(installed_release().adapter).Adapter
    return adapter


def drafter_on(
    stock: Any,
    adapter_class: type[ReleaseAdapter] | None = None,
    *,
    options: Options | None = None,
    asked: AskedGraphs = ASKED,
    enforce_eager: bool = False,
) -> Drafter:
    """The drafter of a speculator, on the installed vLLM unless another adapter is given."""
    settings = Settings("eagle", options or Options(), enforce_eager=enforce_eager)
    return Drafter(stock, adapter_class or installed_adapter(), settings, asked)
