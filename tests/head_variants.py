"""Heads that differ from those of the demo pair as public heads differ, written where a test wants them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import support
import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


def write_head(
    folder: Path,
    family: str,
    changed: dict[str, Any],
    weights: Callable[[Weights], Weights] = lambda weights: weights,
) -> Path:
    """A head of the demo pair with some fields of its configuration changed, None for none, and other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((support.PAIR / family / "config.json").read_text()) | changed
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(load_file(support.PAIR / family / "model.safetensors")), folder / "model.safetensors")
    return folder


def write_head_of_layers(folder: Path, layers: Sequence[int], *, nested: bool = False) -> Path:
    """The EAGLE-3 head, which combines the layers 1, 2 and 3, with further layers that weigh nothing: its drafts are
    the same. ``nested`` has the layers named in ``eagle_config``.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    changed = {name: None, "eagle_config": {name: list(layers)}} if nested else {name: list(layers)}

    def widened(weights: Weights) -> Weights:
        width = weights["fc.weight"].shape[0]
        of_layer = dict(zip((1, 2, 3), weights["fc.weight"].split(width, dim=1), strict=True))
        nothing = torch.zeros(width, width, dtype=weights["fc.weight"].dtype)
        return weights | {"fc.weight": torch.cat([of_layer.get(layer, nothing) for layer in layers], dim=1)}

    return write_head(folder, "eagle3", changed, widened)


def write_head_of_last_state(folder: Path, texts: Sequence[Sequence[int]]) -> Path:
    """An EAGLE-3 head that takes no auxiliary states: it drafts what in ``texts`` mostly follows the token that the
    target's last hidden state makes the likeliest.

    Its layer adds nothing to that state, its head has the target's rows of the tokens that something follows, and
    ``d2t`` has for each the one that follows it. No token follows two.
    """
    followers: dict[int, int] = {}
    for (token, follower), _ in Counter(pair for text in texts for pair in pairwise(text)).most_common():
        if token not in followers and follower not in followers.values():
            followers[token] = follower
    tokens = torch.tensor(list(followers))
    rows = load_file(support.PAIR / "target" / "model.safetensors")["model.embed_tokens.weight"]

    def of_last_state(weights: Weights) -> Weights:
        silent = {
            name: weights[name].zero_() for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))
        }
        unscaled = {"norm.weight": torch.ones_like(weights["norm.weight"])}
        to_target = torch.tensor(list(followers.values())) - torch.arange(len(tokens))
        others = {name: each for name, each in weights.items() if name not in ("fc.weight", "t2d")}
        return others | silent | unscaled | {"lm_head.weight": rows[tokens].clone(), "d2t": to_target}

    changed = {
        "draft_vocab_size": len(tokens),
        "eagle_aux_hidden_state_layer_ids": None,
        "eagle_config": {"use_aux_hidden_state": False},
    }
    return write_head(folder, "eagle3", changed, of_last_state)
