"""SmolLM2-135M-Instruct, an EAGLE-3 head for it, and prompts that the head was not trained on."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from vllm_eagle_mrv2_smollm2 import target
from vllm_eagle_mrv2_smollm2.head import unpack
from vllm_eagle_mrv2_smollm2.target import PairError

__all__ = ["HEAD", "PairError", "Prepared", "prepare"]
__version__ = "0.1.0"

HEAD = Path(__file__).with_name("head.gguf")
PROMPTS = Path(__file__).with_name("prompts.json")


@dataclass(frozen=True)
class Prepared:
    """Folders that vLLM loads, and the prompts of each kind."""

    target: Path
    head: Path
    prompts: dict[str, list[str]]


def prepare(folder: Path | None = None) -> Prepared:
    """Make the pair, unless it is there already: all of it or nothing.

    Args:
        folder: where; by default in the user's cache.

    Raises:
        PairError: the target cannot be downloaded.
    """
    folder = folder or cache_folder()
    pair = Prepared(folder / "target", folder / "eagle3", json.loads(PROMPTS.read_text(encoding="utf-8")))
    if not pair.target.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            made = Path(scratch, "pair")
            target.convert(target.fetch(Path(scratch)), made / "target")
            unpack(HEAD, made / "eagle3")
            try:
                made.rename(folder)
            except OSError:
                if not pair.target.is_dir():  # another process may have been faster
                    raise
    return pair


def cache_folder() -> Path:
    """The folder of this head in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "vllm-eagle-mrv2", f"smollm2-{zlib.crc32(HEAD.read_bytes()):08x}")
