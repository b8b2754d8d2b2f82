"""The inventory of everything in vLLM that this package replaces, and the functions that apply the patches.

A patch names its target and its wrapper as text, so that loading the plugin does not import vLLM.  For an engine
without ``eagle_mrv2`` each wrapper calls the original.  ``vllm-eagle-mrv2 doctor --patches`` prints the inventory.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import wrapt
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_eagle_mrv2.patches.wrap import original_of, wrap

_HERE = "vllm_eagle_mrv2.patches"
_GPU = "vllm.v1.worker.gpu"
_RUNNER = f"{_GPU}.model_runner:GPUModelRunner"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"


class Scope(Enum):
    """The processes or objects that a patch applies to; the values are for display."""

    PLUGIN = "every process that loads the plugin"
    ENGINE = "a process that an engine for eagle_mrv2 is configured in"
    WORKER = "a worker that drafts with eagle_mrv2"
    SCHEDULER = "an engine core that chooses the number of draft tokens"
    DRAFT = "the draft model of such a worker, as an object"


@dataclass(frozen=True)
class Patch:
    """One replaced function or attribute of vLLM or another library."""

    target: str
    """``module:attribute`` in vLLM or another library, or a phrase if the patch changes an object."""
    by: str
    """``module:function`` in this package: the wrapper, or what makes the change."""
    scope: Scope
    what: str
    why: str
    until: str
    """The upstream change that would make the patch unnecessary."""
    releases: str = ""
    """The releases of vLLM that need it, as a version specifier; empty for all."""

    @property
    def wraps(self) -> bool:
        """Whether the target is a function that `put_in_place` wraps."""
        return ":" in self.target and self.scope is not Scope.DRAFT

    def needed_on(self, version: Version) -> bool:
        """Whether a vLLM release needs the patch."""
        return version in SpecifierSet(self.releases)

    def found(self) -> Any:
        """Import the target and return it as it is now; None if this vLLM lacks it."""
        owner, name = self._owner_and_name()
        return original_of(getattr(owner, name, None))

    def put_in_place(self) -> None:
        """Import the target's module and wrap the target, at most once."""
        module, _, function = self.by.partition(":")
        wrap(*self._owner_and_name(), getattr(importlib.import_module(module), function))

    def _owner_and_name(self) -> tuple[Any, str]:
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each, None)
        return owner, name


