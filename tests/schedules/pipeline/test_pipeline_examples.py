"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

NAMES = ["placement", "gpipe", "one_forward_one_backward", "ooo_pipe", "simulation", "validation", "synchronisation"]


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    ran = doctest.testmod(importlib.import_module(f"retime.schedules.pipeline.{name}"))
    assert ran.attempted
    assert not ran.failed
