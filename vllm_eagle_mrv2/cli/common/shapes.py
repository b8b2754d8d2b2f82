"""Models of a published shape without a checkpoint; vLLM loads them with random weights."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

PROMPT_TOKENS = 128
VOCABULARY = 128256
DRAFT_VOCABULARY = 32000
"""Size of an EAGLE-3 head's own draft vocabulary."""
OWN_HEAD_PLUGIN = "eagle_mrv2_own_head"
_KEYS_AND_VALUES, _BFLOAT16 = 2, 2


class Shape(str, Enum):
    """A shape of Llama 3: that of 3.2-1B, 3.2-3B or 3.1-8B."""

    b1 = "1b"
    b3 = "3b"
    b8 = "8b"


_SHAPES: dict[Shape, dict[str, int]] = {
    Shape.b1: {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "head_dim": 64,
    },
    Shape.b3: {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "head_dim": 128,
    },
    Shape.b8: {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "head_dim": 128,
    },
}


def kv_cache_bytes(shape: Shape, tokens: int) -> int:
    """Bytes that the keys and values of so many tokens take, those of a target and of its one-layer head."""
    config = _SHAPES[shape]
    layers, row = config["num_hidden_layers"] + 1, config["num_key_value_heads"] * config["head_dim"]
    return tokens * layers * row * _KEYS_AND_VALUES * _BFLOAT16


def write_configs(folder: Path, shape: Shape, family: str) -> tuple[str, str]:
    """Write a folder with a ``config.json`` each for a target and its one-layer head; return their paths.

    Args:
        folder: the folder to write them into.
        shape: the shape of both.
        family: ``eagle`` or ``eagle3``.
    """
    target = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **_SHAPES[shape],
    }
    draft = target | {"num_hidden_layers": 1}
    if family == "eagle3":
        draft |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCABULARY}
    paths = []
    for name, config in (("target", target), (family, draft)):
        path = folder / f"{name}-{shape.value}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        paths.append(str(path))
    return paths[0], paths[1]


def write_own_head(folder: Path) -> str:
    """Write a vLLM plugin that makes an EAGLE-3 head keep its own output rows; return a folder for ``PYTHONPATH``.

    A real checkpoint contains these rows.  Without a checkpoint vLLM uses the target's, which are four times as many.
    """
    information = folder / f"{OWN_HEAD_PLUGIN}-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {OWN_HEAD_PLUGIN}\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{OWN_HEAD_PLUGIN} = {OWN_HEAD_PLUGIN}:install\n"
    )
    (folder / f"{OWN_HEAD_PLUGIN}.py").write_text(
        "def install():\n"
        "    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM\n\n"
        "    Eagle3LlamaForCausalLM.has_own_lm_head = True\n"
    )
    return str(folder)


def token_prompts(count: int) -> list[list[int]]:
    """Prompts of `PROMPT_TOKENS` token ids each, no two alike."""
    return [[(7 * number + place) % 1000 + 5 for place in range(PROMPT_TOKENS)] for number in range(count)]
