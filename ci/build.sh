#!/usr/bin/env bash
# Builds a release into dist/ and checks it:  bash ci/build.sh
#
# dist/ gets the source distribution, the wheel that is built from it, constraints/vllm-0.NN.txt for each supported minor
# release of vLLM, and SHA256SUMS of them all. The wheel is installed into a clean environment without vLLM, where doctor
# must end with status 2. Needs Python 3.11, its venv module and a package index.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf '[build] %s\n' "$*"; }
fail() { printf '[build] error: %s\n' "$*" >&2; exit 1; }

say "sdist and wheel"
"$python" -m venv "$work/builder"
"$work/builder/bin/pip" install -q --disable-pip-version-check build packaging
rm -rf dist
mkdir "$work/source"
git archive HEAD | tar -x -C "$work/source"
# A development version names its commit, in the package too.
sed -i "/^__version__ = .*dev/s/\"\$/+g$(git rev-parse --short HEAD)\"/" "$work/source/vllm_eagle_mrv2/__init__.py"
"$work/builder/bin/python" -m build --outdir dist "$work/source" >"$work/log" 2>&1 || { cat "$work/log"; fail "the build failed"; }
wheel=$(echo dist/*.whl)
version=$(cut -d - -f 2 <<<"${wheel##*/}")

say "constraints and checksums of $version"
"$work/builder/bin/python" tools/constraints.py "$version" --output dist/constraints >"$work/log"
(cd dist && sha256sum ./*.whl ./*.tar.gz constraints/*.txt >SHA256SUMS && sha256sum --quiet --check SHA256SUMS)

say "the wheel, in an environment without vLLM"
"$python" -m venv "$work/clean"
"$work/clean/bin/pip" install -q --disable-pip-version-check "$wheel"
cd "$work" # away from the sources
[[ $(clean/bin/vllm-eagle-mrv2 --version) == "$version" ]] || fail "the wheel is of another version than its name says"
status=0
clean/bin/vllm-eagle-mrv2 doctor >log || status=$?
[[ $status == 2 ]] || { cat log; fail "doctor ended with status $status, not 2"; }
say "built $version"
