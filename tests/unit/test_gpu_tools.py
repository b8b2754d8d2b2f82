"""What ci/ does with device code and with timelines; both run on machines with a GPU alone otherwise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ci_scripts import CI, ci_module


def fatbin(*codes: tuple[int, bytes]) -> bytes:
    """As nvcc embeds it: a header, and an entry with its own header for each architecture."""
    entries = b"".join(
        struct.pack("<HHIQ", 2, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", sm).ljust(36, b"\0") + code
        for sm, code in codes
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_device_code_for_other_gpus_is_blanked(tmp_path: Path) -> None:
    pack = ci_module("gpu_pack")
    magic_in_code = struct.pack("<I", 0xBA55ED50) + b"no fatbin"
    before = [
        b"code of the host",
        fatbin((75, b"seventyfive"), (90, b"ninety"), (120, b"later")),
        magic_in_code,
        fatbin((80, b"only eighty")),
    ]
    library = tmp_path / "lib.so"
    library.write_bytes(b"".join(before))
    pack.blank_device_code(library, 90)
    blanked = fatbin((75, bytes(11)), (90, b"ninety"), (120, bytes(5)))
    assert library.read_bytes() == b"".join([before[0], blanked, *before[2:]])


def test_what_a_release_imports_is_packed(tmp_path: Path) -> None:
    """0.33 imports flashmla's Python at start-up, and torch its helper for shared memory and torch.testing."""
    kept = {
        "vllm/third_party/flashmla/flash_mla_interface.py",
        "torch/bin/torch_shm_manager",
        "torch/testing/__init__.py",
    }
    wheel = tmp_path / "release.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, "vllm/third_party/deep_gemm/__init__.py", "torch/test/test_nn.py", "torch/bin/protoc"):
            archive.writestr(name, "")
    site = tmp_path / "site"
    ci_module("gpu_pack").extract([wheel], site, 90)
    assert {str(file.relative_to(site)) for file in site.rglob("*") if file.is_file()} == kept


