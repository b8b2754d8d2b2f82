"""Accepted length of SmolLM2's EAGLE-3 head by kind of prompt, alone and with ``lookup_drafts``, as a JSON line each.

    python benchmarks/smollm2_acceptance.py --pair FOLDER [--prompts 24] [--first 0] [--tokens 128] [--steps 5]

FOLDER is what ``python -m vllm_eagle_mrv2_smollm2 --out FOLDER`` made. Greedy answers to prompts that the head was not
trained on (tools/smollm2_prompts.py), in the installed vLLM; both engines must give the same.

With ``--temperature`` and ``--top-p`` answers and drafts are sampled, and the second engine drafts from all tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from smollm2_prompts import KINDS, Kind, prompts

from vllm_eagle_mrv2.cli.common.draft_counters import counted_since, read_counters

Settings = dict[str, dict[str, Any]]
GREEDY: Settings = {"head alone": {}, "lookup_drafts": {"lookup_drafts": True}}
SAMPLED: Settings = {"head alone": {}, "drafts from all tokens": {"disable": ["draft_top_k_top_p"]}}
Texts = list[list[int]]


def measure(llm: Any, asked: dict[Kind, list[str]], params: Any) -> tuple[dict[Kind, Texts], list[dict[str, Any]]]:
    """Answers by kind, and what was accepted."""
    answers, lines = {}, []
    for kind in KINDS:
        before = read_counters()
        chats = [[{"role": "user", "content": text}] for text in asked[kind]]
        answers[kind] = [list(one.outputs[0].token_ids) for one in llm.chat(chats, params, use_tqdm=False)]
        counted = counted_since(before)
        drafts = counted["num_drafts"]
        lines.append(
            {
                "kind": kind,
                "accepted_length": round(1 + counted["num_accepted_tokens"] / drafts, 3),
                "by_position": [round(one / drafts, 3) for one in counted["num_accepted_tokens_per_pos"]],
                "drafts": drafts,
            }
        )
    return answers, lines


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=24, help="of each kind")
    parser.add_argument("--first", type=int, default=0, help="place of the first prompt; other places, other prompts")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--steps", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments of the engines, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    asked = {
        kind: texts[options.first :: max(1, len(texts) // options.prompts)]
        for kind, texts in prompts(held_out=True).items()
    }
    asked = {kind: texts[: options.prompts] for kind, texts in asked.items()}
    params = vllm.SamplingParams(
        temperature=options.temperature, top_p=options.top_p, max_tokens=options.tokens, seed=0
    )
    sampled = options.temperature > 0.0
    if sampled and on_cpu:
        from vllm.v1.sample.ops import topk_topp_sampler

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        topk_topp_sampler.HAS_TRITON = False  # in this process; Triton's interpreter does not run vLLM's kernel
    about = {"temperature": options.temperature, "top_p": options.top_p} if sampled else {}
    answers = []
    for setting, chosen in (SAMPLED if sampled else GREEDY).items():
        llm = vllm.LLM(
            str(options.pair / "target"),
            speculative_config={
                "method": "eagle_mrv2",
                "model": str(options.pair / "eagle3"),
                "num_speculative_tokens": options.steps,
                **({"draft_sample_method": "probabilistic"} if sampled else {}),
            },
            additional_config={"eagle_mrv2": chosen},
            max_model_len=1024,
            max_num_seqs=8,
            enable_prefix_caching=False,
            disable_log_stats=False,
            **({"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**30} if on_cpu else {}),
            **options.engine,
        )
        given, lines = measure(llm, asked, params)
        answers.append(given)
        for line in lines:
            first = {"vllm": vllm.__version__, "setting": setting, "k": options.steps, **about}
            print(json.dumps(first | line), flush=True)
        del llm
    if not sampled and answers[0] != answers[1]:
        print("error: the engines give different answers", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
