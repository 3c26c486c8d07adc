"""What holds for all accessors of private names, and who may use such names."""

import importlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from retime.foundations import torch_private
from support.private_canaries import canary


def test_a_name_that_is_gone_raises_with_the_feature():
    with (
        pytest.raises(torch_private.PrivateNameError, match=r"_gone.*, which dancing needs"),
        torch_private.needed_by("dancing"),
    ):
        torch._C._gone  # noqa: B018
    with pytest.raises(torch_private.PrivateNameError, match="which dancing needs"), torch_private.needed_by("dancing"):
        importlib.import_module("torch._gone")
    with pytest.raises(torch_private.PrivateNameError, match=r"torch\.Tensor has no attribute '_gone', which dancing"):
        torch_private.attribute(Tensor, "_gone", "dancing")
    with pytest.raises(torch_private.PrivateNameError, match=r"torch\.Tensor has no attribute '_gone', which dancing"):
        torch_private.read_private(torch.ones(1), "_gone", "dancing")
    thing = torch.ones(1)
    with pytest.raises(torch_private.PrivateNameError, match="dancing"):
        torch_private.write_private(thing, "_gone", 1, "dancing")
    assert not hasattr(thing, "_gone")


@canary("attribute", "read_private", "write_private", "needed_by", "PrivateNameError", breaks="everything")
def test_names_that_are_there_are_read_and_written():
    thing = type("Thing", (), {"_there": 1})()
    with torch_private.needed_by("dancing"):
        assert torch_private.attribute(type(thing), "_there", "dancing")(thing) == 1
    torch_private.write_private(thing, "_there", 2, "dancing")
    assert torch_private.read_private(thing, "_there", "dancing") == 2
    assert issubclass(torch_private.PrivateNameError, ImportError)


@pytest.mark.parametrize(
    ("remove", "feature"),
    [
        ("del torch._C._storage_Use_Count", "forward fusion"),
        ("del torch._C._autograd._get_sequence_nr", "out-of-order weight gradients"),
    ],
)
def test_a_torch_without_a_name_is_refused_at_import(remove, feature):
    code = f"""
import torch
{remove}
try:
    import retime.foundations.torch_private
except ImportError as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("PrivateNameError"), ran.stderr
    assert f"which {feature}" in ran.stdout
