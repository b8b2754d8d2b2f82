#!/usr/bin/env bash
# Starts, tests and the cases that have a target, on one or two H200, for ci/gpu_lease.sh:
#
#   bash ci/gpu_lease.sh start ci/gpu_plan.sh [starts] [tests] [pairs] [timelines] [flashinfer]
#
# all of them where none is named. starts: what engines take that start alone, their caches empty. tests: tests/gpu on four
# releases, the kernels' tests and compute-sanitizer. pairs: stock and ours in turn. timelines: where the time of draft
# phases goes. flashinfer: the pair on FlashInfer, which a site of 0.26.0 may bring (ci/gpu_pack.py --with).
set -u
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
(($#)) || set -- starts tests pairs timelines flashinfer
parts=" $* "
say() { printf '[%(%T)T] %s\n' -1 "$*"; }
asked() { [[ $parts == *" $1 "* ]] && say "$1"; }
gpus=$(nvidia-smi -L | wc -l) cores=$(nproc)
memory=(--engine '{"kv_cache_memory_bytes":1073741824}')
flashinfer=(--engine '{"kv_cache_memory_bytes":1073741824,"attention_config":{"backend":"FLASHINFER"}}')
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 # 0.33's torch, with the cuDNN that is there
running=()

# Beside others: first or second half of the machine (0, 1), a name, the limit in seconds, arguments of ci/gpu_matrix.sh
beside() {
  local share=$((cores / gpus)) gpu=$(($1 % gpus)) name=$2 limit=$3
  shift 3
  {
    CUDA_VISIBLE_DEVICES=$gpu EAGLE_MRV2_LIMIT=$limit taskset -c "$((gpu * share))-$((gpu * share + share - 1))" \
      bash ci/gpu_matrix.sh "$ROOT" "$RESULTS/$name" "$@" >"$RESULTS/$name.log" 2>&1
    say "$name: $?"
  } &
  running+=($!)
}
all_ended() { wait "${running[@]}"; running=(); }

bash ci/gpu_lease.sh wait deps 0.26.0
if asked starts; then
  beside 0 starts-7 200 timelines '0.26.0 stock' '0.26.0 eagle_mrv2' -- --steps 7 "${memory[@]}"
  beside 1 starts-1 200 timelines '0.26.0 stock' '0.26.0 eagle_mrv2' -- --steps 1 "${memory[@]}"
  all_ended
fi

bash ci/gpu_lease.sh wait 0.20.2 0.22.1 0.33.0
export EAGLE_MRV2_CACHES=$TMPDIR/compiled
if asked tests; then
  # 18 engines a GPU at most: its memory. 0.20.2 has a process for each test, and no time for all.
  engines='--ignore=tests/gpu/test_sanitizer.py --ignore=tests/gpu/test_two_gpus.py'
  most="tests/gpu/test_graphs.py tests/gpu/test_mtp_graphs.py tests/gpu/test_sleep.py"
  units=(tests/unit/test_{batch_queue,kernels,single_token_attention,row_product,few_rows_product,greedy,compile_ahead}.py)
  reports=(-rfE --tb=short)
  beside 0 tests-0 420 tests "0.26.0 $engines -n 9" "0.22.1 $engines -n 8" -- "${reports[@]}"
  EAGLE_MRV2_PROCESSES=8 beside 1 tests-1 420 tests "0.20.2 $most" "0.33.0 $engines -n 6" -- "${reports[@]}"
  beside 1 units 420 tests "0.26.0 tests/gpu/test_sanitizer.py ${units[*]} -n 3 --dist loadfile" -- "${reports[@]}"
  all_ended
fi
if asked pairs; then
  beside 0 pairs-0 500 times '0.26.0 --steps 3' '0.26.0 --steps 7 --batch 1 32' \
    '0.26.0 --shape 8b --family eagle3 --steps 5' '0.26.0 --steps 7 --draft-vocab 32768' '0.22.1 --steps 3' \
    '0.22.1 --steps 7 --batch 1 32' -- --rounds 21 --tokens 96 "${memory[@]}"
  beside 1 pairs-1 500 times '0.20.2 --steps 7 --batch 1 32' '0.20.2 --steps 7 --batch 32 1 --setting second' \
    '0.20.2 --steps 3' '0.26.0 --steps 1 --batch 1 8 32' '0.33.0 --steps 3' '0.33.0 --steps 7 --batch 1 32' -- \
    --rounds 21 --tokens 96 "${memory[@]}"
  all_ended
fi
if asked timelines; then
  beside 0 timelines-0 300 timelines '0.20.2 stock' '0.20.2 eagle_mrv2' -- --steps 7 --batch 32 "${memory[@]}"
  beside 1 timelines-1 300 timelines '0.26.0 stock' '0.26.0 eagle_mrv2' -- --steps 7 --batch 32 "${memory[@]}"
  all_ended
fi
if asked flashinfer; then # it compiles its kernels first
  [[ ! -e $ROOT/site-0.26.0/flashinfer ]] ||
    beside 0 flashinfer 300 times '0.26.0 --steps 3' -- --rounds 15 --tokens 96 "${flashinfer[@]}"
  all_ended
fi
