"""A batch cut into sub-batches along its first dimension (moDNN, section 5.1)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retime.foundations.storages import attributes_of, tensors_in
from retime.foundations.torch_private.engine import tree_flatten, tree_unflatten
from retime.foundations.torch_private.tensors import post_accumulate_hooks, sparse_indices, sparse_values

# The loss in what a training step returns.


def loss_of(output: Any) -> Tensor:
    """The loss in what a step returns: the scalar itself, or its ``loss``.

    Raises:
        ValueError: there is none.
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"a step must return its loss, a scalar, or a mapping with 'loss'; it returned {type(output)}")
    return loss.reshape(())


Split = Callable[[Any, int], Sequence[Any]]
"""``split_batch(batch, sub_batch)``: the parts in order, all of ``sub_batch`` samples but the last."""
_HOOK = "give a split_batch(batch, sub_batch) hook that returns the parts, of sub_batch samples each, the last the rest"


def batch_size_of(batch: Any) -> int:
    """Number of samples of a batch: the first dimension of its tensors.

    Scalars, and tensors whose first dimension is 1 beside others of more, have no batch dimension: they go to every
    part, as they would be broadcast. So does whatever is no tensor, but for NumPy arrays, and lists of anything but
    numbers, of one entry a sample.

    Args:
        batch: tensors of shape ``(B, ...)`` in dicts, lists, tuples, dataclasses, mappings such as ``BatchEncoding``,
            or anything registered with ``torch.utils._pytree``.

    Raises:
        ValueError: no tensor has a batch dimension, tensors disagree on it, or what the batch holds cannot be cut by
            its first dimension. The message names the places and asks for a ``split_batch`` hook.
    """
    sizes: dict[str, int] = {}
    for path, leaf in leaves_of(batch):
        if isinstance(leaf, PackedSequence):
            raise ValueError(f"{path} is a PackedSequence, whose first dimension runs over samples and time: {_HOOK}")
        if not isinstance(leaf, Tensor) or not leaf.dim():
            if _holds_tensors(attributes_of(leaf), 0):  # which would go to every part whole
                raise ValueError(f"{path} is a {type(leaf).__name__}, which holds tensors that cannot be cut: {_HOOK}")
        elif leaf.is_nested or leaf.layout != torch.strided:
            kind = "a nested tensor" if leaf.is_nested else f"a tensor of layout {leaf.layout}"
            raise ValueError(f"{path} is {kind}, which cannot be cut by its first dimension: {_HOOK}")
        else:
            sizes[path] = leaf.shape[0]
    if not sizes:
        raise ValueError(f"no tensor with a batch dimension in a batch of type {type(batch).__name__}: {_HOOK}")
    path_of_size = {size: path for path, size in reversed(sizes.items()) if size != 1}
    if len(path_of_size) > 1:
        text = ", ".join(f"{path} has {size}" for size, path in reversed(path_of_size.items()))
        raise ValueError(f"tensors of this batch disagree on the number of samples ({text}): {_HOOK}")
    return next(iter(path_of_size), 1)


def split_batch(batch: Any, sub_batch: int) -> list[Any]:
    """The parts of a batch, of ``sub_batch`` samples each; the last one may have fewer.

    Tensors in the parts are views: no sample is copied. A batch of at most ``sub_batch`` samples comes back whole, as
    the only part.

    Raises:
        ValueError: ``sub_batch`` is below 1, or as for :func:`batch_size_of`.
    """
    if sub_batch < 1:
        raise ValueError(f"sub_batch={sub_batch}: a sub-batch has 1 sample or more")
    samples = batch_size_of(batch)
    if samples <= sub_batch:
        return [batch]
    return [part_of(batch, slice(start, start + sub_batch), samples) for start in range(0, samples, sub_batch)]


