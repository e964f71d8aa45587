"""Ship the folders `recipes` and `docs` inside the wheel, as `prepcli._recipes` and `prepcli._docs`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

DATA = {
    "prepcli._recipes": "recipes",
    "prepcli._docs": "docs",
    "prepcli._docs.explanation": "docs/explanation",
    "prepcli._docs.reference": "docs/reference",
}


def index_readme() -> str:
    """Return the README without its pictures and relative links, which lead nowhere on the page of a package index."""
    readme = Path("README.md").read_text(encoding="utf-8")
    readme = re.sub(r"^!\[[^]]*\]\((?!https:)[^)]*\)\n+", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https:)[^)]*\)", r"\1", readme)


setup(
    long_description=index_readme(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["prepcli*", "trainer*"]), *DATA],
    package_dir=DATA,
    package_data={name: ["*.toml", "*.md", "how-to/*.md", "*.svg", "*.css"] for name in DATA},
)
