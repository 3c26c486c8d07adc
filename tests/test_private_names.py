"""What holds for all accessors of private names, and who may use such names."""

import importlib

import pytest
import torch
from torch import Tensor

from retime.foundations.torch_private import PrivateNameError, attribute, needed_by, read_private, write_private
from support.private_canaries import canary
from support.warm_start import WITHOUT_RETIME, run_program


def test_a_name_that_is_gone_raises_with_the_feature():
    with pytest.raises(PrivateNameError, match=r"_gone.*, which dancing needs"), needed_by("dancing"):
        torch._C._gone  # noqa: B018
    with pytest.raises(PrivateNameError, match="which dancing needs"), needed_by("dancing"):
        importlib.import_module("torch._gone")
    with pytest.raises(PrivateNameError, match=r"torch\.Tensor has no attribute '_gone', which dancing"):
        attribute(Tensor, "_gone", "dancing")
    with pytest.raises(PrivateNameError, match=r"torch\.Tensor has no attribute '_gone', which dancing"):
        read_private(torch.ones(1), "_gone", "dancing")
    thing = torch.ones(1)
    with pytest.raises(PrivateNameError, match="dancing"):
        write_private(thing, "_gone", 1, "dancing")
    assert not hasattr(thing, "_gone")


@canary("attribute", "read_private", "write_private", "needed_by", "PrivateNameError", breaks="everything")
def test_names_that_are_there_are_read_and_written():
    thing = type("Thing", (), {"_there": 1})()
    with needed_by("dancing"):
        assert attribute(type(thing), "_there", "dancing")(thing) == 1
    write_private(thing, "_there", 2, "dancing")
    assert read_private(thing, "_there", "dancing") == 2
    assert issubclass(PrivateNameError, ImportError)


@pytest.mark.parametrize(
    ("file", "remove", "feature"),
    [
        ("tensors", "del torch._C._storage_Use_Count", "forward fusion"),
        ("engine", "del torch._C._autograd._get_sequence_nr", "out-of-order weight gradients"),
    ],
)
def test_a_torch_without_a_name_is_refused_at_import(file, remove, feature):
    code = f"""
import torch
{remove}
try:
    import retime.foundations.torch_private.{file}
except ImportError as error:
    print(type(error).__name__, error)
"""
    said = run_program(WITHOUT_RETIME + code)
    assert said.startswith("PrivateNameError"), said
    assert f"which {feature}" in said