PATCHES: tuple[Patch, ...] = (
    # The method in the configuration
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        f"{_HERE}.engine_args:translated_first",
        Scope.PLUGIN,
        "translates method=eagle_mrv2 before vLLM's own checks, and offers the metrics",
        "vLLM's schema admits no method of a plugin",
        "a registry of speculative methods",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        f"{_HERE}.engine_args:settings_attached",
        Scope.PLUGIN,
        "attaches the settings to the speculative configuration, and checks the head against the target",
        "the configuration is the one thing that reaches every process of an engine",
        "a registry of speculative methods",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        f"{_HERE}.engine_args:parser_taught",
        Scope.PLUGIN,
        "lets the command line take method=eagle_mrv2,... and --spec-method eagle_mrv2",
        "vLLM's parser takes JSON and its own names",
        "a registry of speculative methods",
    ),
    Patch(
        "vllm.config.vllm:VllmConfig.use_v2_model_runner",
        f"{_HERE}.engine_args:always_v2",
        Scope.PLUGIN,
        "is true for an engine that asked for eagle_mrv2",
        "vLLM picks Model Runner V2 by model and platform",
        "Model Runner V2 as the only runner",
        releases=">=0.22",
    ),
    Patch(
        "vllm.config.vllm:VllmConfig._validate_v2_model_runner",
        f"{_HERE}.engine_args:limits_in_our_words",
        Scope.PLUGIN,
        "refuses what Model Runner V2 does not serve in a sentence that names eagle_mrv2",
        "vLLM's own message advises a variable that an engine for eagle_mrv2 cannot use",
        "Model Runner V2 as the only runner",
    ),
    Patch(
        "vllm.config.vllm:VllmConfig._set_cudagraph_sizes",
        f"{_HERE}.engine_args:prefills_captured",
        Scope.PLUGIN,
        "captures batches of up to 2,048 tokens for an engine with eagle_mrv2, unless the user gives sizes",
        "vLLM captures up to 512, and the GPU waits for the launch of larger batches",
        "larger captured sizes by default",
    ),
    Patch(
        f"{_GPU}.spec_decode:init_speculator",
        f"{_HERE}.speculator:our_speculator",
        Scope.PLUGIN,
        "makes this package's speculator for a configuration with its settings",
        "vLLM's runner knows its own speculators only",
        "a registry of speculators",
    ),
    Patch(
        f"{_GPU}.model_runner:init_speculator",
        f"{_HERE}.speculator:our_speculator",
        Scope.PLUGIN,
        "the same function under the name that the runner imported",
        "an earlier import keeps the original",
        "a registry of speculators",
    ),
    Patch(
        "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
        f"{_HERE}.worker_check:workers_asked",
        Scope.PLUGIN,
        "asks every worker what it drafts with before the KV cache is made, and then how long its CUDA graphs take",
        "a worker without the plugin would draft with stock's speculator, unnoticed",
        "a registry of speculators",
    ),
    Patch(
        "sys.excepthook",
        f"{_HERE}.last_line:install",
        Scope.PLUGIN,
        "prints a refusal of this package as the one last line of a vllm command",
        "the sentence would stand below a traceback",
        "vLLM printing configuration errors without a traceback",
    ),
    Patch(
        "prometheus_client.multiprocess:MultiProcessCollector.collect",
        f"{_HERE}.metrics:drafts_added",
        Scope.ENGINE,
        "adds the drafts' metrics to what several API servers show together",
        "each request there has a registry of its own",
        "metrics of plugins in vLLM's registry",
    ),
    # The target's runner and worker
    Patch(
        f"{_RUNNER}.load_model",
        f"{_HERE}.model_runner:without_unread_states",
        Scope.WORKER,
        "spares the target auxiliary hidden states that the head does not take; counts the texts of lookup_drafts",
        "below 0.33 the runner returns them for every EAGLE-3 head, and below 0.27 memory made before is not counted",
        "nothing: 0.33 does both",
        releases="<0.33",
    ),
    Patch(
        f"{_RUNNER}.__init__",
        f"{_HERE}.texts:texts_on_device",
        Scope.PLUGIN,
        "keeps the requests' tokens in the device's memory (lookup_drafts)",
        "vLLM keeps them in the host's memory",
        "an option that keeps them on the device, as 0.32 has for its own n-gram method",
    ),
    Patch(
        f"{_RUNNER}.initialize_kv_cache",
        f"{_HERE}.model_runner:states_handed_over",
        Scope.WORKER,
        "hands the speculator the requests' states, sampling parameters and the target's graph manager",
        "vLLM hands them to no speculator, and only from 0.26 on the target's buffers (#48261)",
        "vLLM passing its runner's states to the speculator",
    ),
    Patch(
        f"{_RUNNER}.capture_model",
        f"{_HERE}.model_runner:draft_captured",
        Scope.WORKER,
        "captures the draft decodes of a target that has no graphs itself",
        "the runner does not ask the speculator then",
        "capture of the draft apart from the target's",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker:warmup_kernels",
        f"{_HERE}.model_runner:warm_up_forgotten",
        Scope.WORKER,
        "forgets vLLM's made-up requests in the counters",
        "they are no dummy runs",
        "dummy runs in vLLM's warm-up",
    ),
    Patch(
        "vllm.v1.worker.gpu.warmup:warmup_kernels",
        f"{_HERE}.model_runner:warm_up_forgotten",
        Scope.WORKER,
        "the same function under the name that a CPU's worker imports",
        "they are no dummy runs",
        "dummy runs in vLLM's warm-up",
        releases=">=0.33",
    ),
    Patch(
        f"{_RUNNER}.post_kv_cache_wake_up",
        f"{_HERE}.model_runner:tables_in_place",
        Scope.WORKER,
        "writes the block tables made at a wake-up where the old ones lie",
        "captured graphs hold the addresses of the old ones",
        "nothing: 0.29 keeps the tables",
        releases=">=0.22,<0.29",
    ),
    Patch(
        f"{_WORKER}.sleep",
        f"{_HERE}.sleep:buffers_saved",
        Scope.WORKER,
        "keeps the draft's buffers on the CPU through a level-2 sleep (#49774)",
        "vLLM keeps the target's alone",
        "nothing: 0.27 keeps both",
        releases="<0.27",
    ),
    Patch(
        f"{_WORKER}.wake_up",
        f"{_HERE}.sleep:buffers_restored",
        Scope.WORKER,
        "brings them back",
        "vLLM keeps the target's alone",
        "nothing: 0.27 keeps both",
        releases="<0.27",
    ),
    Patch(
        f"{_WORKER}.reload_weights",
        f"{_HERE}.weight_updates:copies_renewed",
        Scope.WORKER,
        "copies and rounds the rows of the draft's head again",
        "draft_vocab and draft_quantization keep copies of the head's rows",
        "a hook for speculators after new weights",
    ),
    Patch(
        f"{_WORKER}.update_weights",
        f"{_HERE}.weight_updates:copies_renewed",
        Scope.WORKER,
        "copies and rounds the rows of the draft's head again",
        "draft_vocab and draft_quantization keep copies of the head's rows",
        "a hook for speculators after new weights",
        releases="<0.22",
    ),
    Patch(
        f"{_WORKER}.finish_weight_update",
        f"{_HERE}.weight_updates:copies_renewed",
        Scope.WORKER,
        "copies and rounds the rows of the draft's head again",
        "draft_vocab and draft_quantization keep copies of the head's rows",
        "a hook for speculators after new weights",
        releases=">=0.22",
    ),
    Patch(
        f"{_GPU}.spec_decode.utils:DraftTokensHandler.set_draft_tokens",
        f"{_HERE}.draft_tokens:drafted_columns_only",
        Scope.WORKER,
        "reports the drafted columns only where the number of draft tokens varies (#51510)",
        "the scheduler would verify what an earlier batch left, and sampled output would be biased",
        "nothing: 0.32 reports them",
        releases="<0.32",
    ),
    # A number of draft tokens that is chosen at run time
    Patch(
        f"{_SCHEDULER}.schedule",
        f"{_HERE}.draft_length:padded_as_verified",
        Scope.SCHEDULER,
        "pads new decodes to as many tokens as the others verify (draft_length)",
        "vLLM pads them to the largest number",
        "a scheduler that asks a policy for the number",
        releases=">=0.25",
    ),
    Patch(
        f"{_SCHEDULER}._update_after_schedule",
        f"{_HERE}.draft_length:number_chosen",
        Scope.SCHEDULER,
        "chooses the number of draft tokens and notes it in the output (draft_length)",
        "vLLM has a constant, or from 0.25 on a table by number of requests",
        "a scheduler that asks a policy for the number",
    ),
    Patch(
        f"{_SCHEDULER}.update_from_output",
        f"{_HERE}.draft_length:outcome_learned",
        Scope.SCHEDULER,
        "learns how many drafts were accepted and how long the iteration took (draft_length)",
        "the choice depends on both",
        "a scheduler that asks a policy for the number",
    ),
    Patch(
        f"{_RUNNER}.prepare_inputs",
        f"{_HERE}.draft_length:plan_passed_on",
        Scope.WORKER,
        "hands the scheduler's number of draft tokens to the speculator (draft_length)",
        "below 0.32 the speculator is not told",
        "nothing: 0.32 tells it",
        releases="<0.32",
    ),
    Patch(
        f"{_GPU}.cudagraph_utils:CudaGraphManager._init_candidates",
        f"{_HERE}.draft_length:graphs_of_every_length",
        Scope.WORKER,
        "adds FULL graphs for batches that verify fewer drafts than the maximum (draft_length)",
        "vLLM has them from 0.25 on for its own table, and not for every batch size",
        "a scheduler that asks a policy for the number",
    ),
    Patch(
        f"{_GPU}.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
        f"{_HERE}.hybrid_lengths:bounded_by_batch",
        Scope.WORKER,
        "gives hybrid targets the batch's own maximum length (#43991)",
        "vLLM gives max_model_len",
        "nothing: 0.23 gives the batch's",
        releases=">=0.22,<0.23",
    ),
    # The draft model
    Patch(
        "quant_method of the draft's own unquantized layers",
        "vllm_eagle_mrv2.draft_model.linear:install",
        Scope.DRAFT,
        "multiplies few rows at the speed of memory (row_products), rounds loaded weights (draft_quantization)",
        "a cuBLAS product of one row reads weights slower",
        "a GEMV in vLLM's unquantized layers",
    ),
    Patch(
        "impl.forward and rotary_emb of the draft's attention layers",
        "vllm_eagle_mrv2.draft_model.attention:install",
        Scope.DRAFT,
        "attends, applies RoPE and writes the cache in one kernel (single_token_attention)",
        "vLLM launches six",
        "such a kernel upstream",
    ),
    Patch(
        "forward and _gather_logits of the draft's own LogitsProcessor",
        "vllm_eagle_mrv2.draft_model.logits_processor:DraftLogits",
        Scope.DRAFT,
        "leaves each rank its shard, multiplies few rows by row_products, and takes a copy of the head that is trimmed "
        "(draft_vocab) or rounded (draft_quantization)",
        "vLLM makes rows of the whole vocabulary on every rank",
        "draft heads of their own upstream",
    ),
    Patch(
        "compute_logits of a draft whose logits are stored",
        "vllm_eagle_mrv2.releases.adapter:ReleaseAdapter",
        Scope.DRAFT,
        "honours the requests' top-k and top-p (draft_top_k_top_p), and from 0.32 on gives logits the stored dtype",
        "vLLM drafts from every token of the vocabulary",
        "draft sampling with top-k and top-p",
    ),
    Patch(
        "embed_tokens, lm_head, _embed_text_input_ids and backends of the draft while it loads",
        "vllm_eagle_mrv2.releases.draft_loading:repaired",
        Scope.DRAFT,
        "supplies what later releases mended in the loading of a draft (#47914, #48700, #54788, #54826, #57630)",
        "these releases lack it",
        "nothing: 0.32 has all of it",
        releases="<0.32",
    ),
    Patch(
        "aot_schedule of the draft's metadata builders",
        "vllm_eagle_mrv2.releases.adapter:ReleaseAdapter",
        Scope.DRAFT,
        "is off where the kernel of this package attends",
        "FlashAttention's schedule would be made and not read",
        "a draft's own attention backend",
    ),
    Patch(
        "scheduler_metadata of the draft's metadata builders during a capture",
        "vllm_eagle_mrv2.releases.per_step:PerStepAdapter",
        Scope.DRAFT,
        "keeps a schedule in the memory of the graph",
        "the builder's buffer would add a copy and a fill at every draft step",
        "nothing: 0.28 builds none in a graph",
        releases="<0.28",
    ),
    Patch(
        "build of FlashAttention's metadata builders",
        f"{_HERE}.attention_splits:split_decodes_alone",
        Scope.WORKER,
        "provides for split keys only where vLLM's own captured sizes would, and in decodes",
        "vLLM provides for 32 partial results of each token in all batches of up to the largest captured size",
        "split keys in FULL graphs alone",
    ),
    Patch(
        "add_request of the target's sampler",
        f"{_HERE}.model_runner:keep_longest_lengths",
        Scope.WORKER,
        "notes where each request ends (skip_unused_drafts)",
        "the runner's states lack it below 0.23",
        "nothing: 0.23 keeps max_seq_len",
        releases="<0.23",
    ),
    Patch(
        "add_request of the target's request states",
        f"{_HERE}.model_runner:draft_placeholders",
        Scope.WORKER,
        "has the stored draft logits of a new request propose token 0, which fills the place of its drafts",
        "below 0.31 the placeholders of a request that begins with one token are verified by what another one left",
        "nothing: 0.31 does not verify them",
        releases=">=0.25,<0.31",
    ),
    Patch(
        "add_request and remove_request of the target's request states",
        f"{_HERE}.model_runner:mark_sessions",
        Scope.WORKER,
        "notes which requests got further input, as in sessions of streaming input (skip_unused_drafts)",
        "below 0.31 the scheduler ends them by other max_tokens than the runner has",
        "nothing: 0.31 has the same",
        releases="<0.31",
    ),
)


_installed = False


def install() -> None:
    """Register the patches of scope PLUGIN, once; those whose module is already imported take effect now."""
    global _installed
    if _installed:
        return
    _installed = True
    from vllm_eagle_mrv2.patches import last_line

    last_line.install()
    for patch in PATCHES:
        if patch.scope is Scope.PLUGIN and patch.wraps:
            hook(patch)


def installed() -> bool:
    """Whether this process loaded the plugin, and not only a module of this package."""
    return _installed


def hook(patch: Patch) -> None:
    """Put a patch in place when its module is imported, or now if it already is."""

    def imported(module: ModuleType) -> None:
        patch.put_in_place()

    wrapt.register_post_import_hook(imported, patch.target.partition(":")[0])


def apply(scope: Scope, version: Version) -> None:
    """Import the modules of the patches that a release needs in a scope, and put each patch in place once."""
    for patch in of_release(version):
        if patch.scope is scope and patch.wraps:
            patch.put_in_place()


def of_release(version: Version) -> Iterator[Patch]:
    """The patches that a vLLM release needs."""
    return (patch for patch in PATCHES if patch.needed_on(version))


def patch_of(target: str) -> Patch:
    """The patch with a given target."""
    return next(patch for patch in PATCHES if patch.target == target)
