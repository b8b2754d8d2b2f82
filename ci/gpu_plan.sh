#!/usr/bin/env bash
# Starts, the cases that have a target, and tests, on one or two H200, for ci/gpu_lease.sh:
#
#   bash ci/gpu_lease.sh start ci/gpu_plan.sh ['starts [RELEASE...]'] ['pairs [RELEASE...]'] ['pairs_8b [RELEASE...]'] \
#     [pairs_flashinfer] ['tests [RELEASE...]'] [ranks] [kernels] ['timelines [RELEASE...]'] [more] [alone] [host] \
#     ['older [RELEASE...]'] ['older_8b [K...]'] ['kernel_times [KERNEL...]']
#
# all but the last four where none is named, and in the order that they are named in, several times if so. starts:
# what engines take that start alone (of 0.26.0, or those named), their caches empty, and then full. pairs, pairs_8b, pairs_flashinfer: stock and ours in turn, in
# the cases that have a target: of 1B (0.22.1 and 0.26.0, or those named), of 8B (all but 0.33.0, or those named, three
# at most, again if named again), and with FlashInfer, where the site of 0.26.0 brings it (ci/gpu_pack.py --with
# 0.26.0:...). tests: tests/gpu on four releases. ranks: those that need two GPUs. kernels: their tests, and
# compute-sanitizer. timelines: where the time of draft phases goes, and the host's. more: pairs of 0.26.0 in further
# cases. alone: what single behaviours gain. host: the timelines of 0.33.0 at K=3 alone, on the same cores. older,
# older_8b: what 0.20.2 and 0.22.1 gain at other K and batch sizes. kernel_times: how long kernels of ours take, those
# named or all.
#
# EAGLE_MRV2_GPU=1 has a plan keep to that GPU and its share of the cores, beside another plan on the other:
#
#   bash ci/gpu_lease.sh start -c 'EAGLE_MRV2_GPU=0 bash ci/gpu_plan.sh pairs & EAGLE_MRV2_GPU=1 bash ...; wait; ...'
#
# but no pairs of 1b beside the tests of another: these slow down the whole host, which decides there.
set -u
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
(($#)) || set -- starts 'pairs 0.20.2 0.33.0' pairs pairs_8b pairs_flashinfer tests ranks kernels timelines more alone
say() { printf '[%(%T)T] %s\n' -1 "$*"; }
gpus=$(nvidia-smi -L | wc -l) first_gpu=0
share=$(($(nproc) / gpus)) # of the cores, for each
[[ -z ${EAGLE_MRV2_GPU:-} ]] || gpus=1 first_gpu=$EAGLE_MRV2_GPU
memory=(--engine '{"kv_cache_memory_bytes":1073741824}')
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 # 0.33's torch, with the cuDNN that is there
in_turn=(--rounds 21 --tokens 96 "${memory[@]}")
reports=(-rfE --tb=short)
on_flashinfer='0.26.0 --steps 3 --setting FlashInfer --engine {"kv_cache_memory_bytes":1073741824,"attention_config":{"backend":"FLASHINFER"}}'
has_flashinfer() { bash ci/gpu_lease.sh wait 0.26.0; [[ -e $ROOT/site-0.26.0/flashinfer ]]; }
cores=$share # that one call of the below is given
running=() begun_on=

# Beside others, as soon as its sites are there: GPUs (0, 1, or both: 0,1), a name, the limit in seconds, arguments of
# ci/gpu_matrix.sh, which end with --. Where one GPU is all there is, what was for the other begins when this has ended.
beside() {
  ((gpus > 1)) || [[ -z $begun_on || $begun_on == "$1" ]] || all_ended
  begun_on=$1
  local name=$2 limit=$3 gpu job own=() mine=()
  for gpu in ${1//,/ }; do
    gpu=$((first_gpu + gpu % gpus))
    mine+=("$gpu") own+=("$((gpu * share))-$((gpu * share + cores - 1))")
  done
  shift 3
  while [[ -e $RESULTS/$name ]]; do name+=-again; done
  {
    for job in "${@:2}"; do
      [[ $job != -- ]] || break
      bash ci/gpu_lease.sh wait deps "${job%% *}"
    done
    CUDA_VISIBLE_DEVICES=$(IFS=,; printf '%s' "${mine[*]}") EAGLE_MRV2_LIMIT=$limit \
      taskset -c "$(IFS=,; printf '%s' "${own[*]}")" \
      bash ci/gpu_matrix.sh "$ROOT" "$RESULTS/$name" "$@" >"$RESULTS/$name.log" 2>&1
    say "$name: $?"
  } &
  running+=($!)
}
all_ended() { ((${#running[@]} == 0)) || wait "${running[@]}"; running=() begun_on=; }

starts() {
  local cases=() again gpu i release steps
  (($#)) || set -- 0.26.0
  for steps in 7 1; do cases+=("${@/%/ $steps}"); done
  for ((i = 0; i < ${#cases[@]}; i += 2)); do
    for again in '' -again; do
      for gpu in 0 1; do
        read -r release steps <<<"${cases[i + gpu]}"
        EAGLE_MRV2_CACHES=$TMPDIR/started/$steps EAGLE_MRV2_CACHES_OF=job beside "$gpu" "starts-$release-$steps$again" 250 \
          timelines "$release "{stock,eagle_mrv2}{,' --batch 32'} -- --steps "$steps" "${memory[@]}"
      done
      all_ended
    done
  done
}

eagle3='--shape 8b --family eagle3 --steps 5'

pairs() {
  local release cases=()
  (($#)) || set -- 0.22.1 0.26.0
  for release; do
    case $release in
    0.26.0) cases+=("$release --steps "{3,7}' --batch 1 8 32' "$release --steps 7 --draft-vocab 32768") ;;
    # The host decides at batch 1 there.
    0.33.0) cases+=("$release --steps "{3,7}" --rounds 41 --pair "{1,2,3} "$release --steps 7 --batch 32") ;;
    *) cases+=("$release --steps 3" "$release --steps 7 --batch 1 32") ;;
    esac
  done
  beside 0 "pairs-$(IFS=-; printf '%s' "$*")" 580 times "${cases[@]}" -- "${in_turn[@]}"
  all_ended
}

pairs_8b() { # six engines on a GPU: its memory
  local release cases=()
  (($#)) || set -- 0.20.2 0.22.1 0.26.0
  for release; do cases+=("$release $eagle3 --pair $((${#cases[@]} + 1))"); done
  beside 0 pairs-8b 300 times "${cases[@]}" -- "${in_turn[@]}" --rounds 11
  all_ended
}

pairs_flashinfer() { # which takes minutes to start
  ! has_flashinfer || beside 0 pairs-flashinfer 500 times "$on_flashinfer" -- "${in_turn[@]}" --rounds 11
  all_ended
}

timelines() {
  local release gpu=0 of
  (($#)) || set -- 0.20.2 0.26.0
  for release; do
    of=("$release "{stock,eagle_mrv2}{' --steps 3',' --steps 7',' --steps 7 --batch 32'," $eagle3"})
    beside $((gpu++)) "timelines-$release" 300 timelines "${of[@]}" -- "${memory[@]}"
  done
  all_ended
}

host() {
  local cores=4 # both engines on the same
  beside 0 host-0.33 300 timelines '0.33.0 '{stock,eagle_mrv2}' --steps 3' -- "${memory[@]}"
  all_ended
}

tests() {
  local release engines='--ignore=tests/gpu/test_sanitizer.py --ignore=tests/gpu/test_two_gpus.py'
  (($#)) || set -- 0.26.0 0.22.1 0.20.2 0.33.0
  for release; do # 18 engines a GPU at most: its memory
    case $release in
    0.26.0) beside 0 tests-0.26.0 520 tests "0.26.0 $engines -n 9" -- "${reports[@]}" ;;
    0.22.1) beside 0 tests-0.22.1 500 tests "0.22.1 $engines -n 8" -- "${reports[@]}" ;;
    # Which has a process for each test, and no time for all.
    0.20.2) EAGLE_MRV2_PROCESSES=8 beside 1 tests-0.20.2 420 tests \
      "0.20.2 tests/gpu/test_graphs.py tests/gpu/test_mtp_graphs.py tests/gpu/test_sleep.py" -- "${reports[@]}" ;;
    0.33.0) beside 1 tests-0.33.0 420 tests "0.33.0 $engines -n 6" -- "${reports[@]}" ;;
    *) say "tests: nothing is known of $release" ;;
    esac
  done
  all_ended
}

ranks() {
  ((gpus == 1)) || beside 0,1 ranks 420 tests '0.26.0 tests/gpu/test_two_gpus.py -n 3' -- "${reports[@]}"
  all_ended
}

kernels() {
  local units=(tests/unit/test_{batch_queue,kernels,sampling,single_token_attention,row_product,few_rows_product,greedy}.py
    tests/unit/test_compile_ahead.py)
  beside 0 kernels 420 tests "0.26.0 tests/gpu/test_sanitizer.py ${units[*]} -n 3 --dist loadfile" -- "${reports[@]}"
  all_ended
}

more() {
  beside 0 more-0 300 times '0.26.0 --shape 8b --steps '{1,3}' --batch 1 8 32' -- "${in_turn[@]}" --rounds 11
  beside 1 more-1 300 times '0.26.0 --shape 8b --family eagle3 --steps '{1,3}' --batch 1 8 32' -- "${in_turn[@]}" --rounds 11
  all_ended # a GPU has no memory for these beside them
  beside 0 more-2 300 times '0.26.0 --shape 8b --steps 7 --batch 1 8 32' \
    '0.26.0 --shape 8b --family eagle3 --steps 7 --batch 1 8 32' -- "${in_turn[@]}" --rounds 7
  beside 1 more-3 300 times '0.26.0 --steps 1 --batch 1 8 32' '0.26.0 --family eagle3 --steps '{1,3,7}' --batch 1 8 32' \
    -- "${in_turn[@]}"
  all_ended
}

alone() {
  local names=(fused_draft_decode one_draft_graph row_products single_token_attention two_stage_argmax)
  beside 0 alone 400 times "${names[@]/#/0.26.0 --steps 7 --batch 1 32 --disable }" -- "${in_turn[@]}"
  ! has_flashinfer || beside 1 alone-flashinfer 400 times "$on_flashinfer --disable draft_graphs_by_support" \
    "$on_flashinfer --disable single_token_attention" -- "${in_turn[@]}" --rounds 11
  all_ended
}

kernel_times() {
  beside 0 kernel-times 300 kernels "0.26.0 $*" --
  all_ended
}

older() {
  (($#)) || set -- 0.20.2 0.22.1
  local releases=("$@")
  on_older 500 '--steps 1 --batch 1 8 32' '--steps 3 --batch 8 32' '--steps 7 --batch 8' \
    '--family eagle3 --steps '{1,3,7}' --batch 1 8 32' -- --rounds 11
}

older_8b() {
  local steps releases=(0.20.2 0.22.1)
  (($#)) || set -- 1 3 7
  for steps; do # four engines on a GPU: its memory
    on_older 400 "--shape 8b --steps $steps --batch 1 8 32" "--shape 8b --family eagle3 --steps $steps --batch 1 8 32" \
      -- --rounds 7
  done
}

# The limit in seconds, and cases, on each of the releases; arguments for all of them.
on_older() {
  local limit=$1 cases=() gpu release
  shift
  while [[ $1 != -- ]]; do cases+=("$1"); shift; done
  for gpu in "${!releases[@]}"; do
    release=${releases[gpu]}
    beside "$gpu" "older-$release" "$limit" times "${cases[@]/#/$release }" -- "${in_turn[@]}" "${@:2}"
  done
  all_ended
}

export EAGLE_MRV2_CACHES=$TMPDIR/compiled
for part; do
  say "$part"
  $part # with its arguments, as words
done
