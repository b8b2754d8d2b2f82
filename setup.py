"""What pyproject.toml cannot say: a wheel carries the recorded surfaces, which live in ci/surfaces."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SURFACES = Path("ci", "surfaces")


class BuildWithSurfaces(build_py):
    """Copies ``ci/surfaces`` to ``vllm_eagle_mrv2/surfaces``, but for an editable install, which reads the former."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "vllm_eagle_mrv2", "surfaces")
            self.mkpath(str(target))
            for file in sorted(SURFACES.glob("*.json")):
                self.copy_file(str(file), str(target / file.name), preserve_mode=False)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(str(file) for file in sorted(SURFACES.glob("*.json")))]


setup(cmdclass={"build_py": BuildWithSurfaces})
