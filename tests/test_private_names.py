"""What holds for all accessors of private names, which are used there and nowhere else."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retime.foundations.torch_private import PrivateNameError, attribute, needed_by, read_private, write_private
from support.paths import tree_of
from support.private_canaries import canary
from support.warm_start import WITHOUT_RETIME, run_program


def test_a_name_that_is_gone_raises_with_the_feature():
    with pytest.raises(PrivateNameError, match=r"_gone.*, which dancing needs"), needed_by("dancing"):
        torch._C._gone  # noqa: B018
    with pytest.raises(PrivateNameError, match="which dancing needs"), needed_by("dancing"):
        importlib.import_module("torch._gone")
    with pytest.raises(PrivateNameError, match=r"torch\.Tensor has no attribute '_gone', which dancing"):
        attribute(Tensor, "_gone", "dancing")
    with pytest.raises(PrivateNameError, match=r"torch\.Tensor has no attribute '_gone', which dancing"):
        read_private(torch.ones(1), "_gone", "dancing")
    thing = torch.ones(1)
    with pytest.raises(PrivateNameError, match="dancing"):
        write_private(thing, "_gone", 1, "dancing")
    assert not hasattr(thing, "_gone")


@canary("attribute", "read_private", "write_private", "needed_by", "PrivateNameError", breaks="everything")
def test_names_that_are_there_are_read_and_written():
    thing = type("Thing", (), {"_there": 1})()
    with needed_by("dancing"):
        assert attribute(type(thing), "_there", "dancing")(thing) == 1
    write_private(thing, "_there", 2, "dancing")
    assert read_private(thing, "_there", "dancing") == 2
    assert issubclass(PrivateNameError, ImportError)


@pytest.mark.parametrize(
    ("file", "remove", "feature"),
    [
        ("tensors", "del torch._C._storage_Use_Count", "forward fusion"),
        ("engine", "del torch._C._autograd._get_sequence_nr", "out-of-order weight gradients"),
    ],
)
def test_a_torch_without_a_name_is_refused_at_import(file, remove, feature):
    code = f"""
import torch
{remove}
try:
    import retime.foundations.torch_private.{file}
except ImportError as error:
    print(type(error).__name__, error)
"""
    said = run_program(WITHOUT_RETIME + code)
    assert said.startswith("PrivateNameError"), said
    assert f"which {feature}" in said


ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("foundations", "mechanisms", "modules", "strategies", "callbacks", "integrations", "recipes", "commands")
LIBRARIES = {
    *("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"),
    *("accelerate", "transformers"),
}
HOMES = {"strategies/support/lightning_private.py", "integrations/accelerate/accelerate_private.py"}
PYTHONS = {"_replace", "_fields", "_make", "_getframe", "_exit", "_codecs"}
"""Of named tuples and of the standard library."""
READERS = {"getattr", "hasattr", "setattr", "attrgetter"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def sources() -> dict[str, ast.Module]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): tree_of(path) for path in paths}


def is_home(path: str) -> bool:
    return path.startswith("foundations/torch_private/") or path in HOMES


def our_names(tree: ast.Module) -> set[str]:
    """Private names that a file gives to something: methods, classes, fields, attributes and marks of its own."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            names |= {node.attr} if node.value.id in ("self", "cls") or node.attr.startswith("_retime") else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def known_names(homes: list[ast.Module]) -> set[str]:
    """Every private name that accessors read, as an attribute or by its text."""
    names = set()
    for tree in homes:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                names.add(node.value)
    return {name for name in names if is_private(name)}


def offences(tree: ast.Module, ours: set[str], private: set[str]) -> list[str]:
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names if alias.name.split(".")[0] in LIBRARIES]
            problems += [(node.lineno, name) for name in used if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            problems += [(node.lineno, name) for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in PYTHONS:
            root = ast.unparse(node).split(".")[0]
            if root in LIBRARIES or node.attr not in ours:
                problems.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in READERS:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            problems += [(node.lineno, text) for text in texts if text in private]
    return [f"{line}: {what}" for line, what in sorted(set(problems))]


def test_private_names_are_used_by_accessors_only():
    trees = sources()
    ours = set().union(*(our_names(tree) for path, tree in trees.items() if not is_home(path)))
    private = known_names([tree for path, tree in trees.items() if is_home(path)]) - ours
    assert {"_version", "_timeout", "_to_sync", "_optimizer_patched_step_method"} <= private
    problems = [
        f"{path}:{what}: give it an accessor in foundations/torch_private or its Lightning or Accelerate counterpart"
        for path, tree in trees.items()
        if not is_home(path)
        for what in offences(tree, ours, private)
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch._dynamo", 1),
        ("from torch._C import x", 1),
        ("from torch.utils import _pytree", 1),
        ("import torch\ntorch._C.x()", 1),
        ("import torch\ntorch._mine", 1),
        ("def f(x):\n    return x._version", 1),
        ("def f(x):\n    return getattr(x, '_version', None)", 1),
        ("def f(x):\n    return self._mine, x._mine, x._replace(y=1)", 0),
        ("from retime.foundations.torch_private.tensors import version_of", 0),
    ],
)
def test_a_private_name_elsewhere_is_found(source, count):
    assert len(offences(ast.parse(source), {"_mine"}, {"_version"})) == count


def names_shown(tree):
    """The public names that a home of private names defines, or imports inside of `needed_by`."""
    names = set()
    for node in tree.body:
        for one in node.body if isinstance(node, ast.With) else [node]:
            if isinstance(one, ast.FunctionDef | ast.ClassDef):
                names.add(one.name)
            elif isinstance(one, ast.Assign | ast.AnnAssign):
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            elif isinstance(one, ast.ImportFrom) and isinstance(node, ast.With):
                names |= {alias.asname or alias.name for alias in one.names}
    return {name for name in names if not name.startswith("_")}


def test_each_accessor_has_a_canary():
    named = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(tree_of(path)) if "canary(" in path.read_text("utf-8") else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "canary":
                named |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    shown = {name for path, tree in sources().items() if is_home(path) for name in names_shown(tree)}
    assert {"graph_task_id", "needed_by"} < shown
    missing = shown - named
    assert not missing, f"no canary says what breaks without {sorted(missing)}"
