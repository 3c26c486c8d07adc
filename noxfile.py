"""Versions: `make matrix` tries the smoke set on each combination, in a fresh environment, and writes docs/versions.md.

    nox                        # all of them
    nox -s "smoke(newest)"     # one
    nox -s page                # docs/versions.md from what has run; rows that have not run again stay as they are

Environments are made by uv, and removed behind their run; each Python has to be on the PATH.
"""

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import nox

nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = False

OUTCOMES, BUILT, PAGE = Path("outputs/versions"), Path("outputs/versions/wheel"), Path("docs/versions.md")


class Versions(NamedTuple):
    """Empty: the newest on the index; of packages that are not named, what goes with these."""

    torch: str = ""
    lightning: str = ""
    accelerate: str = ""
    transformers: str = ""
    python: str = "3.11"
    others: tuple[str, ...] = ()


OLDEST = {"lightning": "2.6.0", "accelerate": "1.10.0", "transformers": "4.57.0"}
OLDEST_OTHERS = {
    "torchmetrics": "1.0.0",
    "psutil": "5.9.0",
    "hydra-core": "1.3.2",
    "matplotlib": "3.8.0",
    "rich": "13.0.0",
    "scikit-learn": "1.4.0",
}
COMBINATIONS = {
    "oldest": Versions("2.11.0", **OLDEST, others=tuple(f"{name}=={number}" for name, number in OLDEST_OTHERS.items())),
    "torch-2.11": Versions("2.11.0"),
    "torch-2.12": Versions("2.12.1"),
    "torch-2.13": Versions("2.13.0"),
    "torch-2.13-oldest": Versions("2.13.0", **OLDEST),
    "torch-2.14": Versions("2.14.1"),
    "newest-torch-oldest": Versions(**OLDEST),
    "newest": Versions(),
    "python-3.12": Versions(python="3.12"),
    "python-3.13": Versions(python="3.13"),
    "python-3.14": Versions(python="3.14"),
}
NAMES = ("python", "torch", "lightning", "accelerate", "transformers")
OTHERS = "The environment of `oldest` had besides:"
HEAD = """# Versions

Each row is an environment of its own, in which the wheel was installed and the smoke set ran: a small model trained by
every strategy's name, callbacks, modules, bare loops and the doors for Accelerate and transformers, against plain
training, bit by bit where that is promised, and a short recipe. `make matrix` makes the environments and writes this
page, or `nox -s "smoke(NAME)"` and `nox -s page` one row of it. Lower bounds in `pyproject.toml` are the oldest
versions that passed. What the index calls newest changes: a row says what was there on its day.

"""

FOOT = """
Linux on x86-64, processors only. What is tried on two ranks runs in forks of one process; `_spawn` names and processes
that Lightning starts are left to the tests, which run with the versions in `constraints.txt`. Hydra 1.3 does not start
on Python 3.14, whose argparse asks more of help texts: recipes do not run there, and the smoke set leaves its recipe
out. [GPUs](gpu.md) have a page of their own.
"""


@nox.session(python=False)
def wheel(session: nox.Session) -> None:
    """Build the wheel that all of them install; each torch compiles the C++ parts anew."""
    shutil.rmtree(BUILT, ignore_errors=True)
    session.run("uv", "build", "--wheel", "--quiet", "--out-dir", str(BUILT), external=True)


@nox.session(requires=["wheel"])
@nox.parametrize("python, name", [nox.param(one.python, name, id=name) for name, one in COMBINATIONS.items()])
def smoke(session: nox.Session, name: str) -> None:
    """Install one combination and run the smoke set."""
    wanted = COMBINATIONS[name]
    outcome = OUTCOMES / f"{name}.json"
    outcome.unlink(missing_ok=True)
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    (built,) = BUILT.glob("*.whl")
    try:
        numbers = {package: getattr(wanted, package) for package in NAMES if package != "python"}
        pinned = [f"{package}=={number}" if number else package for package, number in numbers.items()]
        session.install(f"{built}[accelerate,transformers,recipes]", *pinned, *wanted.others)
        nothing_compiled = {"XDG_CACHE_HOME": str(Path(session.create_tmp()).resolve())}
        session.run("python", "-P", "tests/support/smoke.py", "--json", str(outcome), env=nothing_compiled)
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)  # gigabytes


@nox.session(python=False)
def page(session: nox.Session) -> None:
    """Write docs/versions.md: what has run, and of the rest the rows that are there."""
    there = PAGE.read_text("utf-8").splitlines()
    rows = {row.split("`")[1]: row for row in there if row.startswith("| `")}
    others = next((line for line in there if line.startswith(OTHERS)), "")
    for name in COMBINATIONS:
        outcome = OUTCOMES / f"{name}.json"
        if not outcome.exists():
            continue
        ran = json.loads(outcome.read_text("utf-8"))
        passed = len(ran["outcomes"]) - len(ran["failed"])
        said = f"{passed} passed" + "".join(f", {one} failed" for one in ran["failed"])
        day = f"{datetime.fromtimestamp(outcome.stat().st_mtime, UTC):%Y-%m-%d}"
        cells = (*(ran["versions"][package] for package in NAMES), said, day)
        rows[name] = f"| `{name}` | {' | '.join(cells)} |"
        if name == "oldest":
            named = ", ".join(f"{one} {number}" for one, number in ran["versions"].items() if one in OLDEST_OTHERS)
            others = f"{OTHERS} {named}."
    left = [name for name in COMBINATIONS if name not in rows]
    heads = ("combination", *NAMES, "smoke set", "day")
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(rows[one] for one in COMBINATIONS if one in rows)]
    missing = f"\nNot run: {', '.join(f'`{name}`' for name in left)} of `noxfile.py`.\n" if left else ""
    PAGE.write_text(HEAD + "\n".join([*table, "", others, missing]) + FOOT, encoding="utf-8")
