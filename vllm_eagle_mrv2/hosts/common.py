"""What the speculators of all hosts share: the draft loop joined to a stock speculator.

`StockHost` is mixed in before a stock speculator class.  It imports nothing of vLLM's private modules; what it touches
are attributes of the stock class, and those stand in the hosts' lists of needed symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from vllm_eagle_mrv2 import __version__
from vllm_eagle_mrv2.behaviours import Behaviour
from vllm_eagle_mrv2.buffers import DraftBatch, DraftBuffers
from vllm_eagle_mrv2.cudagraph import CapturedAttentionState, DecodeCapture, PrefillCapture, decode_mode
from vllm_eagle_mrv2.errors import EagleMRV2Error
from vllm_eagle_mrv2.hosts.spec import Host
from vllm_eagle_mrv2.method import request_of
from vllm_eagle_mrv2.speculator import DraftConfig, DraftHost, DraftLoop, GraphRun


class StockHost:
    """The `DraftHost` of a stock speculator, as far as the releases agree."""

    host: Host
    sample_offset: int
    """What the release's sampler takes as position: the last token's (0), or the one after it (1)."""
    prefill_manager_class: type[PrefillCapture]
    decode_manager_class: type[DecodeCapture]

    # Attributes and methods of the stock speculator.
    vllm_config: Any
    device: torch.device
    model: torch.nn.Module
    method: str
    model_state: Any
    kv_cache_config: Any
    block_tables: Any
    attn_groups: Any
    target_input_buffers: Any
    target_attn_groups: Any
    input_buffers: Any
    temperature: torch.Tensor
    seeds: torch.Tensor
    draft_logits: torch.Tensor | None
    current_draft_step: torch.Tensor
    draft_max_seq_len: int
    dp_size: int
    dp_rank: int
    max_model_len: int
    max_num_reqs: int
    num_speculative_steps: int
    _run_model: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    _prepare_eplb_forward: Callable[[int], None]

    prefill_cudagraph_manager: Any
    decode_cudagraph_manager: Any

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        request = request_of(vllm_config.speculative_config)
        if request is None:
            raise EagleMRV2Error(
                f"{type(self).__name__} was made for a configuration without method=eagle_mrv2; "
                "ask for it in the speculative configuration."
            )
        self.request = request
        self.options = request.options
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        stock: Any = self
        self.loop = DraftLoop(
            cast(DraftHost, self),  # a release's subclass completes it
            DraftConfig(
                num_draft_tokens=self.num_speculative_steps,
                max_model_len=self.max_model_len,
                sample_offset=self.sample_offset,
                options=self.options,
            ),
            DraftBuffers(
                input_ids=self.input_buffers.input_ids,
                positions=self.input_buffers.positions,
                query_start_loc=self.input_buffers.query_start_loc,
                seq_lens=self.input_buffers.seq_lens,
                idx_mapping=stock.idx_mapping,
                temperature=self.temperature,
                seeds=self.seeds,
                hidden_states=stock.hidden_states,
                last_token_indices=stock.last_token_indices,
                sample_positions=torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device),
                draft_tokens=stock.draft_tokens,
                draft_step=self.current_draft_step,
            ),
        )
        self._announced = False

    # Graphs

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Make the graph managers, given the target's mode; vLLM may call this again after dropping them."""
        draft_decode_mode = decode_mode(
            cudagraph_mode, full_decode_only=self.options.enabled(Behaviour.FULL_DECODE_ONLY)
        )
        manager: Any = self.prefill_manager_class
        self.prefill_cudagraph_manager = manager(
            self.vllm_config, self.device, cudagraph_mode, self.num_speculative_steps + 1
        )
        manager = self.decode_manager_class
        self.decode_cudagraph_manager = manager(self.vllm_config, self.device, draft_decode_mode, decode_query_len=1)
        if not self._announced:
            self._announced = True
            self._announce(cudagraph_mode, draft_decode_mode)

    def _announce(self, prefill_mode: Any, draft_decode_mode: Any) -> None:
        import vllm
        from vllm.logger import init_logger

        supplied = sorted(behaviour.value for behaviour in Behaviour if behaviour not in self.host.stock)
        disabled = sorted(behaviour.value for behaviour in self.options.disable)
        logits = "none, greedy"
        if self.draft_logits is not None:
            size = self.draft_logits.numel() * self.draft_logits.element_size() / 2**20
            logits = f"{str(self.draft_logits.dtype).removeprefix('torch.')}, {size:.1f} MiB"
        init_logger("vllm.eagle_mrv2").info(
            "eagle_mrv2 %s drafts on vLLM %s: host %s, family %s, K=%d, draft prefill graphs %s, "
            "draft decode graphs %s, draft logits %s, supplied beyond this release: %s%s",
            __version__,
            vllm.__version__,
            self.host.name,
            self.request.family,
            self.num_speculative_steps,
            prefill_mode.name,
            draft_decode_mode.name,
            logits,
            ", ".join(supplied) or "nothing",
            f", disabled: {', '.join(disabled)}" if disabled else "",
        )

    def capture(self) -> None:
        """Capture the draft's graphs; every pass gets fresh dummy inputs."""
        prefill, decode = self.prefill_cudagraph_manager, self.decode_cudagraph_manager
        if prefill.use_breakable_cg:
            prefill.init_breakable_cg_runner(self.model)
        reuse_target = self.options.enabled(Behaviour.TARGET_METADATA_REUSE)
        # At run time the draft prefill reads what the target's builders wrote, so its graphs are captured on that.
        buffers = self.target_input_buffers if reuse_target else self.input_buffers
        groups = self.target_attn_groups if reuse_target else self.attn_groups
        stock: Any = self
        stock.on_prefill_begin(self.max_num_reqs)
        prefill.capture_fresh(
            self.loop.prefill,
            lambda descriptor: self._dummy_inputs(prefill, descriptor, buffers, groups, step=0),
            "Capturing draft prefill CUDA graphs",
        )
        stock.on_prefill_end(self.max_num_reqs)
        if self.num_speculative_steps == 1:
            return
        stock.on_multi_step_decode_begin(self.max_num_reqs)
        self._capture_decodes(
            decode,
            lambda descriptor: self._dummy_inputs(decode, descriptor, self.input_buffers, self.attn_groups, step=1),
        )
        stock.on_multi_step_decode_end(self.max_num_reqs)

    def _capture_decodes(self, manager: Any, make_inputs: Callable[[Any], CapturedAttentionState]) -> None:
        manager.capture_fresh(
            self.loop.decode_all if self.refreshes_in_graph else self.loop.decode,
            make_inputs,
            "Capturing draft decode CUDA graphs",
            lambda descriptor: {"num_draft_tokens": self.num_speculative_steps},
        )

    def _dummy_inputs(
        self, manager: Any, descriptor: Any, input_buffers: Any, attn_groups: Any, step: int
    ) -> CapturedAttentionState:
        self.loop.reset_for_capture(step)
        num_tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or min(num_tokens, self.max_num_reqs)
        attn_metadata, slot_mappings = self.prepare_capture(
            manager, descriptor, num_reqs, num_tokens, input_buffers, attn_groups
        )
        across_dp = None
        if self.dp_size > 1:
            across_dp = torch.full((self.dp_size,), num_tokens, dtype=torch.int32)
        return CapturedAttentionState(num_reqs, num_tokens, attn_metadata, slot_mappings, across_dp)

    def prepare_capture(
        self, manager: Any, descriptor: Any, num_reqs: int, num_tokens: int, input_buffers: Any, attn_groups: Any
    ) -> tuple[Any, Any]:
        """Dummy attention metadata and slot mappings through the given builders and buffers."""
        raise NotImplementedError

    # DraftHost, where all releases agree

    @property
    def refreshes_in_graph(self) -> bool:
        """No release before 0.28 has a refresh that a graph can hold."""
        return False

    def begin_prefill(self, batch: DraftBatch) -> tuple[int, int]:
        return batch.num_tokens, batch.num_tokens_padded

    def begin_decode(self, batch: DraftBatch) -> None:
        """Nothing to do."""

    def before_forward(self, num_tokens: int) -> None:
        self._prepare_eplb_forward(num_tokens)

    def run_draft_model(
        self,
        num_tokens: int,
        attn_metadata: Any,
        slot_mappings: Any,
        num_tokens_across_dp: Any,
        mode: Any,
        mm_inputs: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run_model(num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, mode, mm_inputs)

    def sample(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, idx_mapping: torch.Tensor, keep_logits: bool
    ) -> torch.Tensor:
        stock: Any = self
        sampled: torch.Tensor = stock.sample_draft(
            hidden_states,
            positions,
            idx_mapping,
            self.temperature,
            self.seeds,
            self.current_draft_step,
            self.draft_logits if keep_logits else None,
        )
        return sampled

    def replay_prefill(self, run: GraphRun) -> None:
        self.prefill_cudagraph_manager.run_fullgraph(run.descriptor)

    def replay_decode(self, run: GraphRun) -> None:
        self.decode_cudagraph_manager.run_fullgraph(run.descriptor)

    def prepare_fused_replay(self) -> None:
        """Nothing to do."""

    def refresh_decode_metadata(self, num_reqs: int, num_tokens: int, attn_metadata: Any) -> None:
        raise NotImplementedError("this release has no refresh that a graph can hold")

    def _draft_hidden_states(
        self, last_hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> torch.Tensor:
        """[n, H] states that the draft starts from; EAGLE-3 combines those of several target layers."""
        if not aux_hidden_states:
            return last_hidden_states
        draft: Any = self.model
        combined: torch.Tensor = draft.combine_hidden_states(torch.cat(aux_hidden_states, dim=-1))
        return combined