def part_of(batch: Any, which: slice | Tensor, samples: int) -> Any:
    """The chosen samples of a batch of ``samples``: a slice gives views, a tensor of indices copies.

    Raises:
        ValueError: a list of numbers has as many entries as there are samples, and may be one a sample or for all.
    """

    def cut(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples:
            return leaf[which] if isinstance(which, slice) else leaf[which.to(leaf.device)]
        if not _is_one_a_sample(leaf, samples):
            if _is_flat(leaf) and len(leaf) == samples > 1:
                raise ValueError(
                    f"{path} is a {type(leaf).__name__} of {samples} entries in a batch of {samples} samples: one "
                    f"entry a sample, or the same for all? Make it a tensor, or {_HOOK}"
                )
            return leaf
        if not _is_flat(leaf):  # an array
            return leaf[which if isinstance(which, slice) else which.tolist()]
        return type(leaf)(leaf[which] if isinstance(which, slice) else [leaf[index] for index in which.tolist()])

    return map_leaves(batch, cut)


def samples_in(batch: Any, split: Split = split_batch) -> int:
    """Number of samples of a batch by this way of splitting: a hook is asked for parts of one sample."""
    return batch_size_of(batch) if split is split_batch else len(split(batch, 1))


def tensors_of(batch: Any, path: str = "batch") -> dict[str, Tensor]:
    """The tensors of a batch, or of another value called ``path``, by place, such as ``batch['labels']``."""
    return {place: leaf for place, leaf in leaves_of(batch, path) if isinstance(leaf, Tensor)}


def map_leaves(
    value: Any, change: Callable[[str, Any], Any], path: str = "batch", is_list: Callable[[Any], bool] | None = None
) -> Any:
    """A copy of a nested value with each leaf replaced by ``change(place, leaf)``; the leaves stay where they were.

    Leaves are tensors, whatever is no container, lists or tuples without tensors, and those of ``is_list``.

    Raises:
        ValueError: a container cannot be rebuilt.
    """
    children = _children(value, path, is_list)
    if children is None:
        return change(path, value)
    changed = [map_leaves(child, change, place, is_list) for place, _, child in children]
    try:
        return _rebuild(value, [key for _, key, _ in children], changed)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}, a {type(value).__name__}, cannot be rebuilt from parts ({error}): {_HOOK}"
        ) from error


def replaced_tensors(batch: Any, change: Callable[[Tensor], Tensor], depth: int = 3) -> Any:
    """A copy of a batch with all its tensors replaced, so that a step may write into it.

    Objects that are no containers are copied if they hold tensors, in ``depth`` layers of objects; the others stay.
    """

    def leaf(_: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, PackedSequence):
            data, lengths, order, back = value
            return type(value)(change(data), lengths, *(one if one is None else change(one) for one in (order, back)))
        attributes = attributes_of(value)
        if depth == 0 or not _holds_tensors(attributes, depth - 1):
            return value
        try:
            twin = copy.copy(value)
        except Exception:  # whatever an object says to being copied
            return value
        for name, one in attributes.items():
            object.__setattr__(twin, name, replaced_tensors(one, change, depth - 1))
        return twin

    return map_leaves(batch, leaf)


def leaves_of(
    value: Any, path: str = "batch", is_list: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value with their places, as :func:`map_leaves` has them."""
    children = _children(value, path, is_list)
    if children is None:
        yield path, value
    else:
        for place, _, child in children:
            yield from leaves_of(child, place, is_list)


def _children(value: Any, path: str, is_list: Callable[[Any], bool] | None) -> list[tuple[str, Any, Any]] | None:
    """Content of a container, as (place, key, child); None for a leaf."""
    if isinstance(value, Tensor | PackedSequence) or _is_flat(value):
        return None
    if is_list is not None and isinstance(value, list | tuple) and is_list(value):
        return None
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", key, child) for key, child in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(f"{path}.{name}", name, getattr(value, name)) for name in names]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f"{path}.{name}", name, child) for name, child in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple):
        return [(f"{path}[{index}]", index, child) for index, child in enumerate(value)]
    children, _ = tree_flatten(value)
    if len(children) == 1 and children[0] is value:
        return None
    return [(f"{path}<{index}>", index, child) for index, child in enumerate(children)]


def _rebuild(value: Any, keys: list[Any], children: list[Any]) -> Any:
    if isinstance(value, Mapping):
        if not (isinstance(value, MutableMapping) and (isinstance(value, dict) or hasattr(value, "__copy__"))):
            return type(value)(dict(zip(keys, children, strict=True)))  # type: ignore[call-arg]
        changed: Any = copy.copy(value)
        for key, child in zip(keys, children, strict=True):
            changed[key] = child
        return changed
    if dataclasses.is_dataclass(value):
        changed = copy.copy(value)
        for name, child in zip(keys, children, strict=True):
            object.__setattr__(changed, name, child)  # frozen ones too
        return changed
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*children)
    if isinstance(value, list | tuple):
        return type(value)(children)
    return tree_unflatten(children, tree_flatten(value)[1])


def _is_flat(value: Any) -> bool:
    """A list or tuple without tensors, as of text, numbers or what is known of each sample: it stays one piece."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and not hasattr(value, "_fields")
        and all(isinstance(child, (str, bytes, *_NUMBERS)) or not _holds_tensors(child, 3) for child in value)
    )


def _is_one_a_sample(value: Any, samples: int) -> bool:
    """Tell text as PyTorch's collate function leaves it, and a user's dictionaries; numbers may be for all samples."""
    if _is_flat(value):
        return len(value) == samples and not any(isinstance(child, _NUMBERS) for child in value)
    return type(value).__module__ == "numpy" and bool(getattr(value, "shape", ())[:1] == (samples,))


