"""The age of results: which files ran, and whether their code has changed since."""

import ast
from collections.abc import Iterator

import pytest

from retime.recipes.core import age
from retime.recipes.core.results import Point, Result

SIMULATED = "retime.recipes.ooo.two_streams.Speedups"
CACHED = ("whole", "in_history", "files_that_ran", "_tree", "_code")


class Repository:
    """Git's answers about files, by commit."""

    def __init__(self, **commits: dict[str, str]) -> None:
        self.commits, self.shallow = commits, "false"

    def __call__(self, command: str, *arguments: str) -> str | None:
        match command:
            case "rev-parse":
                return self.shallow
            case "ls-files":
                return "age.py"
            case "merge-base":
                return "" if arguments[1] in self.commits else None
            case "ls-tree":
                files = self.commits[arguments[-1]].items()
                return "\n".join(f"100644 blob x{code.encode().hex()}\t{path}" for path, code in files)
            case _:
                return bytes.fromhex(arguments[-1][1:]).decode()


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    answers = Repository(HEAD={"mechanisms/scan/kernels.py": "x = 1", "mechanisms/scan/cells.py": "y = 2", "a.py": ""})
    monkeypatch.setattr(age, "git_says", answers)
    for cached in (getattr(age, name) for name in CACHED):
        cached.cache_clear()
    yield answers
    for cached in (getattr(age, name) for name in CACHED):
        cached.cache_clear()


def result(*commits: str, recipe: str = "retime.recipes.none.Recipe") -> Result:
    points = [Point({"case": commit}, {}, [], commit=commit) for commit in commits]
    return Result("demo", recipe, "a-paper", "Figure 1", "A title", points)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ({"mechanisms/scan/kernels.py": "x = 1", "mechanisms/scan/cells.py": "y = 2", "a.py": "other = 1"}, "current"),
        ({"mechanisms/scan/kernels.py": '"""Says."""\nx=1 # one', "mechanisms/scan/cells.py": "y = 2"}, "current"),
        ({"mechanisms/scan/kernels.py": "x = 3", "mechanisms/scan/cells.py": "y = 2"}, "stale, 1 of 2 files"),
        ({"mechanisms/scan/kernels.py": "x = 1"}, "stale, 1 of 2 files"),
        ({}, "stale, 2 of 2 files"),
    ],
    ids=["elsewhere", "words", "code", "new file", "moved"],
)
def test_a_result_is_stale_where_code_that_ran_is_another(
    repository: Repository, before: dict[str, str], said: str
) -> None:
    repository.commits["abc"] = before
    assert age.age(result("abc+changes"), ["mechanisms/scan"]) == said


def test_the_oldest_of_several_commits_decides(repository: Repository) -> None:
    repository.commits |= {"new": repository.commits["HEAD"], "old": {}}
    assert age.age(result("new"), ["mechanisms/scan"]) == "current"
    assert age.age(result("new", "old"), ["mechanisms/scan"]) == "stale, 2 of 2 files"


def test_without_the_history_nothing_is_said(repository: Repository) -> None:
    assert age.age(result("lost"), ["mechanisms/scan"]) == "commit not in the history"
    repository.shallow = "true"
    age.whole.cache_clear()
    assert age.age(result("HEAD"), ["mechanisms/scan"]) == "age unknown"


def test_only_files_count_that_the_recipe_imports() -> None:
    if not age.whole():
        pytest.skip("no checkout with the whole history")
    files = age.files_that_ran(SIMULATED, ("recipes/ooo", "schedules/two_streams.py", "mechanisms/scan"))
    assert {"recipes/ooo/two_streams.py", "recipes/ooo/counted_networks.py", "schedules/two_streams.py"} <= files
    assert not {"recipes/ooo/pipeline.py", "recipes/ooo/single_device.py"} & files
    assert {file.partition("/")[0] for file in files} == {"recipes", "schedules", "mechanisms"}  # none of scan


def test_docstrings_and_comments_are_no_code() -> None:
    with_words = 'def f():\n    """Says."""\n    return 1  # one\n\nX = 1\n"""Of X."""\n'
    trees = [age._WithoutDocstrings().visit(ast.parse(text)) for text in (with_words, "def f():\n    return 1\nX = 1")]
    assert ast.dump(trees[0]) == ast.dump(trees[1])
