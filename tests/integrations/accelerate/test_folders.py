"""Folders of `save_state` are plain ones, with each object: both ways, and training goes on bit by bit.

Those of pipelines are in test_pipeline_folders.py: up to rounding, as a pipeline itself.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from support.accelerate_folders import ON_ONE, ON_TWO, assert_folders_are_interchangeable
from support.ranks import run_two_ranks


@pytest.mark.parametrize("name", ON_ONE)
def test_a_folder_of_one_process(name: str, tmp_path: Path) -> None:
    assert_folders_are_interchangeable(ON_ONE[name], tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_folders_of_two_processes(tmp_path: Path) -> None:
    for run in run_two_ranks("accelerate_folders.py", str(tmp_path)):
        assert run.stdout.splitlines() == [*ON_TWO], run.stderr[-3000:]
