"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

NAMES = ["placement", "orders", "ooo_pipe", "simulation"]


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    ran = doctest.testmod(importlib.import_module(f"retime.schedules.pipeline.{name}"))
    assert ran.attempted
    assert not ran.failed
