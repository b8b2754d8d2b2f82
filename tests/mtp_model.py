"""A tiny MiMo with one MTP layer, written where a test wants it, and engines on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import support
import torch
from safetensors.torch import save_file

HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
INTERMEDIATE = 192
LAYERS = 2
ROPE_THETA = 10000.0
# The heads of the first layer look at the token so many places back.
LOOK_BACK = (1, 2, 3, 4)
SHARPNESS = 5.0


def write_mtp_model(folder: Path, *, seed: int = 0, context: float = 0.3, unknown: float = 0.1) -> Path:
    """A ``MiMoForCausalLM`` with one MTP layer and the tokenizer of the demo pair, in ``folder``.

    The weights are random but for this, so that the MTP layer drafts well and not perfectly:

    * Embeddings have an RMS of 1 and norms are the identity, so a norm passes an embedding on unchanged.
    * The queries and keys of the target's first layer come from their biases alone, and the rotary embedding turns
      these into heads that look 1, 2, 3 and 4 places back.  Each adds a random image of the token there, with the RMS
      ``context``.  The next token is thus a random function of the last five.
    * The second layer is an ordinary random one, ``unknown`` in size: what the MTP layer cannot know.
    * The MTP block is a copy of the first layer.  Its input is the embedding of its token, and through the target's
      hidden state (later its own) the image of the token before, in the place of the head that looks 1 back, which
      is cut out.  Drafts are thus wrong where the hidden states, the positions or the slots of the KV cache are.

    Args:
        folder: made where it does not exist.
        seed: of the weights.
        context: what each of the four tokens before the last contributes, relative to it.
        unknown: scale of the second layer; more of it lowers the acceptance.

    Returns:
        ``folder``.
    """
    assert "eagle-" not in str(folder), 'vLLM takes a draft whose path has "eagle-" in it for an EAGLE one; set TMPDIR'
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((support.PAIR / "target" / "config.json").read_text())
    vocabulary = config["vocab_size"]
    # vLLM chooses the model by its architecture; transformers knows no "mimo", whose fields are Qwen2's.
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": True,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    del config["head_dim"], config["mlp_bias"]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(support.PAIR / "target" / name, folder / name)

    random = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """[rows, columns]: an input with an RMS of 1 comes out with an RMS of ``gain``."""
        values: torch.Tensor = torch.randn(rows, columns, generator=random) * (gain / columns**0.5)
        return values

    embeddings = torch.randn(vocabulary, HIDDEN, generator=random)
    embeddings /= embeddings.square().mean(dim=-1, keepdim=True).sqrt()
    first, second = _layer(normal, context, 0.1), _layer(normal, unknown, unknown)
    look_back_q, look_back_k = _look_back_biases()
    first |= {
        "self_attn.q_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        "self_attn.q_proj.bias": look_back_q,
        "self_attn.k_proj.weight": torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.bias": look_back_k,
    }
    block = {name: tensor.clone() for name, tensor in first.items()}
    block["self_attn.o_proj.weight"][:, :HEAD_DIM] = 0
    token_before = first["self_attn.o_proj.weight"][:, :HEAD_DIM] @ first["self_attn.v_proj.weight"][:HEAD_DIM]
    # The hidden state holds the embedding of the token before beside the context, and a norm went over both.
    share = (1 + len(LOOK_BACK) * context**2) ** 0.5
    mtp = {
        **block,
        "token_layernorm.weight": torch.ones(HIDDEN),
        "hidden_layernorm.weight": torch.ones(HIDDEN),
        "input_proj.weight": torch.cat([share * token_before, torch.eye(HIDDEN)], dim=1),
        "final_layernorm.weight": torch.ones(HIDDEN),
    }
    tensors = {
        "model.embed_tokens.weight": embeddings,
        **{f"model.layers.{i}.{name}": t for i, layer in enumerate((first, second)) for name, t in layer.items()},
        **{f"model.mtp_layers.0.{name}": tensor for name, tensor in mtp.items()},
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(vocabulary, HIDDEN),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(normal: Callable[..., torch.Tensor], attention: float, mlp: float) -> dict[str, torch.Tensor]:
    """A random decoder layer whose attention heads and whose MLP add so much to an input with an RMS of 1."""
    kv = KV_HEADS * HEAD_DIM
    return {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": normal(HIDDEN, HIDDEN),
        "self_attn.q_proj.bias": torch.zeros(HIDDEN),
        "self_attn.k_proj.weight": normal(kv, HIDDEN),
        "self_attn.k_proj.bias": torch.zeros(kv),
        "self_attn.v_proj.weight": normal(kv, HIDDEN),
        "self_attn.v_proj.bias": torch.zeros(kv),
        "self_attn.o_proj.weight": normal(HIDDEN, HIDDEN, attention * HEADS**0.5),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE, mlp),
    }


def _look_back_biases() -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of queries [HIDDEN] and keys [KV_HEADS * HEAD_DIM] whose product peaks `LOOK_BACK` places back."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    queries = [torch.cat([(back * frequencies).cos(), -(back * frequencies).sin()]) for back in LOOK_BACK]
    keys = torch.cat([torch.ones(HEAD_DIM // 2), torch.zeros(HEAD_DIM // 2)]).repeat(KV_HEADS)
    return SHARPNESS * torch.cat(queries), SHARPNESS * keys


@contextmanager
def mtp_engine(folder: Path, speculative: dict[str, Any] | None, **overrides: Any) -> Iterator[Any]:
    """`support.engine` on the model in ``folder``; ``speculative`` is the whole speculative configuration, or None."""
    method = None if speculative is None else str(speculative["method"]).partition(":")[0]
    if speculative is not None:
        overrides["speculative_config"] = speculative
    with mock.patch.object(support, "PAIR", folder.parent):
        assert folder.name == "target", "support.engine takes the folder target of its pair"
        with support.engine(method, **overrides) as llm:
            yield llm


def our_mtp_speculator(llm: Any) -> Any:
    """The speculator of an in-process engine, which must be ours; up to vLLM 0.22 all families have one class."""
    speculator = support.speculator_of(llm)
    own_class = find_spec("vllm.v1.worker.gpu.spec_decode.mtp") is not None
    ours, stock = (each.__name__ for each in type(speculator).__mro__[:2])
    assert (ours, stock) == ("EagleMRV2Speculator", "MTPSpeculator" if own_class else "EagleSpeculator")
    assert speculator.drafter.settings.family == speculator.method == "mtp"
    return speculator
