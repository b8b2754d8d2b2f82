"""Defects of stock EAGLE drafting that a later vLLM fixed, and how each is handled on earlier releases.

`docs/fixes.md` lists them.  A fix that can be switched off is a `behaviours.Behaviour` and is not repeated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

State = Literal["stock", "eagle_mrv2", "not applicable", "not possible"]


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One defect, described by its symptom; ``stock``, ``supplied`` and ``absent`` are version specifiers."""

    symptom: str
    upstream: str = ""
    """vLLM issues and pull requests; empty if only the sources show the change."""
    stock: str | None = None
    """Releases on which stock vLLM has the fix."""
    supplied: str | None = None
    """Releases on which this package supplies the fix."""
    test: str = ""
    """A test that fails without the fix: ``file::function`` below ``tests``."""
    absent: str | None = None
    """Releases without the feature that has the defect."""
    why: str = ""
    """Why the defect remains on all other releases."""

    def state(self, release: Version) -> State:
        """How the defect is handled on a release."""
        for specifier, state in ((self.supplied, "eagle_mrv2"), (self.stock, "stock"), (self.absent, "not applicable")):
            if specifier is not None and release in SpecifierSet(specifier):
                return state  # type: ignore[return-value]
        return "not possible"


_VERIFICATION = "the rejection sampler stays the release's own"
_MODEL_CLASS = "the classes of draft models stay the release's own"
_REFUSED = "refused in one sentence"
_RANKS = "what a draft's metadata says of other ranks stays the release's own"

