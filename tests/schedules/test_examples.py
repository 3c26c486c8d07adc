"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

NAMES = [
    *("schedule", "simulate", "fusion", "timeline", "reverse_first_k", "two_streams", "modnn.bounds"),
    *(f"pipeline.{name}" for name in ("placement", "simulation", "orders", "ooo_pipe", "torch_csv")),
]


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    ran = doctest.testmod(importlib.import_module(f"retime.schedules.{name}"))
    assert ran.attempted
    assert not ran.failed
