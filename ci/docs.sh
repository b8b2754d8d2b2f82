#!/usr/bin/env bash
# Builds docs/, and lints YAML and the files of deploy/, with the tools of the extras docs and lint on PATH.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdocs build --strict --quiet --site-dir "$site"
yamllint --strict .
hadolint deploy/Dockerfile
kubernetes-validate --strict --quiet deploy/kubernetes.yaml
if command -v systemd-analyze >/dev/null; then # the unit names programs of the machine that it will run on
  faults=$(systemd-analyze verify --man=no deploy/*.service 2>&1 | grep -v 'is not executable: No such file') || true
  if [[ -n $faults ]]; then
    printf '%s\n' "$faults" >&2
    exit 1
  fi
fi
