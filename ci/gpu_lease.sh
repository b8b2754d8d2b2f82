#!/usr/bin/env bash
# On a GPU machine that is lent for one call at a time, and takes so many MB with each: brings what ci/gpu_pack.py packed
# part by part, and runs a plan behind the calls.
#
#   bash ci/gpu_lease.sh take PART [SITE...]       keep a part, and unpack these sites (deps, 0.26.0), now complete
#   bash ci/gpu_lease.sh start PLAN [ARGUMENT...]  run a script in a copy of this checkout
#   bash ci/gpu_lease.sh wait SITE...              for the plan: until these sites are unpacked
#   bash ci/gpu_lease.sh watch SECONDS OUT         until the plan has ended, or so long; then what there is, into OUT
#
# A plan finds the sites in $ROOT, for ci/gpu_matrix.sh, and leaves its results in $RESULTS.
set -euo pipefail
usage() { sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
[[ $# -ge 2 ]] || usage
lease=${EAGLE_MRV2_LEASE:-/tmp/eagle-mrv2-lease}
export ROOT=$lease/sites RESULTS=$lease/results TMPDIR=$lease/tmp
mkdir -p "$ROOT" "$RESULTS" "$TMPDIR" "$lease"/{parts,ready}
what=$1
shift

# The call's end ends all that is of its session; this returns once the command has one of its own.
behind() {
  local command=$1 begins
  shift
  begins=$(mktemp)
  BEGINS=$begins setsid nohup bash -euc "rm \"\$BEGINS\"; $command" "$@" >>"$lease/log" 2>&1 </dev/null &
  while [[ -e $begins ]]; do sleep 0.05; done
}

case $what in
take)
  cp --remove-destination "$1"/* "$lease/parts/"
  shift
  (($# == 0)) || behind 'cd "$0/parts"; for site; do bash unpack.sh "$ROOT" "$site"; touch "$0/ready/$site"; done' \
    "$lease" "$@"
  ;;
start)
  cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
  rm -rf "$lease/checkout" "$lease/ended"
  mkdir "$lease/checkout"
  cp -r ci tests vllm_eagle_mrv2 pyproject.toml setup.py README.md LICENSE CHANGELOG.md "$lease/checkout/"
  behind 'cd "$0/checkout"; status=0; bash "$@" || status=$?; echo "the plan ended: $status" | tee "$0/ended"' "$lease" "$@"
  ;;
wait)
  for site; do until [[ -e $lease/ready/$site ]]; do sleep 0.5; done; done
  ;;
watch)
  for ((second = 0; second < $1; second++)); do [[ ! -e $lease/ended ]] || break; sleep 1; done
  tail -n 20 "$lease/log"
  tar -czf "$2/results.tar.gz" -C "$lease" log results
  # And what ci/gpu_matrix.sh has of jobs that have not ended.
  mapfile -t unfinished < <(cd "$TMPDIR" && compgen -G 'tmp.*/out')
  ((${#unfinished[@]} == 0)) || tar -czf "$2/unfinished.tar.gz" -C "$TMPDIR" "${unfinished[@]}" || true
  ;;
*) usage ;;
esac