_NUMBERS = (int, float, complex, type(None))


def _holds_tensors(value: Any, depth: int) -> bool:
    return any(
        isinstance(leaf, Tensor | PackedSequence) or (depth > 0 and _holds_tensors(attributes_of(leaf), depth - 1))
        for _, leaf in leaves_of(value)
    )


# A batch in sub-batches of nearly equal size (moDNN, section 5.1).


def part_lengths(samples: int, count: int) -> list[int]:
    """Number of samples of each of so many nearly equal parts; larger first."""
    size, larger = divmod(samples, count)
    return [size + (index < larger) for index in range(count)]


def balanced_parts(batch: Any, sub_batch: int, split: Split = split_batch) -> list[Any]:
    """As few parts of at most ``sub_batch`` samples as there can be, whose sizes differ by one at most; larger first.

    So no part is much smaller than the others: 13 samples in parts of at most 4 are 4, 3, 3 and 3, not 4, 4, 4 and 1.
    The parts of the paper are equal too (moDNN, section 5.1).

    Args:
        split: a hook is asked for two parts of the batch, and then for parts of these.

    Raises:
        ValueError: ``sub_batch`` is below 1, the batch cannot be split, or a hook gave parts of other sizes.
    """
    if sub_batch < 1:
        raise ValueError(f"sub_batch={sub_batch}: a sub-batch has 1 sample or more")
    samples = samples_in(batch, split)
    return _in_parts(batch, samples, -(-samples // sub_batch), split)


def _in_parts(batch: Any, samples: int, count: int, split: Split) -> list[Any]:
    if count <= 1:
        return [batch]
    lengths = part_lengths(samples, count)
    if split is split_batch:
        ends = list(accumulate(lengths))
        return [part_of(batch, slice(first, last), samples) for first, last in zip([0, *ends], ends, strict=False)]
    half = -(-count // 2)
    first = sum(lengths[:half])
    parts = list(split(batch, first))
    sizes = [samples_in(part, split) for part in parts]
    if sizes != [first, samples - first]:
        text = ", ".join(map(str, sizes))
        raise ValueError(
            f"split_batch gave parts of {text} samples for sub_batch={first} of a batch of {samples}: all but the last "
            f"have to have {first}, and the last the rest"
        )
    return [*_in_parts(parts[0], first, half, split), *_in_parts(parts[1], samples - first, count - half, split)]


# What a plan is made for: batches of one shape, and the model as it is.


def key_of(batch: Any, model: nn.Module, gradients: str) -> tuple[Any, ...]:
    """Everything of the batch's shape but how many samples it has, and the model as it is.

    A layer that is frozen, or put into another mode, computes and saves other things. Hooks that wait for whole
    gradients keep batches whole.
    """
    flags = [module.training for module in model.modules()]
    for parameter in model.parameters():
        flags += [parameter.requires_grad, bool(post_accumulate_hooks(parameter))]
    tensors = tensors_of(batch)
    samples = max((one.shape[0] for one in tensors.values() if one.dim()), default=1)
    for_all = {place for place, one in tensors.items() if one.dim() and samples > 1 == one.shape[0]}
    shapes = [
        (place + " for all" * (place in for_all), tuple(one.shape[1:]), one.dtype) for place, one in tensors.items()
    ]
    return gradients, crc32(bytes(flags)), tuple(shapes)


def name_of(key: tuple[Any, ...]) -> str:
    """A key as text, for a checkpoint."""
    *model, shapes = key
    return "; ".join([*map(str, model), *(f"{place} {list(shape)} {dtype}" for place, shape, dtype in shapes)])


def sizes_of(batch: Any) -> tuple[int, ...]:
    """Bytes of each tensor, those in objects too; a sparse one has values and indices."""
    return tuple(
        sparse_values(one).nbytes + sparse_indices(one).nbytes if one.layout == torch.sparse_coo else one.nbytes
        for one in tensors_in(batch)
    )


# Which part of a batch a dry run takes for a sub-batch.


def dry_part(batch: Any, first: int, last: int, split: Split = split_batch) -> Any:
    """Samples ``first`` to ``last - 1``; from a ``split_batch`` hook, which chooses by itself, the largest such part.

    Raises:
        ValueError: the batch cannot be split.
    """
    if split is split_batch:
        return part_of(batch, slice(first, last), samples_in(batch))
    if first == 0 and last >= samples_in(batch, split):
        return batch
    parts = split(batch, last - first)
    full = [part for part in parts if samples_in(part, split) == last - first]
    return max(full or parts[:1], key=lambda part: sum(sizes_of(part)))
