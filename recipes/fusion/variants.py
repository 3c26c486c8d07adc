"""The ways to run one training step that the optimizer-fusion recipes compare, all in one table.

Every variant is a bare PyTorch loop over the same model, batch and optimizer settings, and gives the same weights up to
rounding. They differ in the optimizer's kernel and in when updates run:

========================  ==========================  =============================================================
variant                   kernel                      updates run
========================  ==========================  =============================================================
baseline                  torch's default             in `optimizer.step()`
foreach                   `foreach=True`              in `optimizer.step()`
fused                     `fused=True`                in `optimizer.step()`
post_accumulate_hook      best one                    in backward, one optimizer a parameter (torch's tutorial)
retime_backward           best one                    in backward, by bucket
retime_forward            best one                    before the next forward, by bucket
retime_backward_default   torch's default             in backward, by bucket: the paper's comparison with `baseline`
retime_forward_default    torch's default             before the next forward: the paper's comparison
kernel_in_hooks           `AdamW(fused=True)`'s       in backward, by layer, the kernel and no more: the bound on fusion
no_update                 none                        never, gradients are dropped: the bound on any schedule
========================  ==========================  =============================================================

The *best* kernel is `fused=True` where the optimizer has it on this device, otherwise torch's default (which is the
multi-tensor kernel on CUDA).

What a variant's step takes at its peak, a process of its own measures (`serve`, for `fusion_memory`).
"""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.measure import MemoryProbe
from retime.foundations.torch_private.nn_and_optim import foreach_add, fused_adamw
from retime.mechanisms.fusion import fuse_optimizer
from retime.recipes.core.build import KernelUnavailable, build_batches, build_model, build_optimizer, loss_of
from retime.recipes.core.measure import PhaseClock, middle_step
from retime.recipes.core.trainer_loop import GradientBytes
from retime.recipes.models import parameter_count

Kernel = Literal["default", "foreach", "fused", "best"]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
PHASES = ("forward", "backward", "optimizer")


@dataclass
class Wired:
    """A model whose updates are arranged: what to call after backward, and a report if there is one."""

    finish: Callable[[], object]
    report: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Variant:
    """One way to run the step. `ours` marks this package's own."""

    label: str
    kernel: Kernel
    wire: Callable[[nn.Module, MakeOptimizer], Wired]
    ours: bool = False
    peer: bool = False


