"""Which optimizers can be taken apart, parameter by parameter; and ``Adam(fused=True)`` for some parameters.

Fusion needs the update of one parameter to depend on nothing but that parameter, its gradient, its state and its
group's hyper-parameters (Jiang et al. 2021, section 3). torch's own optimizers are like that, LBFGS excepted. Nothing
can be known about the ``step`` of somebody else's class, so that has to be declared.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from retime.foundations.torch_private.engine import without_dispatch_modes
from retime.foundations.torch_private.nn_and_optim import (
    INIT_GROUP,
    foreach_add,
    fused_adam_kernel,
    global_step_hooks,
    step_hooks,
)

# Replace one method of one optimizer object, and put it back.


class ReplacedMethod:
    """``optimizer.<name>`` becomes ``function(optimizer, ...)``; ``inner`` is what stood there before.

    The replacement is a method bound to the optimizer, because learning-rate schedulers wrap
    ``optimizer.step.__func__``, and looks like the method it replaces, marks of such wrappers included.
    """

    def __init__(self, optimizer: Optimizer, name: str, function: Callable[..., Any]) -> None:
        self._optimizer, self._name = optimizer, name
        self.inner: Callable[..., Any] = getattr(optimizer, name)
        self.active = True

        @functools.wraps(getattr(self.inner, "__func__", self.inner))
        def stand_in(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.active else self.inner(*args, **kwargs)

        stand_in._retime_fused = self  # type: ignore[attr-defined]
        self._stand_in = types.MethodType(stand_in, optimizer)
        setattr(optimizer, name, self._stand_in)

    def restore(self) -> None:
        """Put the former method back; where somebody wrapped ours meanwhile, ours only passes calls on."""
        if not self.active:
            return
        self.active = False
        if self._optimizer.__dict__.get(self._name) is not self._stand_in:
            return
        if getattr(self.inner, "__func__", None) is getattr(type(self._optimizer), self._name):
            delattr(self._optimizer, self._name)
        else:
            setattr(self._optimizer, self._name, self.inner)


# Which optimizers update their parameters one by one, by a ``step`` that may be taken over.

_declared: set[type[Optimizer]] = set()
_NO_STEP = inspect.unwrap(Optimizer.step)
_TORCHS_ZERO_GRAD = Optimizer.zero_grad
_KNOWN_WRAPPERS = (LRScheduler.__init__.__code__.co_filename, ReplacedMethod.__init__.__code__.co_filename)
"""Files whose wrappers of an optimizer's step pass calls on: torch's schedulers count them, ours take them over."""


def declare_per_parameter(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Declare that ``optimizer_class.step`` updates each parameter independently; usable as a class decorator.

    ``step`` reads ``param_groups`` and ``state`` only, needs no argument, draws no random numbers, and
    gives the same results if it is called for one part of the parameters after another. Its counters are in
    ``state[parameter]``, or in a parameter's group, if it writes the same there whichever parameters the group has
    (as schedule-free optimizers do). Under forward fusion the first step runs the plain way, to set up the groups.

    Raises:
        TypeError: it is no optimizer class.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class={optimizer_class!r} is not an Optimizer class: decorate, or give, the class")
    _declared.add(optimizer_class)
    return optimizer_class


def raw_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's ``step`` without the wrapper that runs step hooks: those belong to the whole step, not a part.

    Of torch's own optimizers also without the wrapper that switches gradients off: call it under ``no_grad``.
    """
    step: Any = type(optimizer).step
    if inspect.unwrap(step).__module__.startswith("torch.optim"):
        return inspect.unwrap(step)  # type: ignore[no-any-return]
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def why_not_separable(optimizer: Optimizer) -> str | None:
    """The reason why this optimizer must step as a whole, or None when it can be taken apart."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS needs all parameters and gradients at once; choose a first-order optimizer to fuse"
    why = why_class_not_per_parameter(type(optimizer))
    if why is not None:
        return why
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name}(differentiable=True) needs the graph of the whole step"
    if is_declared(optimizer):
        why = _why_not_this_option(optimizer)
        if why is not None:
            return f"{name} {why}"
    if any(step_hooks(optimizer)) or any(global_step_hooks()):
        return f"{name} has step hooks, which see all parameters between two steps; remove them to fuse"
    return None


def is_declared(optimizer: Optimizer) -> bool:
    """Return whether somebody has promised that this optimizer's class treats every parameter on its own."""
    return type(optimizer) in _declared


