"""Layers that do something else with micro-batches than with a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import LBFGS, Optimizer
from torch.utils.checkpoint import CheckpointFunction

from retime.foundations.ddp import RankLostError, is_lost_message
from retime.foundations.lazy_updates import why_class_not_per_parameter
from retime.foundations.messages import warn_difference
from retime.foundations.parts import Recorder
from retime.foundations.torch_private.engine import tree_leaves
from retime.foundations.torch_private.nn_and_optim import BatchNormBase
from retime.foundations.torch_private.tensors import tensor_hooks, version_of
from retime.mechanisms.pipeline.calls import LayerHandler, replaced_tensors, tensors_in_order

T = TypeVar("T")

# Which optimizers may run on each rank for the layers that it has.


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Look whether a parameter's update needs nothing of parameters on other ranks; warn where nobody can know.

    Raises:
        ValueError: it does, or a parameter is none of the model's, and so nobody's.
    """
    ours = set(model.parameters())
    strange = [p for group in optimizer.param_groups for p in group["params"] if p not in ours]
    if strange:
        raise ValueError(
            f"the optimizer has {len(strange)} parameters that the module does not know (the first has shape "
            f"{tuple(strange[0].shape)}), so ranks would train them apart: make them attributes of the module, "
            "nn.Parameter or in an nn.ModuleList or nn.ParameterList"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "LBFGS needs all parameters and gradients at once, and each rank of a pipeline has its own layers only: "
            "choose a first-order optimizer"
        )
    why = why_class_not_per_parameter(type(optimizer))
    if why is not None:
        warn_difference(f"each rank of a pipeline updates its own layers only, and {why}")


# What is said where a model cannot be spread over ranks, or a rank is gone.


class PipelineError(ValueError):
    """The model or the batch cannot go through a pipeline; the message says what to change."""


@contextmanager
def messages_of(whose: Callable[[], str]) -> Iterator[None]:
    """Inside, a message that does not come is a RankLostError.

    Args:
        whose: of which rank it is, asked then.

    Raises:
        RankLostError: a message did not come.
    """
    try:
        yield
    except RankLostError:
        raise
    except RuntimeError as error:
        if not is_lost_message(error):
            raise
        raise RankLostError(
            f"a message of {whose()} did not come, as it has ended or failed: look at its error. ({error})"
        ) from error


def messages_of_group(group: Any) -> Any:
    """Name messages as :func:`messages_of` does, where all ranks of a group (None: all there are) send and receive."""

    def whose() -> str:
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        return f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(map(str, others))}"

    return messages_of(whose)


def all_gather_object(mine: T, group: Any) -> list[T]:
    """Return the objects of all ranks of a group, on all of them; all ranks call this."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with messages_of_group(group):
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def broadcast_object(mine: T, rank: int, group: Any) -> T:
    """Return the object of one rank of a group, on all of them; all ranks call this."""
    payload = [mine]
    with messages_of_group(group):
        dist.broadcast_object_list(payload, dist.get_global_rank(group, rank), group=group)
    return payload[0]


def broadcast(tensor: Tensor, rank: int, group: Any) -> None:
    """Replace a tensor by that of one rank of a group; all ranks call this."""
    message = tensor.contiguous()  # else what is sent is in the order of the memory, which ranks may differ in
    with messages_of_group(group):
        dist.broadcast(message, dist.get_global_rank(group, rank), group=group)
    if message is not tensor:
        tensor.copy_(message)


def broadcast_state(model: nn.Module, without: Set[Tensor] = frozenset()) -> None:
    """Give all ranks the parameters and buffers of the first, but for some."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor not in without:
            broadcast(tensor.detach(), 0, dist.group.WORLD)


# What goes between the layers of a pipeline: what cannot, and noise in it, to see what is made of unlike samples.

_STRONGEST = 4.0
"""Noise of the last sample, beside what a layer gives; it grows from the first, so that micro-batches become unlike."""


