"""Folders of `accelerator.save_state()` of a pipeline are those of a script on one device, and the other way round."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from safetensors.torch import load_file

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import OutOfOrderPipeline
from support.accelerate_pipeline_folders import HALF, Loop, losses_of_one_device
from support.accelerate_pipeline_worker import BATCHES
from support.ranks import run_ranks, said_in

WORKER = "accelerate_pipeline_folders.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """What two ranks wrote, and what they printed."""
    folder = tmp_path_factory.mktemp("folders")
    return folder, run_ranks(2, WORKER, *(f"{case}|{folder / case}" for case in ("saves", "resumes", "refuses")))


def close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=2e-5)


def test_a_folder_of_two_ranks_is_one_of_a_plain_script(folders: Any, tmp_path: Path) -> None:
    expected = losses_of_one_device()
    folder = folders[0] / "saves"
    assert [said_in(one, f"saves|{folder}") for one in folders[1]] == ["saved"] * 2
    plain = Loop(5, piped=False)
    plain.accelerator.save_state(str(tmp_path / "plain"))
    names = {path.name for path in folder.iterdir()} - {"model", "random_states_1.pkl"}
    assert names == {path.name for path in (tmp_path / "plain").iterdir()}
    plain.accelerator.load_state(str(folder))
    weights = load_file(folder / "model" / "model.safetensors")
    torch.testing.assert_close(weights, {key: plain.model.state_dict()[key] for key in weights}, rtol=0, atol=0)
    close(plain.run(HALF, BATCHES), expected[HALF:])
    alone = _with_warning(5)
    alone.accelerator.load_state(str(folder))
    close(alone.run(HALF, BATCHES), expected[HALF:])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_folder_of_a_plain_script_is_loaded_by_a_pipeline(ranks: int, tmp_path: Path) -> None:
    plain = Loop(0, piped=False)
    plain.run(0, HALF)
    plain.accelerator.save_state(str(tmp_path / "folder"))
    torch.save(plain.run(HALF, BATCHES), tmp_path / "folder.losses")
    case = f"loads|{tmp_path / 'folder'}|{ranks}"
    assert [said_in(one, case) for one in run_ranks(ranks, WORKER, case)] == ["went on"] * ranks


@pytest.mark.parametrize(("case", "said"), [("resumes", "resumed"), ("refuses", "refused")])
def test_training_goes_on_bit_by_bit_and_folders_with_a_part_are_refused(case: str, said: str, folders: Any) -> None:
    assert [said_in(one, f"{case}|{folders[0] / case}") for one in folders[1]] == [said] * 2


def test_a_model_is_in_a_folder_once(tmp_path: Path) -> None:
    loop = Loop(0, piped=False)
    for number in range(2):  # the model is prepared; and a pipeline comes after another
        pipeline = _alone(loop)
        loop.accelerator.save_state(str(tmp_path / f"prepared {number}"))
        pipeline.restore()
    other = _with_warning()
    assert other.pipeline is not None
    other.pipeline.restore()
    _alone(other)
    other.accelerator.save_state(str(tmp_path / "other"))
    assert {path.name for path in tmp_path.glob("*/model*")} == {"model.safetensors"}
    other.accelerator.load_state(str(tmp_path / "other"))


def _alone(loop: Loop) -> OutOfOrderPipeline:
    with pytest.warns(NoEffectWarning, match="a pipeline needs two"):
        return OutOfOrderPipeline(loop.accelerator, loop.model, loop.optimizer)


def _with_warning(seed: int = 0) -> Loop:
    with pytest.warns(NoEffectWarning, match="a pipeline needs two"):
        return Loop(seed)
