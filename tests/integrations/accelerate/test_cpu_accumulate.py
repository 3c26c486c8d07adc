"""Accumulation on the processors in an Accelerate loop."""

import sys

import pytest
from accelerate import Accelerator
from torch import nn

from retime.foundations.messages import NoEffectWarning
from retime.integrations.accelerate import CPUAccumulate
from support.ranks import run_two_ranks, said_in


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is for Linux")
def test_a_loop_on_two_ranks_has_the_same_bits() -> None:
    for run in run_two_ranks("cpu_accumulate_worker.py"):
        said_in(run, "same_bits")


def test_one_process_is_left_as_it_is() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.warns(NoEffectWarning, match="no gradients to add up"):
        adds = CPUAccumulate(accelerator, accelerator.prepare(nn.Linear(2, 2)))
    assert adds.report().headline == "gradients on the host: none were summed"
    adds.remove()
