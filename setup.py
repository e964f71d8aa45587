"""Ship the folders `recipes` and `docs` inside the wheel, as `prepcli._recipes` and `prepcli._docs`."""

from setuptools import find_packages, setup

DATA = {
    "prepcli._recipes": "recipes",
    "prepcli._docs": "docs",
    "prepcli._docs.explanation": "docs/explanation",
    "prepcli._docs.reference": "docs/reference",
}

setup(
    packages=[*find_packages(include=["prepcli*", "trainer*"]), *DATA],
    package_dir=DATA,
    package_data={name: ["*.toml", "*.md", "how-to/*.md", "*.svg"] for name in DATA},
)
