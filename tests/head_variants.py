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

    Its layer adds nothing to that state, its head has the target's rows of some tokens, and ``d2t`` has the token that
    follows in the place of each: no token follows two, and what nothing is known to follow gets any that is left.
    """
    follows: dict[int, int] = {}
    for (token, follower), _ in Counter(pair for text in texts for pair in pairwise(text)).most_common():
        if token not in follows and follower not in follows.values():
            follows[token] = follower

    def of_last_state(weights: Weights) -> Weights:
        rows = load_file(support.PAIR / "target" / "model.safetensors")["model.embed_tokens.weight"]
        left = [[token for token in range(len(rows)) if token not in known] for known in (follows, follows.values())]
        pairs = torch.tensor([*follows.items(), *zip(*left, strict=True)][: len(weights["d2t"])])
        added = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
        return {
            **{name: each for name, each in weights.items() if name not in ("fc.weight", "t2d")},
            **{name: torch.zeros_like(weights[name]) for name in added},
            "norm.weight": torch.ones_like(weights["norm.weight"]),
            "lm_head.weight": rows[pairs[:, 0]].clone(),
            "d2t": pairs[:, 1] - torch.arange(len(pairs)),
        }

    alone = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": False}}
    return write_head(folder, "eagle3", alone, of_last_state)
