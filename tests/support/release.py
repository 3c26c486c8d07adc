"""What a release has to be: `make release-check`.

Version and changelog agree; wheel and source archive in `dist/` have every file and nothing else; and the smoke set
passes outside of the clone, where nothing but the wheel is installed. With `--borrow` the wheel stands alone in its
environment too, but what it depends on comes from the environment that runs this: seconds instead of downloads.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
DATA = (".py", ".cpp", ".hpp", ".yaml", ".html", ".typed")
ARCHIVED = ["CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "README.md"]
ARCHIVED += ["SECURITY.md", "pyproject.toml", "setup.py"]
SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d{2}-\d{2}))?\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def disagreement(version: str, changelog: str) -> str | None:
    """Say in which way a version and the changelog's sections do not fit together; None if they do."""
    sections = [section for section in SECTION.findall(changelog) if section[0] != "Unreleased" or section[2].strip()]
    if not sections:
        return "the changelog has no section"
    title, date, _ = sections[0]
    if ".dev" in version:
        return None if title == "Unreleased" else f"{version} is under way, but the changelog has nothing unreleased"
    if title != version:
        return f"version {version}, but the changelog's newest section with entries is {title}"
    return None if date else f"the changelog gives {version} no date"


def packaged(tracked: Iterable[str], packages: Iterable[str]) -> dict[str, str]:
    """Map each tracked file that is part of the package to its name in the wheel.

    Args:
        tracked: files, relative to the root.
        packages: folders of the root that install as `retime.FOLDER`.
    """
    heads = {"src/retime/": "retime/"} | {f"{name}/": f"retime/{name}/" for name in packages}
    return {
        file: heads[head] + file.removeprefix(head)
        for file in tracked
        for head in heads
        if file.startswith(head) and file.endswith(DATA)
    }


def faults_of_wheel(names: Iterable[str], expected: Iterable[str]) -> list[str]:
    """Say which files a wheel lacks, and which it should not have."""
    there, wanted = set(names), set(expected)
    more = {name for name in there - wanted if not PurePosixPath(name).parts[0].endswith(".dist-info")}
    libraries = {name for name in more if name.startswith("retime/") and name.endswith(".so")}
    return [
        *(f"the wheel lacks {name}" for name in sorted(wanted - there)),
        *(f"the wheel should not have {name}" for name in sorted(more - libraries)),
    ]


def faults_of_archive(names: Iterable[str], expected: Iterable[str]) -> list[str]:
    """Say which files a source archive lacks; names are relative to its folder."""
    return [f"the source archive lacks {name}" for name in sorted(set(expected) - set(names))]


def try_installed(wheel: Path, libraries: bool, borrow: bool) -> None:
    """Install the wheel into an environment of its own and run the smoke set there, outside of the clone.

    Args:
        wheel: its file.
        libraries: it has its C++ parts compiled, so that they must work without a compiler.
        borrow: take what it depends on from the environment that runs this.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "venv")
        venv.create(own, symlinks=True)
        python = own / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        if borrow:
            (packages,) = own.glob("lib/python*/site-packages")
            lent = [path for path in sys.path if path.endswith("site-packages")]
            (packages / "borrowed.pth").write_text("\n".join(lent) + "\n")  # without those folders' own .pth files
            run(*pip, "--no-deps", "--ignore-installed", str(wheel))
        else:
            run(*pip, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[accelerate,transformers]")
        compiler = {"CXX": "/none"} if libraries else {}
        environment = os.environ | compiler | {"XDG_CACHE_HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTHONPATH", None)
        run(str(python), "-P", str(ROOT / "tests" / "support" / "smoke.py"), folder=folder, environment=environment)


def run(*command: str, folder: str | None = None, environment: dict[str, str] | None = None) -> None:
    if subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        sys.exit(f"release-check: failed: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--borrow", action="store_true", help="take torch and the rest from this environment")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    (wheel,), (archive,) = (list((ROOT / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = [name for name in listed.splitlines() if (ROOT / name).exists()]
    files = packaged(tracked, (path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"))
    with zipfile.ZipFile(wheel) as one:
        inside = one.namelist()
    with tarfile.open(archive) as other:
        archived = [name.partition("/")[2] for name in other.getnames()]
    tests = [name for name in tracked if name.startswith("tests/")]
    faults = [
        *filter(None, [disagreement(version, (ROOT / "CHANGELOG.md").read_text("utf-8"))]),
        *faults_of_wheel(inside, files.values()),
        *faults_of_archive(archived, [*files, *tests, *ARCHIVED]),
        *(f"{one.name} is not {version}" for one in (wheel, archive) if f"-{version}" not in one.name),
    ]
    if faults:
        sys.exit("release-check: " + "\nrelease-check: ".join(faults))
    libraries = [name for name in inside if name.endswith(".so")]
    print(f"{wheel.name}: {len(inside)} files, {len(libraries)} compiled; {archive.name}: {len(archived)}", flush=True)
    try_installed(wheel, bool(libraries), options.borrow)


if __name__ == "__main__":
    main()
