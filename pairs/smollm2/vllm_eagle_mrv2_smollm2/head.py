"""An EAGLE-3 head as one GGUF file: its matrices in Q8_0 blocks, its vectors as they are, its configuration as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = "eagle3.config"
Q8_0 = GGMLQuantizationType.Q8_0


def pack(folder: Path, file: Path) -> None:
    """Store a head's folder, config.json and model.safetensors, in a GGUF file."""
    writer = GGUFWriter(file, "eagle3")
    writer.add_string(CONFIG, (folder / "config.json").read_text(encoding="utf-8"))
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() == 2:
            writer.add_tensor(name, quantize(weight.float().numpy(), Q8_0), raw_dtype=Q8_0)
        elif name != "t2d":  # which `unpack` makes from d2t
            writer.add_tensor(name, (weight.float() if weight.is_floating_point() else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpack(file: Path, folder: Path) -> None:
    """Write a head's folder from a GGUF file, in bfloat16."""
    reader = GGUFReader(file)
    config = reader.fields[CONFIG].contents()
    weights = {tensor.name: _weight(tensor) for tensor in reader.tensors}
    drafted = torch.zeros(json.loads(config)["vocab_size"], dtype=torch.bool)
    drafted[torch.arange(len(weights["d2t"])) + weights["d2t"]] = True
    folder.mkdir(parents=True)
    save_file(weights | {"t2d": drafted}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config, encoding="utf-8")


def _weight(tensor: Any) -> Tensor:
    if tensor.name == "d2t":
        return torch.from_numpy(tensor.data.copy())
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()
