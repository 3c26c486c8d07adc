"""Imports point one way: from commands over recipes, callbacks and integrations down to mechanisms and schedules."""

import ast
import json
import runpy
import subprocess
import sys
from collections.abc import Set
from pathlib import Path

import pytest
import setuptools

from support.paths import imports_in, imports_of, tree_of

ROOT = Path(__file__).resolve().parent.parent

LEFT_OF = {
    "schedules": set(),
    "foundations": {"schedules"},
    "mechanisms": {"schedules", "foundations"},
    "modules": {"schedules", "foundations", "mechanisms"},
    "strategies": {"schedules", "foundations", "mechanisms", "modules"},
    "callbacks": {"schedules", "foundations", "mechanisms", "modules", "strategies"},
    "integrations": {"schedules", "foundations", "mechanisms", "modules"},
    "recipes": {"schedules", "foundations", "mechanisms", "modules", "strategies", "callbacks", "integrations", "conf"},
    "commands": {
        *("schedules", "foundations", "mechanisms", "modules"),
        *("strategies", "callbacks", "integrations", "conf"),
    },
    "conf": set(),
}
BESIDES = {
    "commands/configured.py": {"recipes"},
    "recipes/advice/demo.py": {"commands"},
    "recipes/advice/followed.py": {"commands"},
    "recipes/ooo/single_device.py": {"commands"},
}
"""What a file imports besides its folder: one reads configurations, and is imported where one is named; three measure
as a command does."""
ROOMS = {"mechanisms", "foundations", "schedules"}
WITHOUT_FACE = {"foundations/torch_private"}
"""Rooms whose files are imported directly, as each is about one part of torch."""
FLOORS = (
    {"arguments", "compatibility", "messages", "native", "patching", "streams", "torch_private", "workers"},
    {"lazy_updates", "measure", "storages"},
    {"cpu_pool", "ddp", "parts", "weight_gradients"},
    {"preserve_state"},
)
"""Rooms of foundations, which import from floors below their own."""
SMALLEST_STATION = 100
"""Lines, below which a file needs more than one importer."""
LAST = {"recipes", "commands"}  # these use the public API as a user does
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
CONFIGURATION = {"hydra", "omegaconf"}
BANNED = {
    "schedules": {"torch", *LIGHTNING, "accelerate", *CONFIGURATION},
    "foundations": {*LIGHTNING, "accelerate", *CONFIGURATION},
    "mechanisms": {*LIGHTNING, "accelerate", *CONFIGURATION},
    "modules": {*LIGHTNING, "accelerate", *CONFIGURATION},
}
# What `import retime` must not load: slow, and not needed to train.
LATE = {"transformers", "hydra", "matplotlib"}


Imports = list[ast.Import | ast.ImportFrom]


def imported(imports: Imports, package: str) -> set[str]:
    """Every dotted name that a module of ``package`` imports, with relative ones resolved.

    ``from a import b`` gives both ``a`` and ``a.b``, since b may be a module.
    """
    names = set()
    for node in imports:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def offences(folder: str, imports: Imports, package: str, besides: Set[str] = frozenset()) -> list[str]:
    """What a file imports although its folder may not."""
    problems = []
    allowed = LEFT_OF[folder] | {folder} | besides
    names = imported(imports, package)
    for name in sorted(names):
        top, *rest = name.split(".")
        if top in BANNED.get(folder, set()):
            problems.append(f"{folder} must not import {name}")
        elif top != "retime":
            continue
        elif rest and rest[0] in LEFT_OF and rest[0] not in allowed:
            problems.append(f"{folder} must not import {name}: it is no folder to the left")
    if folder not in LAST and uses_public_api(imports, names):
        problems.append(f"{folder} must not import from retime itself: the public API imports {folder}")
    return problems


def uses_public_api(imports: Imports, names: set[str]) -> bool:
    """Whether a file imports ``retime``, or something else than a folder from it."""
    plain = any(alias.name == "retime" for node in imports if isinstance(node, ast.Import) for alias in node.names)
    return plain or any(name.split(".")[1] not in LEFT_OF for name in names if name.startswith("retime."))


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", LEFT_OF)
def test_a_folder_imports_only_what_is_left_of_it(folder):
    sources = files(folder)
    assert sources, f"{folder}/ holds no Python: is the tree complete?"
    problems = []
    for path in sources:
        name = path.relative_to(ROOT)
        package, besides = ".".join(["retime", *name.parent.parts]), BESIDES.get(name.as_posix(), set())
        problems += [f"{name}: {what}" for what in offences(folder, imports_in(path), package, besides)]
    assert not problems, "\n".join(problems)