def _update(optimizer: Optimizer, *_: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _plain(model: nn.Module, make: MakeOptimizer) -> Wired:
    return Wired(partial(_update, make(model.parameters())))


def _hooked(model: nn.Module, make: MakeOptimizer) -> Wired:
    for parameter in model.parameters():
        if parameter.requires_grad:
            update = partial(_update, make([parameter]))
            parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    return Wired(lambda: None)


def _fusion(mode: str, model: nn.Module, make: MakeOptimizer) -> Wired:
    optimizer = make(model.parameters())
    fusion = fuse_optimizer(model, optimizer, mode=mode)
    return Wired(partial(_update, optimizer), fusion.report)


def _kernel_in_hooks(model: nn.Module, make: MakeOptimizer) -> Wired:
    """A hook calls the kernel, of AdamW alone, as soon as a layer has its gradients. The first step makes the state."""
    optimizer = make(model.parameters())
    if type(optimizer) is not torch.optim.AdamW or not optimizer.defaults["fused"]:
        raise KernelUnavailable("only AdamW(fused=True) is called kernel by kernel")
    handles: list[Any] = []

    def finish() -> None:
        if not handles:
            optimizer.step()
            handles.extend(handle for layer in model.modules() for handle in _call_kernel(layer, optimizer))
        optimizer.zero_grad()

    return Wired(finish)


def _call_kernel(layer: nn.Module, optimizer: Optimizer) -> list[Any]:
    parameters: list[Tensor] = list(layer.parameters(recurse=False))
    states = [optimizer.state[parameter] for parameter in parameters]
    averages, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    group = optimizer.param_groups[0]
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
    options["beta1"], options["beta2"] = group["betas"]
    arrived = 0

    def update(_: Tensor) -> None:
        nonlocal arrived
        arrived += 1
        if arrived < len(parameters):
            return
        arrived = 0
        foreach_add(steps, 1)
        fused_adamw(
            parameters, [p.grad for p in parameters if p.grad is not None], averages, squares, [], steps, **options
        )
        for parameter in parameters:
            parameter.grad = None

    return [parameter.register_post_accumulate_grad_hook(update) for parameter in parameters]  # type: ignore[no-untyped-call]


def _no_update(model: nn.Module, make: MakeOptimizer) -> Wired:
    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    # Dropped as they come, not all at the end: keeping all gradients costs memory traffic that a bound must not have.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    return Wired(lambda: None)


_backward, _forward = partial(_fusion, "backward"), partial(_fusion, "forward")
VARIANTS: dict[str, Variant] = {
    "baseline": Variant("default optimizer", "default", _plain, peer=True),
    "foreach": Variant("foreach=True", "foreach", _plain, peer=True),
    "fused": Variant("fused=True", "fused", _plain, peer=True),
    "post_accumulate_hook": Variant("hook per parameter", "best", _hooked, peer=True),
    "retime_backward": Variant("retime backward", "best", _backward, ours=True),
    "retime_forward": Variant("retime forward", "best", _forward, ours=True),
    "retime_backward_default": Variant("retime backward, default kernel", "default", _backward, ours=True),
    "retime_forward_default": Variant("retime forward, default kernel", "default", _forward, ours=True),
    "kernel_in_hooks": Variant("kernel in hooks (bound)", "best", _kernel_in_hooks),
    "no_update": Variant("no update (bound)", "default", _no_update),
}


class BareLoop:
    """A variant's own model with its updates arranged, and a batch; `block()` runs steps and times their phases."""

    def __init__(
        self, variant: Variant, model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: dict[str, Any]
    ) -> None:
        self.model = model
        self.inputs, self.targets = batch
        device = self.inputs.device
        flags = kernel_flags(variant.kernel, optimizer, device)
        self.wired = variant.wire(self.model, lambda parameters: build_optimizer(optimizer, parameters, flags))
        self.clock = PhaseClock(device)

    def step(self, batch: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """One step, on its own batch or another: forward, backward, what the loop does after backward; its loss."""
        inputs, targets = batch or (self.inputs, self.targets)
        clock = self.clock
        clock.start()
        loss = loss_of(self.model(inputs), targets)
        clock.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        clock.mark()
        self.wired.finish()
        clock.mark()
        return loss.detach()

    def block(self, steps: int) -> list[float]:
        """The typical one of `steps` steps: its forward, backward and optimizer phase and its whole time, in ms.

        One step more runs first and is not counted: it brings this variant's weights back into the caches.
        """
        for _ in range(steps + 1):
            self.step()
        return middle_step(self.clock.steps_ms()[1:])


def kernel_flags(kernel: Kernel, optimizer: dict[str, Any], device: torch.device) -> dict[str, bool]:
    """The optimizer's keyword arguments that choose a kernel, for example `{"fused": True}`."""
    if kernel == "best":
        probe = nn.Parameter(torch.zeros(1, device=device))
        try:
            build_optimizer(optimizer, [probe], {"fused": True})
        except KernelUnavailable:
            return {}
        return {"fused": True}
    return {} if kernel == "default" else {kernel: True}


def choose_variants(names: Iterable[str]) -> dict[str, Variant]:
    """The named rows of the table; ValueError lists the known names."""
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variants: {unknown[0]!r} is unknown: choose from {', '.join(VARIANTS)}")
    return {name: VARIANTS[name] for name in names}


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Bytes above the process without a model: peak of the first step, peak of later steps, gradients alive.

    The first step is apart because optimizers make their states in it, and backward fusion counts uses in it.
    """
    device = torch.device(request["device"])
    torch.set_num_threads(1)
    variant = VARIANTS[request["variant"]]
    batches = partial(build_batches, request["data"], request["batch_size"], 1, device)
    tiny = BareLoop(variant, build_model(request["small_model"], device, 0), batches()[0], request["optimizer"])
    tiny.block(1)  # loads kernels and code that would count as the model's otherwise
    del tiny
    gc.collect()
    before, source = _peak(device, lambda: None)
    model = build_model(request["model"], device, 0)
    loop = BareLoop(variant, model, batches()[0], request["optimizer"])
    first, _ = _peak(device, loop.step)
    later, _ = _peak(device, lambda: loop.block(request["steps"]))
    gradients = GradientBytes(model.parameters())
    loop.step()
    return {
        "first_bytes": first - before,
        "later_bytes": later - before,
        "gradient_bytes": gradients.peak,
        "parameters": parameter_count(model),
        "source": source,
    }


def _peak(device: torch.device, work: Any) -> tuple[int, str]:
    probe = MemoryProbe(device)
    probe.start()
    work()
    probe.stop()
    return probe.peaks()["batch"], probe.note or probe.source
