"""Every package in the root's folders installs as ``retime.FOLDER``; everything else stands in pyproject.toml.

A wheel that is built where torch and a C++ compiler are (``--no-build-isolation``) has the C++ parts compiled, and is
for this platform. Any other wheel is for all, and compiles them on first use.
"""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGES = find_packages(exclude=["tests*", "build*"])


class BuildAndCompile(build_py):
    """Put the compiled C++ parts beside their sources in the build folder."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # compiled on first use: sources change there
            return
        built = Path(self.build_lib, "retime")
        for stale in built.rglob("*.so"):
            stale.unlink()
        sys.dont_write_bytecode = True  # of what is imported from the build folder: it would go into the wheel
        package = sys.modules["retime"] = ModuleType("retime")  # without its __init__, which asks for all dependencies
        package.__path__ = [str(built.resolve())]
        try:
            from retime.foundations.cpu_pool.pool import POOL
            from retime.mechanisms.cpu_accumulation.shared_sums import SUMS

            for source in (POOL, SUMS):
                source.compile(source.shipped)
        except (ImportError, RuntimeError) as error:
            self.warn(f"C++ parts are left to be compiled on first use: {error}")


class PlatformWheel(bdist_wheel):
    """Name the platform in a wheel that has compiled parts; they fit every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if any(Path(self.bdist_dir).rglob("*.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return python, abi, platform


setup(
    packages=["retime", *(f"retime.{name}" for name in PACKAGES)],
    package_dir={"retime": "src/retime"} | {f"retime.{name}": name for name in PACKAGES if "." not in name},
    cmdclass={"build_py": BuildAndCompile, "bdist_wheel": PlatformWheel},
)