def _why_not_this_option(optimizer: Optimizer) -> str | None:
    """The reason why a per-parameter class of another library is not with the options that it was made with."""
    if optimizer.defaults.get("gradient_release"):
        return "has gradient_release=True, so its own hooks update in the backward pass; create it without"
    if getattr(optimizer, "bf16_stochastic_round", False):
        return "has bf16_stochastic_round=True, which draws random numbers parameter after parameter; create it without"
    settings = getattr(optimizer, "mng", None)
    if getattr(settings, "pid2config", None) or getattr(settings, "module_weight_config_triple", None):
        return "finds settings of GlobalOptimManager by a parameter's number in its group; create it without them"
    return None


def why_class_not_per_parameter(kind: type[Optimizer]) -> str | None:
    """The reason why nothing is known of an optimizer class's updates, or None for torch's own and declared ones."""
    if inspect.unwrap(kind.step) is _NO_STEP:
        return f"{kind.__name__} has no step of its own: it updates elsewhere, as LOMO does in its fused_backward()"
    if kind not in _declared:
        for method in ("step", INIT_GROUP):
            function = inspect.unwrap(getattr(kind, method, _NO_STEP))
            if not function.__module__.startswith("torch.optim"):
                return (
                    f"{kind.__name__}.{method} is not torch's own, so its updates may depend on each other; "
                    f"if they do not, call retime.declare_per_parameter({kind.__name__})"
                )
    return None


def why_not_this_step(optimizer: Optimizer) -> str | None:
    """The reason why this object's ``step`` must not be taken over: somebody put another method in its place."""
    replaced = optimizer.__dict__.get("step")
    function = getattr(replaced, "__func__", replaced)
    while function is not None and function is not type(optimizer).step:
        # a mock has every attribute that one asks for, so marks prove nothing; where the code comes from does
        code = getattr(function, "__code__", None)
        if getattr(code, "co_filename", None) not in _KNOWN_WRAPPERS:
            return f"the step method of this {type(optimizer).__name__} was replaced by {replaced!r}"
        function = function.__wrapped__
    return None


def why_not_this_zero_grad(optimizer: Optimizer) -> str | None:
    """The reason why gradients must not be used up: a ``zero_grad`` of somebody's own may read or keep them."""
    if is_torchs_zero_grad(optimizer.zero_grad):
        return None
    return (
        f"the zero_grad of this {type(optimizer).__name__} is not torch's own and may read gradients, or keep them; "
        "use mode='forward'"
    )


def is_torchs_zero_grad(method: Callable[..., Any]) -> bool:
    """Return whether this bound method only clears or zeroes gradients."""
    return getattr(method, "__func__", None) is _TORCHS_ZERO_GRAD


def is_fused_step(step: object) -> bool:
    """Return whether ``step`` is, or wraps, a method by which a fusion has taken over an optimizer."""
    replaced = getattr(step, "_retime_fused", None)
    return isinstance(replaced, ReplacedMethod) and replaced.active


# ``Adam(fused=True)`` and ``AdamW(fused=True)`` for some parameters, by torch's own kernel and little else.
#
# ``Optimizer.step`` looks up anew what it can do, groups tensors and enters contexts, each time: some 30 us in caches
# that hold it, and a multiple of that between gradients of several MB, which leave the caches nothing else. Optimizer
# fusion calls it for each bucket. So where the step would end in this kernel, here it begins with it. The first use in
# a process compares the bits with ``step``'s, in case a version of torch does something else.

