#!/usr/bin/env python3
"""Packs stock vLLM releases for ci/gpu_matrix.sh on a machine that has a GPU and torch, but no network.

    python ci/gpu_pack.py OUT 0.26.0 0.22.1 --have packages.txt
    python ci/gpu_pack.py OUT 0.33.0 --have packages.txt --with-torch

``--have`` names a file with the packages of that machine, by name alone; what else a release needs goes into the pack,
but for the NVIDIA libraries.  ``--with-torch`` is for releases that need another torch than the machine's: torch,
triton, torchvision and NCCL as the release asks for them, and all else that it needs, lie in its own folder then.

OUT gets part-1, part-2 ..., folders of at most ``--part-mb`` each, to be carried over and put into one folder there;
``bash unpack.sh ROOT`` in it then makes ROOT/site-X.Y.Z and ROOT/site-deps, and ``bash unpack.sh ROOT deps X.Y.Z`` only
those, as soon as their parts are there: ``deps`` comes first, then the releases as they are named.  Device code that is
not for ``--sm`` is blanked before it is compressed; what is packed runs on that GPU alone.  Needs tar, xz and strip.
"""

from __future__ import annotations

import argparse
import json
import mmap
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ENVIRONMENT = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
TORCH = ("torch", "triton", "torchvision", "nvidia-nccl-cu13")
# On the machine, or of no use to a dense model on one GPU.
LEFT_OUT = re.compile(
    r"(torch(|audio|vision|codec)|triton|nvidia-.*|cuda-.*|nvtx|tilelang|quack-kernels|humming-kernels|tokenspeed-.*|"
    r"opencv-.*|pynvvideocodec|flashinfer-.*|fastsafetensors|instanttensor|numba|vllm)"
)
# Of the wheels: what only development, other GPUs or other models use.
SKIPPED = re.compile(
    r"^torch/(share/|test/|bin/protoc)|libtorch_cuda_linalg|triton/backends/nvidia/lib/cupti|ptxas-blackwell|libproton|"
    r"triton/(instrumentation|plugins)/|triton/backends/amd/lib/|nccl/include/|_vllm_fa2_C|vllm-rs|_rust_tool_parser|"
    r"third_party/deep_gemm/|pycountry/locales/"
)
FATBIN = struct.Struct("<IHHQ")  # magic, version, size of the header, size of what follows
ENTRY = struct.Struct("<HHIQ")  # kind, attributes, size of the header, size of the code; the architecture is at 28
FATBIN_MAGIC, ARCHITECTURE_AT = struct.pack("<I", 0xBA55ED50), 28

UNPACK = """set -euo pipefail
root=$1
shift
mkdir -p "$root"
[[ $# -gt 0 ]] || set -- $(ls | sed -n 's/^site-\\(.*\\)\\.tar\\.xz\\.000$/\\1/p')
jobs=()
for site; do
  cat "site-$site".tar.xz.* | xz -dc -T8 | tar x -C "$root" &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
"""


def pip(*arguments: str) -> None:
    """Run pip for the GPU machine's Python, on any glibc up to 2.39."""
    tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    tags += ["--platform=manylinux2014_x86_64", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    subprocess.run([sys.executable, "-m", "pip", *arguments, *tags], check=True)


def download(requirements: Iterable[str], cache: Path) -> list[Path]:
    """The wheels of the requirements, each ``name==version``, without what they need."""
    folders = {one: cache / one for one in requirements}
    for requirement, folder in folders.items():
        if not list(folder.glob("*.whl")):
            pip("download", "-q", "--no-deps", "-d", str(folder), requirement)
    return [next(folder.glob("*.whl")) for folder in folders.values()]


def requirements_of(wheel: Path) -> Iterator[Requirement]:
    """What a wheel needs on the GPU machine."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        for line in archive.read(metadata).decode().splitlines():
            if line.startswith("Requires-Dist: "):
                requirement = Requirement(line.removeprefix("Requires-Dist: "))
                if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
                    yield requirement


def resolve(requirements: list[str]) -> dict[str, str]:
    """Name -> version of all that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip(
            "install",
            "-q",
            "--dry-run",
            "--ignore-installed",
            "--target",
            folder,
            "--report",
            str(report),
            *requirements,
        )
        installed = json.loads(report.read_text())["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"]["version"] for one in installed}


