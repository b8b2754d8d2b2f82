"""What pyproject.toml cannot say: an index page has no files to link to."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup


def readme_of_an_index_page() -> str:
    """The README; a file that it links to is named by its path in the source distribution, which carries it."""
    text = Path("README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^]]+)\]\((?!#|https:)([^)]+)\)", r"\1 (`\2` in the source distribution)", text)


setup(long_description=readme_of_an_index_page(), long_description_content_type="text/markdown")