def past_faces(path: Path, imports: Imports) -> list[str]:
    """What a file imports from inside a package that it is not in, instead of from the package itself."""
    problems = []
    for node in imports:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("retime."):
            continue
        inside = ROOT / Path(*str(node.module).split(".")[1:])
        package = inside.parent
        if inside.with_suffix(".py").is_file() and has_face(package) and not path.is_relative_to(package):
            problems.append(f"{path.relative_to(ROOT)}: import from {package.relative_to(ROOT)}, not {node.module}")
    return problems


def has_face(package: Path) -> bool:
    """Packages of these folders: others import only what their ``__init__`` imports."""
    path = package.relative_to(ROOT)
    return path.parts[0] in ROOMS and len(path.parts) > 1 and path.as_posix() not in WITHOUT_FACE


def named_in(package: Path) -> set[str]:
    """The names that a package's face imports."""
    body = tree_of(package / "__init__.py").body
    return {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_a_face_names_what_it_shows():
    packages = [path.parent for top in sorted(ROOMS) for path in (ROOT / top).rglob("__init__.py")]
    faces = [package for package in packages if has_face(package)]
    assert len(faces) > 10
    for package in faces:
        shown, body = named_in(package), tree_of(package / "__init__.py").body
        listed = [ast.literal_eval(node.value) for node in body if isinstance(node, ast.Assign)]
        assert shown, package
        assert all(set(names) == shown for names in listed), package


def test_an_import_past_a_face_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    room = tmp_path / "mechanisms" / "memory_budget"
    room.mkdir(parents=True)
    (room / "inner.py").touch()
    outsider = tmp_path / "mechanisms" / "outsider.py"
    past = imports_of(ast.parse("from retime.mechanisms.memory_budget.inner import x"))
    assert past_faces(room / "other.py", past) == []
    assert len(past_faces(outsider, past)) == 1
    assert past_faces(outsider, imports_of(ast.parse("from retime.mechanisms.memory_budget import x"))) == []


def test_every_package_is_packaged(monkeypatch):
    """A folder that setup.py does not find is missing in what is installed."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    there = {
        ".".join(["retime", *path.parent.relative_to(ROOT).parts])
        for folder in LEFT_OF
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(given["packages"]) == there | {"retime"}
    assert {path for name, path in given["package_dir"].items() if name != "retime"} == set(LEFT_OF)


def imports_from(path: Path) -> list[tuple[str, list[str]]]:
    """Each ``from module import names`` of a file that is about retime."""
    return [
        (str(node.module), [alias.name for alias in node.names])
        for node in imports_in(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("retime.")
    ]


def test_foundations_import_from_lower_floors():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    rooms = {path.stem for path in (ROOT / "foundations").iterdir() if has_code(path)}
    assert rooms == set(floor)
    upwards = [
        f"{path.relative_to(ROOT)}: {module} is not on a floor below"
        for path in files("foundations")
        for module, _ in imports_from(path)
        for room, other in [(path.relative_to(ROOT / "foundations").parts[0].removesuffix(".py"), module.split(".")[2])]
        if module.startswith("retime.foundations.") and other != room and floor[other] >= floor[room]
    ]
    assert not upwards, "\n".join(upwards)


def has_code(path: Path) -> bool:
    return (path / "__init__.py").is_file() or (path.suffix == ".py" and path.stem != "__init__")


def through_faces(path: Path) -> list[str]:
    """What a file takes from a face that the face does not show, or from the face of a package that it is in."""
    offences = []
    for module, names in imports_from(path):
        package = ROOT / Path(*module.split(".")[1:])
        if not (package / "__init__.py").is_file() or not has_face(package):
            continue
        names = [name for name in names if not (path.is_relative_to(package) and (package / f"{name}.py").is_file())]
        if names and path.is_relative_to(package):
            offences.append(f"{path.relative_to(ROOT)}: import from the file itself, not from its own face {module}")
        shown = named_in(package)
        offences += [f"{path.relative_to(ROOT)}: {module} does not show {name}" for name in names if name not in shown]
    return offences


@pytest.mark.parametrize("folder", LEFT_OF)
def test_packages_are_imported_through_their_faces_and_nothing_else_is(folder):
    problems = [what for path in files(folder) for what in past_faces(path, imports_in(path))]
    problems += [what for path in files(folder) if path.name != "__init__.py" for what in through_faces(path)]
    assert not problems, "\n".join(problems)


def file_of(module: str, name: str) -> Path:
    """The file that defines what is imported, which a face may only show."""
    path = ROOT / Path(*module.split(".")[1:])
    if (path / f"{name}.py").is_file():
        return path / f"{name}.py"
    if (path / "__init__.py").is_file():
        for inner, names in imports_from(path / "__init__.py"):
            if name in names:
                return file_of(inner, name)
    return path.with_suffix(".py")


def test_a_small_file_has_several_importers():
    """A file with one importer is part of it, unless it is an idea of its own that fills a hundred lines."""
    importers = {path: set() for folder in ("foundations", "mechanisms") for path in files(folder)}
    for path in (path for folder in LEFT_OF for path in files(folder)):
        for module, names in imports_from(path):
            for name in names:
                importers.get(file_of(module, name), set()).add(path)
    small = [
        f"{path.relative_to(ROOT)} has one importer: make it part of that"
        for path, by in importers.items()
        if len(by - {path.parent / "__init__.py"}) == 1
        and path.name != "__init__.py"
        and len(path.read_text("utf-8").splitlines()) < SMALLEST_STATION
    ]
    assert not small, "\n".join(small)


@pytest.mark.parametrize(
    ("folder", "source", "count"),
    [
        ("schedules", "import json\nfrom retime.schedules.schedule import Task\nfrom . import tasks", 0),
        ("schedules", "import torch.nn", 1),
        ("schedules", "def f():\n    from torch import Tensor", 2),  # the package and, possibly, its module
        ("schedules", "from retime.mechanisms import fuse_optimizer", 2),
        ("mechanisms", "from retime.schedules import Schedule\nimport torch", 0),
        ("mechanisms", "from ..modules import scan", 2),
        ("mechanisms", "import lightning.pytorch as pl", 1),
        ("modules", "from retime import mechanisms", 0),
        ("modules", "from accelerate import Accelerator", 2),
        ("strategies", "from lightning.pytorch.strategies import DDPStrategy", 0),
        ("strategies", "from retime.callbacks import StepTimeline", 2),
        ("callbacks", "import retime", 1),
        ("callbacks", "from retime import ScanRNN", 1),
        ("recipes", "import retime\nfrom retime import ScanRNN\nfrom retime.strategies import x", 0),
        ("commands", "import retime\nfrom retime.callbacks import x\nfrom retime.recipes.core import build", 2),
    ],
)
def test_the_rules_catch_what_they_should(folder, source, count):
    assert len(offences(folder, imports_of(ast.parse(source)), f"retime.{folder}")) == count


def test_importing_retime_does_not_import_what_is_needed_late():
    """Lightning itself loads some of these when they are installed, so the question is who asks for them."""
    code = f"""
import builtins, importlib, json, sys
late, asked = {LATE!r}, []
original_import, original_module = builtins.__import__, importlib.import_module

def note(name, module):
    if name.split(".")[0] in late and module.split(".")[0] == "retime":
        asked.append(f"{{module}} imports {{name}}")

def noting_import(name, globals=None, locals=None, fromlist=(), level=0):
    if not level:
        note(name, (globals or {{}}).get("__name__") or "")
    return original_import(name, globals, locals, fromlist, level)

def noting_module(name, package=None):
    note(name, sys._getframe(1).f_globals.get("__name__") or "")
    return original_module(name, package)

import warnings
warnings.simplefilter("ignore")  # other libraries' own, at import
try:
    import lightning.pytorch
except ImportError:
    pass
before = set(sys.modules)
builtins.__import__, importlib.import_module = noting_import, noting_module
import retime
loaded = sorted(late & (set(sys.modules) - before))
print(json.dumps([asked, loaded, "hydra" in sys.modules, "retime" in sys.modules]))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    asked, loaded, hydra, retime = json.loads(ran.stdout.splitlines()[-1])
    assert asked == []
    assert loaded == []
    assert not hydra
    assert retime


def test_importing_schedules_loads_neither_torch_nor_matplotlib():
    """``retime/__init__`` may load torch; the files of schedules alone must not."""
    code = f"""
import importlib.util, sys, types
package = types.ModuleType("retime")  # stands in for the public API, whose own imports are not the question
package.__path__ = []
sys.modules["retime"] = package
folder = {str(ROOT / "schedules")!r}
spec = importlib.util.spec_from_file_location(
    "retime.schedules", folder + "/__init__.py", submodule_search_locations=[folder]
)
module = importlib.util.module_from_spec(spec)
sys.modules["retime.schedules"] = module
spec.loader.exec_module(module)
assert module.Schedule.parse("F1").tasks
assert not {{"torch", "lightning", "numpy", "matplotlib"}} & set(sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
