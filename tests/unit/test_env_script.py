"""``source ci/env.sh`` in a user's shell leaves the environment there, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import CI

pytestmark = pytest.mark.any_release

ENV = CI / "env.sh"


def bash(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EAGLE_MRV2_", "HF_HUB_"))}
    return subprocess.run(
        ["bash", "-c", script, "bash", str(ENV)],
        env={**kept, "EAGLE_MRV2_PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("own", ["", "set -u", "set -euo pipefail", "shopt -s nullglob"])
def test_options_and_functions_stay_as_they_were(own: str) -> None:
    look = 'look() { set +o; shopt; trap; declare -F; echo "$@"; }; set -- one two'
    done = bash(f'{own}\nenv=$1; {look}; before=$(look "$@"); source "$env"; [[ $(look "$@") == "$before" ]]')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_it_sets() -> None:
    done = bash(
        'source "$1"; printf "%s\\n" "${PATH%%:*}" "${#CPU_RELEASES[@]}" "${OVERLAID_RELEASES[0]}"; '
        "bash -c 'echo \"$PYTHON $EAGLE_MRV2_STACK $HF_HUB_OFFLINE\"'"
    )
    assert done.stderr == ""
    folder, releases, overlaid, exported = done.stdout.splitlines()
    assert folder == str(Path(sys.executable).parent)
    assert int(releases) > 1
    assert overlaid
    assert exported == f"{sys.executable} given 1"


def test_what_is_set_stays() -> None:
    done = bash('source "$1"; echo "$HF_HUB_OFFLINE $PYTHONPATH"', HF_HUB_OFFLINE="0", PYTHONPATH="/a b:/c'd")
    assert done.stdout == "0 /a b:/c'd\n"


def test_a_setting_of_the_shell_that_is_not_exported() -> None:
    done = bash('unset EAGLE_MRV2_PYTHON; EAGLE_MRV2_STACK=tpu; source "$1"; echo "status $?"')
    assert "EAGLE_MRV2_STACK is cpu or cuda, not 'tpu'" in done.stderr
    assert done.stdout == "status 1\n"


@pytest.mark.parametrize(("strict", "stdout"), [("", "status 1\n"), ("set -e", "")])
def test_an_error_ends_a_script_and_not_a_users_shell(strict: str, stdout: str) -> None:
    done = bash(f'{strict}\nsource "$1"; echo "status $?"', EAGLE_MRV2_PYTHON="/no/such/python")
    assert done.stderr == "[env] error: EAGLE_MRV2_PYTHON=/no/such/python is not a program\n"
    assert done.stdout == stdout


def test_a_command_runs_in_it() -> None:
    done = bash('bash "$1" bash -c \'echo "$EAGLE_MRV2_STACK $1"; exit 3\' bash "two words"')
    assert (done.stdout, done.returncode) == ("given two words\n", 3)
