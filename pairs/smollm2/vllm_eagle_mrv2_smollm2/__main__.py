"""``python -m vllm_eagle_mrv2_smollm2 --out FOLDER``: FOLDER/target and FOLDER/eagle3, which vLLM loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from vllm_eagle_mrv2_smollm2 import PairError, prepare


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m vllm_eagle_mrv2_smollm2", description="Make the pair.")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: in the user's cache")
    try:
        print(prepare(parser.parse_args().out).target.parent)
    except PairError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
