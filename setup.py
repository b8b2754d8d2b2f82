"""What pyproject.toml cannot say: a wheel carries the recorded surfaces, and an index page has no files to link to."""

from __future__ import annotations

import re
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


def readme_of_an_index_page() -> str:
    """The README; a file that it links to is named by its path in the source distribution, which carries it."""
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^]]+)\]\((?!#|https:)([^)]+)\)", r"\1 (`\2` in the source distribution)", text)


setup(
    cmdclass={"build_py": BuildWithSurfaces},
    long_description=readme_of_an_index_page(),
    long_description_content_type="text/markdown",
)
