"""Batches cut along their first dimension: every usual container, and a clear no to what cannot be cut."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from retime.foundations.parts.split import (
    balanced_parts,
    batch_size_of,
    key_of,
    part_of,
    replaced_tensors,
    samples_in,
    split_batch,
    tensors_of,
)
from retime.foundations.storages import tensors_in

Pair = namedtuple("Pair", "x y")


class Shares(MutableMapping):
    """Copies of it share their content."""

    def __init__(self, content: Any) -> None:
        self._content = dict(content)

    def __getitem__(self, key: Any) -> Any:
        return self._content[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._content[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._content[key]

    def __iter__(self) -> Any:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str = "run 7"
    doubled: int = field(init=False, default=2)


def rows(count: int = 7) -> Tensor:
    return torch.arange(count * 3.0).reshape(count, 3)


def test_parts_are_views_in_order_and_the_last_is_smaller() -> None:
    whole = rows()
    parts = split_batch(whole, 3)
    assert [len(part) for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat(parts), whole)
    assert all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("sub_batch", range(1, 15))
def test_balanced_parts_are_few_and_nearly_equal(sub_batch: int, hook: bool) -> None:
    def columns(batch: Tensor, size: int) -> list[Tensor]:
        return list(batch.split(size, 1))

    whole = rows(13).T if hook else rows(13)
    parts = balanced_parts(whole, sub_batch, columns) if hook else balanced_parts(whole, sub_batch)
    sizes = [part.shape[int(hook)] for part in parts]
    assert torch.equal(torch.cat(parts, int(hook)), whole)
    assert len(parts) == -(-13 // sub_batch)
    assert max(sizes) <= sub_batch
    assert max(sizes) - min(sizes) <= 1


def test_a_sub_batch_of_three_leaves_no_part_of_one() -> None:
    assert all(len(part) > 1 for count in range(2, 50) for part in balanced_parts(rows(count), 3))


@pytest.mark.parametrize("sub_batch", [7, 8, 100])
def test_a_batch_that_fits_is_its_own_only_part(sub_batch: int) -> None:
    whole = {"x": rows()}
    assert split_batch(whole, sub_batch)[0] is whole


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"x": x, "y": {"t": x}},
        lambda x: [x, x],
        lambda x: (x, (x, [x])),
        lambda x: Pair(x, x),
        lambda x: Sample(x),
        lambda x: UserDict(x=x),
        lambda x: OrderedDict(x=x),
        lambda x: Shares({"x": x}),
        lambda x: MappingProxyType({"x": x}),
        lambda x: {"nested": [Pair(x, Sample(x))]},
    ],
)
def test_containers_keep_their_type(make: Any) -> None:
    whole = make(rows())
    parts = split_batch(whole, 4)
    assert [type(part) for part in parts] == [type(whole)] * 2
    assert [batch_size_of(part) for part in parts] == [4, 3]
    for place, tensor in tensors_of(whole).items():
        assert torch.equal(torch.cat([tensors_of(part)[place] for part in parts]), tensor)
    assert all(len(tensor) == 7 for tensor in tensors_of(whole).values()), "the batch itself was changed"


def test_batch_encoding_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.BatchEncoding({"input_ids": torch.ones(5, 4, dtype=torch.long), "labels": torch.arange(5)})
    parts = split_batch(whole, 2)
    assert all(isinstance(part, transformers.BatchEncoding) for part in parts)
    assert [part["labels"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert len(whole["labels"]) == 5


def test_scalars_and_what_is_no_tensor_go_to_every_part() -> None:
    marker = object()
    whole = {"x": rows(), "scale": torch.tensor(2.0), "epoch": 3, "name": "a", "none": None, "opaque": marker}
    parts = split_batch(whole, 4)
    for part in parts:
        assert part["scale"] is whole["scale"]
        assert (part["epoch"], part["name"], part["none"]) == (3, "a", None)
        assert part["opaque"] is marker


def test_what_is_broadcast_goes_to_every_part() -> None:
    whole = {"x": rows(), "mask": torch.ones(1, 3)}
    assert [part["mask"].shape for part in split_batch(whole, 4)] == [(1, 3), (1, 3)]


def test_text_of_one_entry_a_sample_is_cut_as_well() -> None:
    whole = {"x": rows(3), "caption": ["a", "b", "c"], "classes": ["cat", "dog"], "mean": [0.5, 0.5]}
    whole |= {"of": [{"at": 1}, {"at": 2}, {"at": 3}], "boxes": ([1], [], [2, 3]), "numpy": np.arange(3)}
    parts = split_batch(whole, 2)
    assert [part["caption"] for part in parts] == [["a", "b"], ["c"]]
    assert [part["of"] for part in parts] == [[{"at": 1}, {"at": 2}], [{"at": 3}]]
    assert [part["boxes"] for part in parts] == [([1], []), ([2, 3],)]
    assert [part["numpy"].tolist() for part in parts] == [[0, 1], [2]]
    assert all(part["classes"] == ["cat", "dog"] and part["mean"] == [0.5, 0.5] for part in parts)


def test_chosen_samples() -> None:
    whole = {"x": rows(), "name": list("abcdefg")}
    part = part_of({**whole, "numpy": np.arange(7)}, torch.tensor([5, 0]), 7)
    assert torch.equal(part["x"], whole["x"][[5, 0]])
    assert part["name"] == ["f", "a"]
    assert part["numpy"].tolist() == [5, 0]


def test_a_tensor_for_all_samples_is_another_shape_than_one_of_each() -> None:
    model = nn.Linear(1, 1)
    keys = [key_of({"x": rows(), "mask": torch.ones(samples, 3)}, model, "freed") for samples in (7, 1)]
    assert keys[0] != keys[1] == key_of({"x": rows(3), "mask": torch.ones(1, 3)}, model, "freed")


@dataclass
class Hidden:
    """An object whose tensors are out of sight."""

    def __init__(self) -> None:
        self.graph = rows()


class Graph:
    def __init__(self) -> None:
        self.nodes = rows()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.ones(4, 2), "y": torch.ones(3)}, r"batch\['x'\] has 4, batch\['y'\] has 3"),
        ({"x": torch.ones(4), "length": torch.tensor(3), "w": torch.ones(2)}, r"batch\['w'\] has 2"),
        ({"epoch": 3}, "no tensor with a batch dimension"),
        (torch.tensor(1.0), "no tensor with a batch dimension"),
        (None, "no tensor with a batch dimension"),
        ({"x": torch.ones(4), "weights": [0.1, 0.2, 0.3, 0.4]}, r"batch\['weights'\] is a list of 4 entries"),
        ({"x": torch.ones(4), "graph": Graph()}, r"batch\['graph'\] is a Graph, which holds tensors"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        ([torch.ones(3, 8, 8), torch.ones(3, 9, 9), torch.tensor([1, 2])], r"batch\[2\] has 2"),
        ([pack_sequence([torch.ones(3, 2)]), torch.ones(4)], r"batch\[0\] is a PackedSequence"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_place(batch: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        split_batch(batch, 2)
    assert "split_batch(batch, sub_batch) hook" in str(error.value)


@pytest.mark.parametrize("sub_batch", [0, -1])
def test_a_sub_batch_has_a_sample(sub_batch: int) -> None:
    with pytest.raises(ValueError, match="1 sample or more"):
        balanced_parts(rows(), sub_batch)
    with pytest.raises(ValueError, match="1 sample or more"):
        split_batch(rows(), sub_batch)


def test_a_hook_tells_the_number_of_samples_by_parts_of_one() -> None:
    def by_column(batch: Tensor, sub_batch: int) -> list[Tensor]:
        return list(batch.split(sub_batch, dim=1))

    assert samples_in(rows(), by_column) == 3


def test_tensors_are_replaced_wherever_they_are() -> None:
    """What is no container is copied only if it holds tensors."""
    packed = pack_sequence([rows(3), rows(2)])
    inner, plain = Graph(), object()
    batch = {"x": rows(), "list": [Sample(rows())], "packed": packed, "inner": inner, "plain": plain, "flat": [1, "a"]}
    twice = replaced_tensors(batch, lambda tensor: tensor * 2)
    assert torch.equal(twice["x"], rows() * 2)
    assert torch.equal(twice["list"][0].x, rows() * 2)
    assert torch.equal(twice["packed"].data, packed.data * 2)
    assert torch.equal(twice["packed"].batch_sizes, packed.batch_sizes)
    assert torch.equal(twice["inner"].nodes, inner.nodes * 2)
    assert twice["inner"] is not inner
    assert twice["plain"] is plain
    assert torch.equal(batch["x"], rows())
    assert {id(tensor) for tensor in tensors_in(batch)} >= {id(batch["x"]), id(batch["list"][0].x), id(packed.data)}


def test_tensors_in_slots_are_replaced_and_counted() -> None:
    class Slotted:
        __slots__ = ("unset", "values")

        def __init__(self, values: Tensor) -> None:
            self.values = values

    batch = Slotted(torch.ones(3))
    twin = replaced_tensors(batch, Tensor.clone)
    twin.values.zero_()
    assert batch.values.sum() == 3
    assert [tensor is batch.values for tensor in tensors_in(batch)] == [True]
