#!/usr/bin/env bash
# Several stock releases at once on one GPU, on a machine with torch and no network:
#
#   bash benchmarks/gpu_matrix.sh ROOT OUT tests RELEASE... [-- ARGUMENTS]       tests/gpu, every release at the same time
#   bash benchmarks/gpu_matrix.sh ROOT OUT times RELEASE... [-- ARGUMENTS]       benchmarks/ab_time.py: engines up together, measured in turn
#   bash benchmarks/gpu_matrix.sh ROOT OUT loads RELEASE... [-- ARGUMENTS]       benchmarks/load_times.py, likewise
#   bash benchmarks/gpu_matrix.sh ROOT OUT timelines RELEASE... [-- ARGUMENTS]   benchmarks/draft_timeline.py, likewise
#   bash benchmarks/gpu_matrix.sh ROOT OUT kernels RELEASE... [-- ARGUMENTS]     benchmarks/kernel_times.py; all kernels, or those named
#   bash benchmarks/gpu_matrix.sh ROOT OUT lengths RELEASE... [-- ARGUMENTS]     benchmarks/draft_lengths.py, likewise
#
# A RELEASE may bring arguments of its own, '0.26.0 --steps 7 --batch 1 32', and stand there several times. Tests named by
# a path take the place of tests/gpu.
#
# ROOT holds what pip would have installed: site-RELEASE for each of them (the stock wheel, and what else is not as the
# others need it) and site-deps (what they all need beside torch and triton).  This package is installed aside.
#
# OUT gets one tests.tar.gz (log and JUnit reports by release), or times.tar.gz (logs) with times.jsonl, for
# benchmarks/gpu_result.py. Ends with a line for each release; the exit status is 1 where any of them failed.
# EAGLE_MRV2_LIMIT=570 stops what still runs after so many seconds; what it wrote is kept. EAGLE_MRV2_HOLD=FILE has engines
# start, and waits for FILE before it measures them: while they start, something else may still use the machine.
# EAGLE_MRV2_CACHES=FOLDER keeps compiled code there for the next call, by release, or by EAGLE_MRV2_CACHES_OF=job; without
# it every job starts with none.
set -euo pipefail
usage() { sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 4 ]] || usage
root=$(realpath -- "$1") out=$(realpath -- "$2") what=$3
shift 3
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
jobs=() arguments=()
while (($#)); do
  if [[ $1 == -- ]]; then shift; arguments=("$@"); break; fi
  jobs+=("$1")
  shift
done
python=${PYTHON:-python3}
processes=${EAGLE_MRV2_PROCESSES:-4} # at a time, for the tests of 0.20 and 0.22, each of which has one to itself
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A job's name, as a folder, whose name may not be of any length.
folder_of() {
  local name=${1//[^0-9a-zA-Z._-]/_}
  ((${#name} <= 100)) || name=${name:0:90}-$(cksum <<<"$1" | cut -d ' ' -f 1)
  printf '%s' "$name"
}

# The rest of the arguments, on the release of a job; caches apart, as releases generate other code for the same shapes.
on() {
  local release=${1%% *} caches libraries
  caches=${EAGLE_MRV2_CACHES:-$work/caches}/$(folder_of "$1")
  [[ -z ${EAGLE_MRV2_CACHES:-} || ${EAGLE_MRV2_CACHES_OF:-} == job ]] || caches=$EAGLE_MRV2_CACHES/$release
  libraries=$(printf '%s:' "$root/site-$release"/nvidia/*/lib)
  shift
  env PYTHONPATH="$work/plugin:$PWD/tools:$root/site-$release:$root/site-deps" \
    LD_LIBRARY_PATH="${libraries%:}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
    HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false \
    VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_CACHE_ROOT="$caches/vllm" TRITON_CACHE_DIR="$caches/triton" \
    TORCHINDUCTOR_CACHE_DIR="$caches/inductor" \
    timeout --signal=INT --kill-after=20 "${EAGLE_MRV2_LIMIT:-3600}" "$@"
}

tests() { # job, folder, arguments
  local release=${1%% *} folder=$2 reports=0 test
  local pytest=(on "$1" "$python" -m pytest -p no:cacheprovider)
  shift 2
  [[ " $*" == *" tests/"* ]] || set -- tests/gpu "$@"
  if [[ $release != 0.2[02].* ]]; then
    "${pytest[@]}" --junit-xml="$folder/all.xml" "$@" >"$folder/log" 2>&1
    return
  fi
  # An engine of 0.20 leaves behind what the next one of the process trips over, and of 0.22 its GPU memory.
  "${pytest[@]}" --collect-only "$@" --verbosity=-1 >"$folder/collected"
  while read -r test; do
    ((++reports <= processes)) || wait -n
    { "${pytest[@]}" --junit-xml="$folder/$reports.xml" "$test" >"$folder/$reports.log" 2>&1 </dev/null ||
      echo "$test" >>"$folder/failed"; } &
  done < <(grep :: "$folder/collected")
  wait
  cat "$folder"/*.log >"$folder/log"
  [[ ! -e $folder/failed ]]
}

in_turn() { # script, job, folder, arguments
  local script=$1 job=$2 folder=$3
  shift 3
  # Four cores for each comparison from its start, so that the memory of both engines lies where they are measured; all
  # for one that is alone: FlashInfer compiles.
  on "$job" taskset -c "${slices[started % ${#slices[@]}]}" "$python" "$script" \
    --together "$participants" "$work/turns" "$@" >"$folder/$what.jsonl" 2>"$folder/log"
}
times() { in_turn benchmarks/ab_time.py "$@"; }
loads() { in_turn benchmarks/load_times.py "$@"; }
timelines() { in_turn benchmarks/draft_timeline.py "$@"; }
lengths() { in_turn benchmarks/draft_lengths.py "$@"; }
kernels() { # job, folder, arguments
  local job=$1 folder=$2
  shift 2
  on "$job" "$python" benchmarks/kernel_times.py "$@" >"$folder/$what.jsonl" 2>"$folder/log"
}

case $what in tests | times | loads | timelines | kernels | lengths) ;; *) usage ;; esac
for job in "${jobs[@]}"; do
  # Before any starts: those that take turns would wait for one that never comes.
  [[ -d $root/site-${job%% *} ]] || { printf 'error: %s has no site-%s\n' "$root" "${job%% *}" >&2; exit 2; }
done
mkdir -p "$out" "$work/out"
mkdir "$work/source" # a build leaves its traces
cp -r vllm_eagle_mrv2 pyproject.toml setup.py README.md LICENSE "$work/source"
"$python" -m pip install -q --no-deps --no-index --no-build-isolation --target "$work/plugin" "$work/source"
mapfile -t cores < <(
  taskset -cp $$ | sed 's/.*: //' | tr , '\n' | while IFS=- read -r first last; do seq "$first" "${last:-$first}"; done
)
slices=() size=4
((${#jobs[@]} > 1)) || size=${#cores[@]}
for ((i = 0; i == 0 || i + size <= ${#cores[@]}; i += size)); do
  slices+=("$(IFS=,; printf '%s' "${cores[*]:i:size}")")
done
declare -A process
started=0 failed=0 participants=${#jobs[@]}
if [[ -n ${EAGLE_MRV2_HOLD:-} ]]; then
  # One more to wait for.
  ((++participants))
  mkdir "$work/turns"
  (until [[ -e $EAGLE_MRV2_HOLD || ! -d $work/turns ]]; do sleep 1; done; touch "$work/turns/up-hold") 2>/dev/null &
fi
for job in "${jobs[@]}"; do
  folder=$work/out/$(folder_of "$job")
  read -ra words <<<"$job"
  mkdir -p "$folder"
  "$what" "$job" "$folder" "${arguments[@]}" "${words[@]:1}" &
  process[$job]=$!
  ((++started))
done
for job in "${jobs[@]}"; do
  verdict=passed
  wait "${process[$job]}" || verdict=FAILED failed=1
  folder=$work/out/$(folder_of "$job")
  printf '%-7s %s: %s\n' "$job" "$verdict" "$(tail -n 1 "$folder/log" 2>/dev/null)"
  [[ $what == tests ]] || cat "$folder/$what.jsonl"
done
[[ $what == tests ]] || cat "$work/out"/*/"$what.jsonl" >"$out/$what.jsonl"
tar -czf "$out/$what.tar.gz" -C "$work/out" .
exit "$failed"
