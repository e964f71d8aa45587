"""Ship the folders `recipes` and `docs` inside the wheel, as `prepcli._recipes` and `prepcli._docs`."""

from setuptools import find_packages, setup

DATA = {"prepcli._recipes": "recipes", "prepcli._docs": "docs"}

setup(
    packages=[*find_packages(include=["prepcli*", "trainer*"]), *DATA],
    package_dir=DATA,
    package_data={"prepcli._recipes": ["*.toml"], "prepcli._docs": ["*.md", "*/*.md", "*.svg"]},
)