def machine_with(tmp_path: Path, python: str, *jobs: str, **environment: str) -> subprocess.Popen[str]:
    """ci/gpu_matrix.sh at the times of jobs, on 0.26.0 alone and with a shell script for Python."""
    (tmp_path / "site-0.26.0").mkdir()
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{python}\n")
    script.chmod(0o755)
    return subprocess.Popen(
        ["bash", str(CI / "gpu_matrix.sh"), str(tmp_path), str(tmp_path / "out"), "times", *jobs],
        env=os.environ | {"PYTHON": str(script)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_plan_runs_behind_the_calls(tmp_path: Path) -> None:
    """Each call takes a part, and ends at once; what it leaves running is of another process session."""
    part, out = tmp_path / "part-1", tmp_path / "out"
    part.mkdir()
    out.mkdir()
    slow = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    (part / "unpack.sh").write_text(f'{slow}; echo "$2 of $(cat site)" > "$1/site-$2"')
    (part / "site").write_text("a part")
    plan = tmp_path / "plan.sh"
    plan.write_text(
        'mkdir -p "$TMPDIR/tmp.1/out"; bash ci/gpu_lease.sh wait deps 0.26.0; cat "$ROOT"/* > "$RESULTS/$1"; exit 3'
    )

    def call(*arguments: object) -> str:
        lease = os.environ | {"EAGLE_MRV2_LEASE": str(tmp_path / "lease")}
        command = ["bash", str(CI / "gpu_lease.sh"), *map(str, arguments)]
        run = subprocess.Popen(command, env=lease, stdout=subprocess.PIPE, text=True, start_new_session=True)
        said, _ = run.communicate(timeout=60)
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)  # as the machine does to all that is left of a call
        assert run.returncode == 0
        return said

    call("start", plan, "found")
    call("take", part, "deps", "0.26.0")
    assert "ended" not in call("watch", 1, out)
    (tmp_path / "go").touch()
    assert call("watch", 30, out).endswith("the plan ended: 3\n")
    with tarfile.open(out / "results.tar.gz") as results:
        found = results.extractfile("results/found")
        assert found is not None
        assert found.read() == b"0.26.0 of a part\ndeps of a part\n"
    assert (out / "unfinished.tar.gz").exists()
    assert (tmp_path / "lease" / "checkout" / "ci" / "gpu_plan.sh").exists()


@pytest.mark.parametrize(
    ("gpus", "kept_to", "places"),
    [
        (1, "", {"7": "0 on cores 0-31", "1": "0 on cores 0-31"}),
        (2, "", {"7": "0 on cores 0-15", "1": "1 on cores 16-31"}),
        (2, "1", {"7": "1 on cores 16-31", "1": "1 on cores 16-31"}),
    ],
)
def test_a_gpu_measures_one_thing_at_a_time(gpus: int, kept_to: str, places: dict[str, str], tmp_path: Path) -> None:
    """What the plan has for two GPUs comes one after the other where there is one, or it may use one only."""
    scripts = {
        "bin/nvidia-smi": f"seq {gpus}",
        "bin/nproc": "echo 32",
        "bin/taskset": 'export CORES=$2; shift 2; exec "$@"',
        "ci/gpu_lease.sh": "",
        "ci/gpu_matrix.sh": f"""
            echo "$CUDA_VISIBLE_DEVICES on cores $CORES" >"{tmp_path}/place-${{2##*/}}"
            touch "$1/${{2##*/}}"
            for ((tenths = 0; tenths < 20 && $(ls "$1" | wc -l) < 2; tenths++)); do sleep 0.1; done
            ls -x "$1" >>"{tmp_path}/beside"
            sleep 1 # for the other to see it
            rm "$1/${{2##*/}}"
        """,
    }
    for name, script in scripts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "root").mkdir()
    environment = {"ROOT": str(tmp_path / "root"), "RESULTS": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment["EAGLE_MRV2_GPU"] = kept_to
    shutil.copy(CI / "gpu_plan.sh", tmp_path / "ci")
    subprocess.run(["bash", str(tmp_path / "ci" / "gpu_plan.sh"), "starts"], env=os.environ | environment, check=True)
    at_a_time = [line.split() for line in (tmp_path / "beside").read_text().splitlines()]
    one_by_one = gpus == 1 or kept_to
    expected = []
    for again in ("", "-again"):
        names = [f"starts-0.26.0-{steps}{again}" for steps in "17"]
        expected += [[name] for name in reversed(names)] if one_by_one else [names] * 2
    assert at_a_time == expected
    found = {steps: (tmp_path / f"place-starts-0.26.0-{steps}").read_text().strip() for steps in places}
    assert found == places


def test_a_missing_release_is_found_before_any_starts(tmp_path: Path) -> None:
    """Those that take turns would wait for it until their limit."""
    started = tmp_path / "started"
    run = machine_with(tmp_path, f"touch {started}", "0.26.0", "0.20.2 --steps 7")
    _, error = run.communicate(timeout=60)
    assert (run.returncode, error) == (2, f"error: {tmp_path} has no site-0.20.2\n")
    assert not started.exists()


def test_measuring_waits_for_a_file(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    python = (
        'case "$*" in *pip*) exit ;; esac\n'
        'touch "$4/up-engine"\n'
        'until [ "$(ls "$4" | wc -l)" -ge "$3" ]; do sleep 0.1; done\n'
        f'[ -e "{hold}" ] && echo measured'
    )
    run = machine_with(tmp_path, python, "0.26.0", EAGLE_MRV2_HOLD=str(hold))
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(3)
    hold.touch()
    assert run.wait(30) == 0
    assert (tmp_path / "out" / "times.jsonl").read_text() == "measured\n"


def test_a_job_of_many_words(tmp_path: Path) -> None:
    """Tests that are named one by one make a name that no folder can have."""
    jobs = [f"0.26.0 {'--setting ' * 40}{last}" for last in ("one", "two")]
    assert machine_with(tmp_path, "echo measured", *jobs).wait(60) == 0
    assert (tmp_path / "out" / "times.jsonl").read_text() == "measured\nmeasured\n"


def test_compiled_code_can_be_kept_for_the_next_call(tmp_path: Path) -> None:
    python = 'case "$*" in *pip*) exit ;; esac\necho "$VLLM_CACHE_ROOT $TRITON_CACHE_DIR"'
    jobs = ["0.26.0 --steps 3", "0.26.0 --steps 7"]
    kept = f"{tmp_path}/kept/0.26.0"
    assert machine_with(tmp_path, python, *jobs, EAGLE_MRV2_CACHES=f"{tmp_path}/kept").wait(60) == 0
    assert (tmp_path / "out" / "times.jsonl").read_text() == f"{kept}/vllm {kept}/triton\n" * 2
    for by_job in ({}, {"EAGLE_MRV2_CACHES": f"{tmp_path}/kept", "EAGLE_MRV2_CACHES_OF": "job"}):
        (tmp_path / "site-0.26.0").rmdir()
        assert machine_with(tmp_path, python, *jobs, **by_job).wait(60) == 0
        folders = (tmp_path / "out" / "times.jsonl").read_text().split()
        assert len(set(folders)) == 4
        assert all(folder.startswith(f"{tmp_path}/kept/") == bool(by_job) for folder in folders)


def test_what_one_release_or_each_is_packed_with() -> None:
    further_of = ci_module("gpu_pack").further_of
    asked = ["0.26.0:flashinfer-python==0.6.14", "pytest==9.1"]
    assert further_of("0.26.0", asked) == {"flashinfer-python": "0.6.14", "pytest": "9.1"}
    assert further_of("0.20.2", asked) == {"pytest": "9.1"}


def test_parts_make_up_the_archives(tmp_path: Path) -> None:
    pack = ci_module("gpu_pack")
    archives = []
    for name, size in (("a.tar.xz", 250), ("b.tar.xz", 130)):
        archives.append(tmp_path / name)
        archives[-1].write_bytes(bytes(number % 251 for number in range(size)))
    out = tmp_path / "parts"
    assert pack.split(archives, out, 100) == 4
    files = [file for file in sorted(out.glob("part-*/*")) if file.suffix != ".sh"]
    assert all(sum(file.stat().st_size for file in files if file.parent == part) <= 100 for part in out.iterdir())
    for archive in archives:
        pieces = sorted((file for file in files if file.name.startswith(archive.name)), key=lambda file: file.name)
        assert b"".join(piece.read_bytes() for piece in pieces) == archive.read_bytes()


@pytest.mark.parametrize(("draft_vocab", "setting"), [(None, None), (32768, "trimmed to 32,768 tokens")])
def test_a_line_says_that_the_vocabulary_was_trimmed(draft_vocab: int | None, setting: str | None) -> None:
    """Such a case is none of the head's whole vocabulary."""
    ab_time = ci_module("ab_time")
    row = SimpleNamespace(k=7, batch=1, quartiles=(1.4, 1.5, 1.6), eagle_mrv2=[])
    row.figures = lambda side: SimpleNamespace(iteration_ms=2.0)
    options = SimpleNamespace(shape=ab_time.Shape.b1, family="eagle", disable=[], setting=None, draft_vocab=draft_vocab)
    assert ab_time.line_of(row, options, "0.26.0").get("setting") == setting


def test_what_the_host_does_in_an_iteration() -> None:
    class Speculator:
        def propose(self) -> None:
            time.sleep(0.002)

    class Runner:
        speculator = Speculator()

        def execute_model(self) -> None:
            time.sleep(0.001)

        def sample_tokens(self) -> None:
            self.speculator.propose()

    class Output:
        def get_output(self) -> None:
            time.sleep(0.001)

    runner = Runner()
    get_output = Output.get_output

    def generate() -> None:
        for _ in range(3):
            runner.execute_model()
            runner.sample_tokens()
            Output().get_output()

    found = ci_module("draft_timeline").host_times(runner, Output, generate)
    host, functions = found["host_us"], found["host_functions_us"]
    assert host["execute_model"] >= 1000
    assert 2000 <= host["propose"] <= host["sample_tokens"]
    slowest, us = next(iter(functions.items()))
    assert "sleep" in slowest
    assert us >= 4000  # of one iteration, asleep in all three
    assert host["get_output"] >= 1000
    assert host["iteration"] >= 4000
    assert not vars(runner)
    assert not vars(runner.speculator)
    assert Output.get_output is get_output


def test_what_a_timeline_says() -> None:
    timeline = ci_module("draft_timeline")
    events = []
    for iteration in range(8):
        at = iteration * 1_000_000
        for start, end, name in (
            (0, 500_000, "verify"),
            (510_000, 511_000, "spin_kernel(long)"),
            (520_000, 620_000, "draft"),
            (590_000, 600_000, "beside"),
            (640_000, 720_000, "draft"),
            (730_000, 731_000, "spin_kernel(long)"),
        ):
            events.append(timeline.Event(at + start, at + end, name))
    found = timeline.summary(events)
    assert found["iterations"] == 2
    assert (found["phase_us"], found["busy_us"], found["idle_share"]) == (200.0, 180.0, 0.1)
    assert (found["iteration_us"], found["iteration_busy_us"]) == (1000.0, 682.0)
    assert found["kernels"] == {"draft": {"count": 2, "us": 180.0}, "beside": {"count": 1, "us": 10.0}}
    assert found["largest_gaps_us"] == [40.0, -30.0]
    assert found["iteration_gaps_us"][:2] == [(269.0, "spin_kernel(long)", "verify"), (20.0, "draft", "draft")]


def test_what_a_start_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    for name in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, name, None)
    compiled: dict[str, float] = {}
    ci_module("draft_timeline").record_compilations(compiled)

    def compile_kernel(name: str, module: str = "vllm.v1") -> None:
        given: dict[str, Any] = {"fn": SimpleNamespace(name=name, module=module), "repr": f"{name}(a: i32)"}
        assert not runtime.jit_cache_hook(**given)  # or Triton would leave it
        time.sleep(0.01)
        runtime.jit_post_compile_hook(**given)

    for name in ("once", "twice", "twice"):
        compile_kernel(name)
    compile_kernel("ours", "vllm_eagle_mrv2.kernels.greedy")
    other = threading.Thread(target=compile_kernel, args=("by another thread",))
    other.start()
    other.join()
    assert compiled.keys() == {"once", "twice", "ours(a: i32)"}
    assert compiled["twice"] > compiled["once"] > 0


def test_what_found_no_memory_has_not_run(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    failure = '<failure message="ValueError: Free memory on device cuda:0 (6.32/139.8 GiB) on startup is less than"/>'
    cut_short = '<testcase name="internal"><error message="internal error"/></testcase>'
    cases = f'<testcase name="a">{failure}</testcase><testcase name="b"/>{cut_short}'
    report.write_text(f"<testsuite>{cases}</testsuite>")
    tests = ci_module("gpu_result").read_reports([report])["tests"]
    assert tests == {"passed": 1, "failed": 0, "skipped": 0, "not_run": 1}


def test_pairs_of_one_case_are_one_result(tmp_path: Path) -> None:
    times = tmp_path / "times.jsonl"
    case = {"vllm": "0.26.0", "shape": "1b", "method": "eagle", "k": 3, "batch": 1}
    pair = {"stock": 2.0, "eagle_mrv2": 1.0, "ratio": 2.0, "quartiles": [1.0, 4.0], "rounds": 11}
    other = {"stock": 8.1, "eagle_mrv2": 1.0, "ratio": 8.0, "quartiles": [4.0, 9.0], "rounds": 7}
    lines = [case | pair, case | {"setting": "FlashInfer"} | pair, case | other, case | {"vllm": "0.33.0"} | other]
    times.write_text("\n".join(["a log", *map(json.dumps, lines)]))
    joined, alone = ci_module("gpu_result").read_times([times], "0.26.0")
    del case["vllm"]
    measured = {"stock": [2.0, 8.1], "eagle_mrv2": [1.0, 1.0], "ratio": 4.0, "quartiles": [2.0, 6.0], "rounds": 18}
    assert joined == case | measured
    assert alone == case | {"setting": "FlashInfer"} | pair | {"stock": [2.0], "eagle_mrv2": [1.0]}


def test_what_was_measured_again_moves_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_result = ci_module("gpu_result")
    monkeypatch.setattr(gpu_result, "RESULTS", tmp_path)
    report, times = tmp_path / "tests.xml", tmp_path / "times.jsonl"
    report.write_text('<testsuites><testsuite><testcase classname="gpu" name="a"/></testsuite></testsuites>')

    def put(commit: str, ratios: dict[int, float], *further: str) -> Any:
        case = {"vllm": "0.26.0", "shape": "1b", "method": "eagle", "batch": 1, "rounds": 3}
        times.write_text(
            "\n".join(
                json.dumps(case | {"k": k, "stock": ratio, "eagle_mrv2": 1.0, "ratio": ratio, "quartiles": [1, ratio]})
                for k, ratio in ratios.items()
            )
        )
        command = f"- 0.26.0 --times {times} --date day-{commit} --commit {commit} --command pairs"
        monkeypatch.setattr(sys, "argv", [*command.split(), *further])
        gpu_result.main()
        return json.loads((tmp_path / "h200-vllm-0.26.0.json").read_text())

    with pytest.raises(SystemExit):  # nothing to add to
        put("a", {3: 2.0})
    put("a", {3: 2.0, 7: 4.0}, "--reports", str(report), "--note", "once")
    put("b", {1: 1.0, 3: 8.0})
    result = put("b", {3: 1.0})
    assert [(line["k"], line["ratio"], line.get("commit")) for line in result["iteration_ms"]] == [
        (7, 4.0, "a"),
        (3, 2.8284, None),  # two pairs of one commit
        (1, 1.0, None),
    ]
    assert result["iteration_ms"][1] | {"stock": [8.0, 1.0], "rounds": 6} == result["iteration_ms"][1]
    old = [(each["commit"], [line["ratio"] for line in each["iteration_ms"]]) for each in result["earlier"]]
    assert old == [("a", [2.0])]
    assert result["tests"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert (result["commit"], result["notes"]) == ("b", ["once"])
    assert result["date"] == "day-a"  # of the tests
    assert result["command"] == ["day-a, at a: pairs", "day-b, at b: pairs", "day-b, at b: pairs"]
    assert put("c", {}, "--reports", str(report))["date"] == "day-c"


def test_the_last_report_of_a_test_counts(tmp_path: Path) -> None:
    reports = []
    for number, cases in enumerate(
        (
            '<testcase classname="gpu" name="a"/><testcase classname="gpu" name="b"><failure/></testcase>',
            '<testcase classname="gpu" name="b"/><testcase classname="gpu" name="c"><skipped/></testcase><testcase/>',
        )
    ):
        reports.append(tmp_path / f"{number}.xml")
        reports[-1].write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    read = ci_module("gpu_result").read_reports
    assert read(reports)["tests"] == {"passed": 2, "failed": 0, "skipped": 1}
    assert read(reports[:1])["tests"] == {"passed": 1, "failed": 1, "skipped": 0}


@pytest.mark.parametrize(
    ("steps", "cores"),
    [
        # Two slices of nine cores; the third comparison shares with the first, as one is measured at a time.
        ([1, 3, 7], ["0,1,4,8", "0,1,4,8", "9,10,11,12"]),
        ([3], ["0,1,4,8,9,10,11,12,13"]),
    ],
)
def test_each_comparison_has_cores_of_its_own(tmp_path: Path, steps: list[int], cores: list[str]) -> None:
    given = tmp_path / "given"
    taskset = tmp_path / "taskset"
    taskset.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -c ]; then echo "$2" >> {given}; shift 2; exec "$@"; fi\n'
        'echo "pid 1\'s current affinity list: 0-1,4,8-13"\n'
    )
    taskset.chmod(0o755)
    jobs = [f"0.26.0 --steps {k}" for k in steps]
    run = machine_with(tmp_path, ":", *jobs, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert run.wait(30) == 0
    assert sorted(given.read_text().split()) == cores
