"""Every package in the root's folders installs as ``retime.FOLDER``; everything else stands in pyproject.toml."""

from setuptools import find_packages, setup

PACKAGES = find_packages(exclude=["tests*", "build*"])

setup(
    packages=["retime", *(f"retime.{name}" for name in PACKAGES)],
    package_dir={"retime": "src/retime"} | {f"retime.{name}": name for name in PACKAGES if "." not in name},
)
