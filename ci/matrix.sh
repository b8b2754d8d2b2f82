#!/usr/bin/env bash
# The tests on CPU releases of vLLM, one after another, each in the environment of ci/env.sh:
#
#   bash ci/matrix.sh                        every release in full: the tests that depend on the release
#   bash ci/matrix.sh 0.27.1 0.28.0:short    one in full, one with the tests marked smoke
#   bash ci/matrix.sh --record [...]         runs the demo as well, and writes benchmarks/results/cpu-vllm-<release>.json
#
# Ends with a line for each release; the exit status is 1 where any of them failed.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
export EAGLE_MRV2_STACK=cpu
source ci/env.sh

declare -A LIMIT=([full]=70m [short]=10m) # an engine that hangs must not cost the other releases their run
record=
runs=()
for argument; do
  case $argument in
    --record) record=yes ;;
    -*) printf 'usage: bash ci/matrix.sh [--record] [RELEASE[:short]...]\n' >&2; exit 2 ;;
    *) runs+=("$argument") ;;
  esac
done
if [[ ${#runs[@]} == 0 ]]; then runs=("${CPU_RELEASES[@]}" "${OVERLAID_RELEASES[@]}"); fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
summary=() status=0
for run in "${runs[@]}"; do
  export EAGLE_MRV2_VLLM=${run%:short}
  form=full selection=(tests/engine tests/releases tests/unit -m "not any_release") verdict=passed
  if [[ $run == *:short ]]; then form=short selection=(tests/engine -m smoke); fi
  printf '[matrix] vLLM %s, %s\n' "$EAGLE_MRV2_VLLM" "$form"
  began=$SECONDS
  timeout --foreground --kill-after=30 "${LIMIT[$form]}" \
    bash ci/env.sh python -m pytest --junit-xml="$scratch/$run.xml" "${selection[@]}" || verdict=FAILED
  seconds=$((SECONDS - began)) recording=()
  if [[ -n $record ]]; then
    bash ci/env.sh vllm-eagle-mrv2 demo --json --family both --num-prompts 16 >"$scratch/$run.json" || verdict=FAILED
    recording=(--record "$scratch/$run.json" --run "$run" --seconds "$seconds")
  fi
  counts=$(bash ci/env.sh python ci/matrix_result.py "$scratch/$run.xml" "${recording[@]}") || verdict=FAILED
  if [[ $verdict == FAILED ]]; then status=1; fi
  summary+=("$(printf '%-7s %-5s %s: %s, %d s' "$EAGLE_MRV2_VLLM" "$form" "$verdict" "$counts" "$seconds")")
done
echo "[matrix] summary"
printf '  %s\n' "${summary[@]}"
exit "$status"
