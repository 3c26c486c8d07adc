"""Arguments as people have them: whole numbers of numpy's, and calls that Python itself would refuse."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from torch import nn

import retime
from retime.foundations.arguments import accepts
from retime.foundations.parts import BatchNormChoice
from retime.foundations.weight_gradients import WeightGradientDeferral


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: WeightGradientDeferral(nn.Linear(2, 2), np.int64(3)), "k"),
        (lambda: retime.OOODataParallelStrategy(k=np.int64(3)), "k"),
        (lambda: retime.MemoryBudgetStrategy(budget=np.int64(3)), "_budget"),
        (lambda: retime.StepTimeline(every_n_steps=np.int32(3)), "every_n_steps"),
    ],
)
def test_whole_numbers_of_numpys_become_pythons(make: Callable[[], Any], name: str) -> None:
    value = getattr(make(), name)
    assert type(value) is int  # numpy's are in no checkpoint that weights_only=True reads, and in no JSON
    assert value == 3


def test_numpys_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="k="):
        WeightGradientDeferral(nn.Linear(2, 2), np.int64(-3))


@pytest.mark.parametrize("arguments", [{}, {"modle": None}])
def test_calls_that_do_not_fit_name_the_function(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"fuse_optimizer\(\) (missing|got)"):
        retime.fuse_optimizer(**arguments)


def test_a_choice_may_be_a_text_of_numpys() -> None:
    assert accepts(np.str_("ghost"), BatchNormChoice)
    assert not accepts(np.str_("spook"), BatchNormChoice)
    assert not accepts(np.array(["ghost", "offload"]), BatchNormChoice)
    assert not accepts(True, Literal[1, "n"])
    assert not accepts(1, Literal[True, "n"])
