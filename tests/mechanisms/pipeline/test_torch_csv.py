"""Orders as CSV: torch's own schedules are read, torch's runtime loads what is written, and trains the same bits."""

import csv
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from retime.schedules.pipeline import from_csv, placement_of, to_csv
from support.ranks import run_two_ranks
from support.torch_csv_worker import ORDERS

TORCHS = {
    "1F1B": (1, (0, 1)),
    "GPipe": (1, (0, 1)),
    "Interleaved1F1B": (2, (0, 1, 0, 1)),
    "InterleavedZeroBubble": (2, (0, 1, 0, 1)),
    "LoopedBFS": (2, (0, 1, 0, 1)),
    "ZBVZeroBubble": (2, (0, 1, 1, 0)),
    "DualPipeV": (2, (0, 1, 1, 0)),
}


def ordered(name: str, chunks: int, **options: Any) -> list[list[Any]]:
    """What torch's schedule does on two ranks. Of 1F1B it numbers the last rank's forward passes from 1, and runs 0."""
    actions = get_schedule_ops(name, 2, 4, chunks, **options)
    if name == "1F1B":
        forward = [one for one in actions[-1] if one is not None and one.computation_type.value == "F"]
        first = min(one.microbatch_index for one in forward)
        actions[-1] = [
            one._replace(microbatch_index=one.microbatch_index - first) if one in forward else one
            for one in actions[-1]
        ]
    return actions


def written(actions: list[list[Any]]) -> str:
    """The text that torch's runtime would dump."""
    text = io.StringIO()
    csv.writer(text).writerows(actions)
    return text.getvalue()


def computed(actions: list[list[Any]]) -> list[list[str]]:
    """What ranks compute, without bubbles and messages; overlapped passes one after the other."""
    return [
        [str(part) for one in rank if one is not None and one.is_compute_op for part in one.sub_actions or (one,)]
        for rank in actions
    ]


def loaded(text: str, folder: Path, stages: int) -> list[list[Any]]:
    """What torch's runtime reads."""
    path = folder / "order.csv"
    path.write_text(text)
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, 2, stages, None
    micro_batches = text.splitlines()[0].count("0F")
    runtime = _PipelineScheduleRuntime([stage] * (stages // 2), micro_batches)
    runtime._load_csv(str(path))
    return list(runtime.pipeline_order.values())


@pytest.mark.parametrize("name", TORCHS)
def test_schedules_of_torchs_own_are_read_and_written_back(name: str, tmp_path: Path) -> None:
    chunks, rank_of = TORCHS[name]
    actions = ordered(name, chunks)
    schedule = from_csv(written(actions))
    assert placement_of(schedule).rank_of == rank_of
    text = to_csv(schedule)
    assert [row.split(",") for row in text.splitlines()] == computed(actions)
    assert computed(loaded(text, tmp_path, 2 * chunks)) == computed(actions)
    if chunks > 1:
        with_messages = ordered(name, chunks, with_comms=True)
        assert from_csv(written(with_messages)) == schedule


@pytest.mark.parametrize("name", ORDERS)
def test_torchs_runtime_loads_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = ORDERS[name]
    text = to_csv(schedule)
    actions = loaded(text, tmp_path, placement_of(schedule).stages)
    assert computed(actions) == [row.split(",") for row in text.splitlines()]
    assert from_csv(written(actions)) == schedule


@pytest.mark.long
def test_a_loaded_schedule_trains_as_ours(tmp_path: Path) -> None:
    for run in run_two_ranks("torch_csv_worker.py", str(tmp_path)):
        assert run.stdout.split() == [*ORDERS, "done"], run.stderr[-3000:]
