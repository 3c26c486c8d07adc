"""The examples in the docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["schedule", "simulate", "fusion", "timeline"])
def test_docstring_examples(name):
    ran = doctest.testmod(importlib.import_module(f"retime.schedules.{name}"))
    assert ran.attempted
    assert not ran.failed
