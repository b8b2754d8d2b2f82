#!/usr/bin/env bash
# The demo, in the environment of ci/env.sh:  bash ci/demo.sh [arguments of vllm-eagle-mrv2 demo]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source ci/env.sh
exec vllm-eagle-mrv2 demo "$@"
