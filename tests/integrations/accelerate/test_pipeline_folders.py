"""Folders of `accelerator.save_state()` of a pipeline are those of a script on one device, and the other way round."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
from safetensors.torch import load_file

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import OutOfOrderPipeline
from support.accelerate_pipeline_folders import HALF, Loop, losses_of_one_device
from support.accelerate_pipeline_worker import BATCHES
from support.two_ranks import run_ranks


def outputs(ranks: int, *arguments: str) -> list[str]:
    """What the ranks of a case print; none may fail."""
    done = run_ranks(ranks, "accelerate_pipeline_folders.py", *arguments, timeout_s=200)
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
    return [one.stdout.strip() for one in done]


def close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=2e-5)


def test_a_folder_of_two_ranks_is_one_of_a_plain_script(tmp_path: Path) -> None:
    expected = losses_of_one_device()
    folder = tmp_path / "folder"
    assert outputs(2, "saves", str(folder)) == ["saved"] * 2
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_folder_of_a_plain_script_is_loaded_by_a_pipeline(ranks: int, tmp_path: Path) -> None:
    plain = Loop(0, piped=False)
    plain.run(0, HALF)
    plain.accelerator.save_state(str(tmp_path / "folder"))
    torch.save(plain.run(HALF, BATCHES), tmp_path / "folder.losses")
    assert outputs(ranks, "loads", str(tmp_path / "folder"), str(ranks)) == ["went on"] * ranks


def test_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    assert outputs(2, "resumes", str(tmp_path / "folder")) == ["resumed"] * 2


def test_folders_with_a_part_are_refused(tmp_path: Path) -> None:
    assert outputs(2, "refuses", str(tmp_path / "folder")) == ["refused"] * 2


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
