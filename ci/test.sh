#!/usr/bin/env bash
# Style, types, documentation and tests, in the environment of ci/env.sh:  bash ci/test.sh [pytest arguments]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source ci/env.sh

sources=(vllm_eagle_mrv2 pairs tests ci tools benchmarks)
echo "[test] ruff and mypy"
"$PYTHON" -m ruff check --quiet "${sources[@]}"
"$PYTHON" -m ruff format --check --quiet "${sources[@]}"
"$PYTHON" -m mypy --no-error-summary
echo "[test] docs/ and deploy/"
bash ci/docs.sh
echo "[test] pytest on the $EAGLE_MRV2_STACK stack"
"$PYTHON" -m pytest "$@"