_STEP = inspect.unwrap(Adam.step)
_INIT_GROUP = inspect.unwrap(getattr(Adam, INIT_GROUP))  # torch.compile wraps it on first use
_PER_PARAMETER = ("exp_avg", "exp_avg_sq", "step")
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class FusedAdam:
    """Updates parameters of one group by the fused kernel.

    Args:
        group: the hyper-parameters.
        state: of the optimizer, by parameter.
    """

    def __init__(self, group: Mapping[str, Any], state: Mapping[Any, Any]) -> None:
        self._state = state
        self._amsgrad: bool = group["amsgrad"]
        self._kernel = fused_adam_kernel(decoupled=group["decoupled_weight_decay"])
        beta1, beta2 = group["betas"]
        same = {name: group[name] for name in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}
        self._options: dict[str, Any] = {**same, "beta1": beta1, "beta2": beta2, "grad_scale": None, "found_inf": None}

    @classmethod
    def of(cls, optimizer: Optimizer, step: Callable[..., Any], group: Mapping[str, Any]) -> FusedAdam | None:
        """Updater of this group's parameters in place of ``step``; None where that would do more than call the kernel.

        Args:
            optimizer: whose state is used.
            step: its class's, without wrappers.
            group: one of its groups, or a copy.
        """
        kind = type(optimizer)
        if (
            kind not in (Adam, AdamW)
            or step is not _STEP
            or inspect.unwrap(getattr(kind, INIT_GROUP)) is not _INIT_GROUP
        ):
            return None
        if next((p.is_cuda for p in optimizer.state), False) and torch.cuda.is_current_stream_capturing():
            return None  # step has something to say
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return None
        numbers = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
        if (
            group["fused"] is not True
            or group["differentiable"]
            or not all(isinstance(n, int | float) for n in numbers)
        ):
            return None
        return cls(group, optimizer.state) if "decoupled_weight_decay" in group and is_the_same_here() else None

    def update(self, parameters: Sequence[Tensor]) -> bool:
        """Step these parameters from their ``.grad``, with gradients switched off.

        Returns:
            Whether that was done; not where state is still to be made, or tensors are not all of one kind.
        """
        first = parameters[0]
        dtype, device = first.dtype, first.device
        if dtype not in _DTYPES:
            return False
        gradients, states = [], []
        for parameter in parameters:
            gradient, state = parameter.grad, self._state.get(parameter)
            if (
                not state
                or gradient is None
                or gradient.layout is not torch.strided
                or gradient.dtype is not dtype
                or parameter.dtype is not dtype
                or gradient.device != device
                or parameter.device != device
            ):
                return False
            gradients.append(gradient)
            states.append(state)
        averages, squares, steps = ([state[name] for state in states] for name in _PER_PARAMETER)
        largest = [state["max_exp_avg_sq"] for state in states] if self._amsgrad else []
        foreach_add(steps, 1)
        self._kernel(parameters, gradients, averages, squares, largest, steps, **self._options)
        return True


@functools.cache
def is_the_same_here() -> bool:
    """Return whether ``step`` of this torch gives the bits of the kernel alone: three steps of small optimizers."""
    with without_dispatch_modes():
        return all(
            _same(kind, amsgrad=amsgrad, maximize=maximize)
            for kind in (Adam, AdamW)
            for amsgrad in (False, True)
            for maximize in (False, True)
        )


def _same(kind: type[Adam], *, amsgrad: bool, maximize: bool) -> bool:
    values = torch.linspace(-1, 1, 12, dtype=torch.float32, device="cpu")
    ours, theirs = ([values.clone().requires_grad_(), values[:3].clone().requires_grad_()] for _ in range(2))
    optimizers = [
        kind(tensors, lr=0.1, weight_decay=0.1, fused=True, amsgrad=amsgrad, maximize=maximize)
        for tensors in (ours, theirs)
    ]
    for count in range(1, 4):
        for tensors in (ours, theirs):
            for tensor in tensors:
                tensor.grad = torch.sin(values[: len(tensor)] * count)
        if count == 1:
            optimizers[0].step()  # makes the state
        else:
            group = {key: value for key, value in optimizers[0].param_groups[0].items() if key != "params"}
            with torch.no_grad():
                FusedAdam(group, optimizers[0].state).update(ours)
        optimizers[1].step()
    states = [
        [optimizer.state[p] for p in tensors] for optimizer, tensors in zip(optimizers, (ours, theirs), strict=True)
    ]
    return all(map(torch.equal, ours, theirs)) and all(
        torch.equal(one[name], other[name]) for one, other in zip(*states, strict=True) for name in one
    )