def refuse_kinds(name: str, value: Any) -> None:
    """Raise PipelineError if a layer takes or gives, in ``value``, what cannot be sent."""
    for leaf in tree_leaves(value, is_leaf=lambda one: isinstance(one, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            raise PipelineError(
                f"{name} takes or gives a PackedSequence, whose shape depends on how long its sequences are: let "
                "padded sequences go between the layers, and pack them inside of a layer"
            )
        if isinstance(leaf, Tensor) and (leaf.is_nested or leaf.layout != torch.strided):
            what = "nested" if leaf.is_nested else "sparse"
            raise PipelineError(
                f"{name} takes or gives a {what} tensor, which cannot go between the layers of a pipeline: let dense "
                "ones (build nn.TransformerEncoder with enable_nested_tensor=False)"
            )


def refuse_reentrant(name: str) -> None:
    """Raise PipelineError where a reentrant checkpoint has called a layer: no tensor has a graph or can get one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    if frame is not None:
        raise PipelineError(
            f"{name} runs inside of torch.utils.checkpoint.checkpoint(..., use_reentrant=True), torch's default, "
            "which cannot be stopped between the layers: give it use_reentrant=False (in transformers "
            "gradient_checkpointing_enable({'use_reentrant': False})), or call it in the layer's own forward"
        )


class LayerResults(LayerHandler):
    """A handler that looks at what goes between the layers, and adds noise to what they return if it is asked to.

    Attributes:
        low_precision: they have returned numbers of 16 bits.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self.low_precision = names, False
        self._recorder: Recorder | None = None
        self._samples: tuple[int, int, int] | None = None
        self._noise: str | None = None
        self._axes: dict[tuple[int, int], set[int]] = {}  # that may run over samples, by layer and tensor
        self._rows: dict[tuple[int, int], Tensor] = {}  # means of the whole batch's, where each sample has several
        self._orders: dict[tuple[int, int], set[str]] = {}  # of these rows, as parts of the batch have them
        self._within: dict[tuple[int, int], bool] = {}  # from 0 to 1

    @property
    def can_have_noise(self) -> bool:
        """Return whether layers return anything that has a dimension of samples."""
        return any(self._axes.values()) or any(len(orders) == 1 for orders in self._orders.values())

    def tells(self, recorder: Recorder | None) -> None:
        """Give what layers return from now on to a recorder; None: to none."""
        self._recorder = recorder

    @contextmanager
    def samples(self, first: int, count: int, whole: int, noise: str | None = None) -> Iterator[None]:
        """Inside, a step runs on samples of the first batch, the same number ``first`` there in all runs.

        Args:
            noise: in outputs of layers: ``"added"``; ``"multiplied"``, which keeps signs and bounds; ``"bounded"``:
                added, but to what is from 0 to 1, as an error of a loss that gets no probability would end a GPU's
                process.
        """
        self._samples, self._noise = (first, count, whole), noise
        try:
            yield
        finally:
            self._samples = self._noise = None

    def before(self, layer: int, args: Any, kwargs: Any) -> None:
        name = repr(self._names[layer])
        refuse_kinds(name, (args, kwargs))
        refuse_reentrant(name)
        if self._recorder is not None:
            self._recorder.inside += 1

    def after(self, layer: int, output: Any) -> Any:
        refuse_kinds(repr(self._names[layer]), output)
        tensors = tensors_in_order(output)
        self.low_precision |= any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        if self._recorder is not None:
            self._recorder.inside -= 1
            for tensor in tensors:
                self._recorder.operation_of(tensor).edge = True
        if self._samples is None:
            return output
        changed = {}
        for number, tensor in enumerate(tensors):
            key = layer, number
            if self._noise is None:
                axes = {axis for axis, length in enumerate(tensor.shape) if length == self._samples[1]}
                self._axes[key] = axes & self._axes.get(key, axes) if tensor.is_floating_point() else set()
                self._note_rows(key, tensor)
                if tensor.device.type != "cpu" and tensor.is_floating_point() and tensor.numel():
                    self._within[key] = bool(((tensor >= 0) & (tensor <= 1)).all()) and self._within.get(key, True)
            elif self._axes.get(key):
                changed[number] = self._with_noise(tensor, key, min(self._axes[key]))
            elif len(self._orders.get(key, ())) == 1:
                # [samples * steps, ...], or as torch.cat() puts views of samples
                axis = 0 if self._orders[key] == {"blocks"} else 1
                rows = tensor.unflatten(0, (self._samples[1], -1) if axis == 0 else (-1, self._samples[1]))  # type: ignore[no-untyped-call]
                changed[number] = self._with_noise(rows, key, axis).flatten(0, 1)
        return replaced_tensors(output, changed) if changed else output

    def _note_rows(self, key: tuple[int, int], tensor: Tensor) -> None:
        """Look how rows lie of which each sample has several, as far as parts of a batch show it."""
        assert self._samples is not None
        first, count, whole = self._samples
        several = tensor.dim() > 0 and len(tensor) > count and len(tensor) % count == 0
        if self._axes[key] or not tensor.is_floating_point() or not several:
            self._orders.pop(key, None)
            return
        rows = tensor.detach().reshape(len(tensor), -1).double().mean(1).cpu()
        if count == whole:
            self._rows[key], self._orders[key] = rows, {"blocks", "turns"}
        elif key in self._orders:
            there = self._rows[key]
            expected = {
                "blocks": there.reshape(whole, -1, *there.shape[1:])[first : first + count],
                "turns": there.reshape(-1, whole, *there.shape[1:])[:, first : first + count],
            }
            self._orders[key] -= {
                order
                for order, means in expected.items()
                if means.numel() != len(rows) or not torch.allclose(means.flatten(), rows, rtol=1e-3, atol=1e-6)
            }

    def _with_noise(self, tensor: Tensor, key: tuple[int, int], axis: int) -> Tensor:
        """Each sample's noise is the same in whichever part of the batch it is."""
        assert self._samples is not None
        first, _, whole = self._samples
        rows = []
        for position, row in enumerate(tensor.movedim(axis, 0), first):
            strength = (position + 1) / whole
            drawn = torch.Generator().manual_seed(hash((*key, position)) % 2**63)
            if self._noise == "added" or (self._noise == "bounded" and not self._within.get(key)):
                size = row.detach().float().square().mean().sqrt().nan_to_num(1.0).clamp(min=1.0)
                noise = torch.randn(row.shape, generator=drawn).to(row.device) * size * (_STRONGEST * strength)
                rows.append(row + noise.to(row.dtype))
            else:
                noise = torch.rand(row.shape, generator=drawn).to(row.device)
                rows.append(row * (1 - 0.8 * strength * noise).to(row.dtype))
        return torch.stack(rows).movedim(0, axis)


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def warn_of_parts(model: nn.Module, microbatches: int) -> None:
    """Say of layers that see parts of a batch that they do, and of those that draw random numbers; once each kind."""
    parts = microbatches > 1
    norms = [name for name, one in model.named_modules() if isinstance(one, BatchNormBase)]
    if norms and parts:
        warn_difference(
            f"{norms[0]!r} and other BatchNorm layers take their statistics from micro-batches under a pipeline, so "
            "training differs from that on one device: use microbatches=1, or another normalisation"
        )
    drops = dropouts_in(model)
    if drops:
        warn_difference(f"{drops[0]!r} and other dropout layers draw other masks under a pipeline than on one device")
    tables = [name for name, one in model.named_modules() if getattr(one, "scale_grad_by_freq", False)]
    if tables and parts:
        warn_difference(
            f"{tables[0]!r} divides gradients by how often a row was read (scale_grad_by_freq), in a micro-batch under "
            "a pipeline, so training differs from that on one device: use microbatches=1, or leave it out"
        )


def dropouts_in(model: nn.Module) -> list[str]:
    """Return the names of dropout layers, of whose random numbers :func:`warn_of_parts` tells."""
    return [name for name, one in model.named_modules() if isinstance(one, _DROPOUT) and one.p]


def warn_of_gradient_hooks(model: nn.Module) -> None:
    """Say of hooks on parameters' gradients that they see those of micro-batches."""
    hooked = [name for name, one in model.named_parameters() if one.requires_grad and tensor_hooks(one)]
    if hooked:
        others = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        warn_difference(
            f"{hooked[0]!r}{others} has a hook on its gradient (register_hook), which runs once a micro-batch under a "
            "pipeline, on that one's share: a hook that is not linear, such as a clamp, gives other gradients there. "
            "Use microbatches=1, or change gradients in on_before_optimizer_step"
        )


class ChangedBuffers:
    """Says which buffers a step changes, as spectral norms do: once a micro-batch, in place of once a batch.

    Args:
        model: before the step. BatchNorm's buffers do not count, of which :func:`warn_of_parts` tells.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = self._found()

    def warn(self) -> None:
        """After the step."""
        changed = [name for name, version in self._found().items() if version != self._before.get(name)]
        if changed:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            warn_difference(
                f"the forward pass changes the buffer {changed[0]!r}{others}, and runs once a micro-batch under a "
                "pipeline, so training may differ from that on one device: use microbatches=1, or change it once a "
                "batch, in a hook",
                every_rank=True,
            )

    def _found(self) -> dict[str, tuple[int, int]]:
        """Identity of the tensor that each buffer is, and number of times it was written in place."""
        norms = {f"{name}." for name, one in self._model.named_modules() if isinstance(one, BatchNormBase)}
        return {
            name: (id(buffer), 0 if buffer.is_inference() else version_of(buffer))
            for name, buffer in self._model.named_buffers()
            if f"{name.rpartition('.')[0]}." not in norms
        }