FIXES = (
    Fix(
        symptom="The draft runs past its head's `max_position_embeddings`: device assert, or acceptance falls",
        upstream="#48894, #49343",
        stock=">=0.27",
        supplied="<0.27",
        test="engine/test_head_variants.py::test_a_head_of_fewer_positions_than_its_target",
    ),
    Fix(
        symptom="The same for an MTP layer of another copy of the target",
        upstream="#57941",
        stock=">=0.33",
        supplied="<0.33",
        test="unit/test_draft_config.py::test_an_mtp_layer_of_another_copy_of_the_target",
    ),
    Fix(
        symptom="`lm_head` of a target in a multimodal wrapper is not shared: crash",
        upstream="#47914, #48700",
        stock=">=0.26",
        supplied="<0.26",
        test="unit/test_draft_loading.py::test_head_of_a_multimodal_target_is_shared",
    ),
    Fix(
        symptom="The draft's `attention_backend` is ignored",
        upstream="#54826",
        stock=">=0.30",
        supplied=">=0.22,<0.30",
        test="unit/test_draft_loading.py::test_draft_is_built_by_its_own_backends",
        absent="<0.22",
    ),
    Fix(
        symptom="The draft's `moe_backend` is ignored",
        upstream="#54788",
        stock=">=0.30",
        supplied="<0.30",
        test="engine/test_draft_backends.py::test_draft_is_built_by_its_own_backends",
    ),
    Fix(
        symptom="The target's embedding is shared with its LoRA: the draft reads out of bounds",
        stock=">=0.24",
        supplied="<0.24",
        test="unit/test_draft_loading.py::test_layers_are_shared_without_lora",
    ),
    Fix(
        symptom="The head of a tied target with LoRA is shared (EAGLE heads of Qwen3): AttributeError",
        stock=">=0.28",
        supplied="<0.28",
        test="unit/test_draft_loading.py::test_layers_are_shared_without_lora",
    ),
    Fix(
        symptom="EAGLE heads of Llama 4 and Mistral Large 3 under a multimodal target lack `_embed_text_input_ids`",
        upstream="#57630, #57633",
        stock="",
        supplied=">=0.28,<0.32",
        test="unit/test_draft_loading.py::test_draft_embeds_text_and_images",
    ),
    Fix(
        symptom="The draft's buffers are garbage after a level-2 sleep",
        upstream="#49774",
        stock=">=0.27",
        supplied=">=0.22,<0.27",
        test="unit/test_sleep.py::test_buffers_come_back",
        why="0.20 loses its own block tables in any sleep",
    ),
    Fix(
        symptom="Drafts are computed that no request of the batch can use",
        upstream="#48244",
        stock=">=0.33",
        supplied="<0.33",
        test="engine/test_unused_drafts.py::test_chunks_and_lone_tokens",
    ),
    Fix(
        symptom="EAGLE-3 heads with `use_aux_hidden_state: false`: shape error",
        stock=">=0.33",
        supplied="<0.33",
        test="engine/test_head_variants.py::test_a_head_of_the_last_state_alone",
    ),
    Fix(
        symptom="EAGLE-3 heads of other than three layers of the target, named in `eagle_config`: shape error",
        supplied=">=0.22",
        test="engine/test_head_variants.py::test_a_head_of_other_than_three_layers",
        why="0.20 builds every head for three, which is refused in one sentence",
    ),
    Fix(
        symptom="A `max_model_len` that was fitted to the memory does not reach the draft",
        upstream="#57034",
        stock=">=0.33",
        supplied="<0.33",
        test="engine/test_fitted_context.py::test_drafts_keep_to_a_context_fitted_to_the_memory",
    ),
    Fix(
        symptom="A multimodal draft that takes no image embeddings is given them",
        upstream="#50417",
        stock=">=0.28",
        why=_MODEL_CLASS,
    ),
    Fix(
        symptom="MTP layers that share a sparse indexer select their tokens anew at every step",
        stock=">=0.28",
        why=_MODEL_CLASS,
    ),
    Fix(symptom="A logit that is NaN makes verification take a token out of bounds", stock=">=0.28", why=_VERIFICATION),
    Fix(
        symptom="Placeholders of a request that begins with one token are verified by another request's draft logits",
        stock=">=0.31",
        supplied=">=0.25,<0.31",
        absent="<0.25",
        test="unit/test_model_runner.py::test_a_new_request_has_placeholders_for_drafts",
    ),
    Fix(
        symptom="Logprobs are of the wrong rows under adaptive verification",
        stock=">=0.29",
        absent="<0.28",
        why=_VERIFICATION,
    ),
    Fix(
        symptom="Draft decodes under decode context parallelism read the target's lengths of a rank",
        stock=">=0.29",
        why=_RANKS,
    ),
    Fix(symptom="The MTP layer of HY V4 is given states of four times its width", stock=">=0.29", absent="<0.29"),
    Fix(
        symptom="Weights of Nemotron-H MTP layers that the quantization excludes are quantized",
        stock=">=0.29",
        why=_MODEL_CLASS,
    ),
    Fix(
        symptom="Data-parallel ranks agree once more on graphs of draft decodes, on the host",
        upstream="#54856",
        stock=">=0.30",
        why=_RANKS,
    ),
    Fix(symptom="Eager draft decodes of data-parallel ranks count padding as tokens", stock=">=0.30", why=_RANKS),
    Fix(
        symptom="Drafting over pipeline stages hangs, or verifies drafts that the first stages do not have",
        upstream="#46994, #52295, #54436",
        stock=">=0.30",
        why=_REFUSED,
    ),
    Fix(
        symptom="Pipeline stages without asynchronous scheduling: wrong output",
        upstream="#52071",
        why=_REFUSED,
    ),
    Fix(
        symptom="Hybrid targets with prefix caching: a block of the prompt is never computed",
        upstream="#45614, #48375",
        stock=">=0.26",
        absent="<0.25",
        why=_REFUSED,
    ),
    Fix(
        symptom="Qwen3-Next and Qwen3.5: a request without drafts in a step reads the state of the wrong token",
        upstream="#56531",
        stock=">=0.32",
        absent="<0.23",
        why="the target's layers stay the release's own; a schedule with 0 drafts is refused",
    ),
    Fix(
        symptom="MTP layers of DeepSeek V3: draft steps after the first are given states that are not normalized",
        upstream="#45895",
        stock=">=0.24",
        why=_MODEL_CLASS,
    ),
    Fix(
        symptom="`reload_weights` after a level-2 sleep leaves the draft without weights: nothing is accepted",
        upstream="#52479",
        why="they come back by weight transfer of the draft (from 0.26 on), or by a restart",
    ),
    Fix(
        symptom="MTP layers of Step 3.5 and 3.7 lose their own heads to the target's", stock=">=0.32", why=_MODEL_CLASS
    ),
    Fix(
        symptom="A projection of MiMo-V2 MTP layers whose parts lie in two files is dropped",
        stock=">=0.32",
        why=_MODEL_CLASS,
    ),
    Fix(symptom="MTP layers of Qwen3-Next and Qwen3.5 refuse `mamba_cache_mode=all`", stock=">=0.32", why=_MODEL_CLASS),
    Fix(
        symptom="Block verification: what is drafted again for a position gets the same random numbers, a bias",
        absent="<0.25",
        stock=">=0.33",
        supplied=">=0.25,<0.33",
        test="unit/test_sampling.py::test_every_draft_step_has_random_numbers_of_its_own",
    ),
    Fix(
        symptom="`draft_load_config` is ignored",
        upstream="#55337",
        stock=">=0.31",
        why="below 0.31 vLLM loads a draft as its target",
    ),
)