def extract(wheels: Iterable[Path], site: Path, sm: int) -> None:
    """Unpack wheels into a folder, without what nobody needs there."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for item in archive.infolist():
                if SKIPPED.search(item.filename):
                    continue
                path = Path(archive.extract(item, site))
                mode = item.external_attr >> 16
                if mode:
                    path.chmod(mode | 0o600)
    for library in [*site.rglob("*.so"), *site.rglob("*.so.*")]:
        blank_device_code(library, sm)
    for triton in site.glob("triton/_C/libtriton.so"):
        subprocess.run(["strip", "--strip-unneeded", triton], check=True)


def blank_device_code(library: Path, sm: int) -> None:
    """Zero, in place, the device code of a library for other GPUs, wherever there is some for ``sm`` beside it."""
    if not library.stat().st_size:
        return
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as code:
        at = code.find(FATBIN_MAGIC)
        while at >= 0:
            _, version, header, size = FATBIN.unpack_from(code, at)
            end = at + header + size
            if (version, header) != (1, 16) or end > len(code):
                at = code.find(FATBIN_MAGIC, at + len(FATBIN_MAGIC))
                continue
            entries = list(_entries(code, at + header, end))
            if any(architecture == sm for architecture, _, _ in entries):
                for architecture, start, length in entries:
                    if architecture != sm:
                        code[start : start + length] = bytes(length)
            at = code.find(FATBIN_MAGIC, end)


def _entries(code: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Architecture, start and length of each piece of device code."""
    while at + 64 <= end:
        _, _, header, size = ENTRY.unpack_from(code, at)
        if header < 32 or at + header + size > end:
            return
        yield struct.unpack_from("<I", code, at + ARCHITECTURE_AT)[0], at + header, size
        at += header + size


def split(archives: list[Path], out: Path, limit: int) -> int:
    """Cut archives into parts; returns how many there are."""
    shutil.rmtree(out, ignore_errors=True)
    part = room = 0
    for archive in archives:
        with archive.open("rb") as data:
            for index in range(1000):
                if room < limit // 50:
                    part, room = part + 1, limit
                    (out / f"part-{part}").mkdir(parents=True)
                chunk = data.read(room)
                if not chunk:
                    break
                (out / f"part-{part}" / f"{archive.name}.{index:03d}").write_bytes(chunk)
                room -= len(chunk)
    (out / "part-1" / "unpack.sh").write_text(UNPACK)
    return part


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("releases", nargs="+")
    parser.add_argument("--have", type=Path, required=True)
    parser.add_argument("--with-torch", action="store_true")
    parser.add_argument(
        "--with", dest="further", nargs="+", default=[], metavar="NAME==VERSION", help="in each release's own folder"
    )
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--part-mb", type=int, default=52)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "vllm-gpu-pack")
    options = parser.parse_args()

    have = {str(canonicalize_name(line.split("==")[0])) for line in options.have.read_text().split()}
    further = dict(one.split("==") for one in options.further)
    shared: dict[str, str] = {}
    sites: dict[str, list[str]] = {}
    for release in options.releases:
        (wheel,) = download([f"vllm=={release}"], options.cache)
        needs: dict[str, Requirement] = {canonicalize_name(one.name): one for one in requirements_of(wheel)}
        missing = [str(one) for name, one in needs.items() if name not in have and not LEFT_OUT.fullmatch(name)]
        found = resolve(missing)
        found = {name: pin for name, pin in found.items() if name not in have and not LEFT_OUT.fullmatch(name)}
        own = {"vllm": release} | further
        if options.with_torch:
            (torch,) = download([f"torch{needs['torch'].specifier}"], options.cache)
            needs |= {canonicalize_name(one.name): one for one in requirements_of(torch)}
            own |= {name: str(needs[name].specifier).lstrip("=~") for name in TORCH} | found
        else:
            shared |= {name: pin for name, pin in found.items() if name not in shared}
        sites[f"site-{release}"] = [f"{name}=={pin}" for name, pin in own.items()]
    if shared:
        sites = {"site-deps": [f"{name}=={pin}" for name, pin in sorted(shared.items())]} | sites

    archives = []
    with tempfile.TemporaryDirectory() as folder:
        for name, requirements in sites.items():
            extract(download(requirements, options.cache), Path(folder) / name, options.sm)
            archive = Path(folder) / f"{name}.tar.xz"
            pack = f"tar -C {folder} -c {name} | xz -T0 -4 --block-size=24MiB -c > {archive}"
            subprocess.run(["bash", "-o", "pipefail", "-c", pack], check=True)
            shutil.rmtree(Path(folder) / name)
            archives.append(archive)
            print(f"{name}: {len(requirements)} packages, {archive.stat().st_size / 1e6:.0f} MB", flush=True)
        print(f"{split(archives, options.out, options.part_mb * 1_000_000)} parts under {options.out}")


if __name__ == "__main__":
    main()
