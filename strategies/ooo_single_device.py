"""Out-of-order backprop on one device as a Lightning strategy (Oh et al. 2022, section 4.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from retime.foundations.arguments import checked
from retime.foundations.compatibility import Mechanism
from retime.foundations.messages import parse_bytes
from retime.foundations.streams import has_streams
from retime.mechanisms.fusion import BackwardFusion
from retime.mechanisms.two_streams import NO_UPDATES_IN_GRAPHS, Threads, TwoStreamBackward, TwoStreamReport
from retime.strategies.support.base import LightningOnly, SingleDevice
from retime.strategies.support.fused_stepping import FusedStepping, StepsFused


class OOOSingleDeviceStrategy(LightningOnly, StepsFused, SingleDevice):
    """One device, with weight gradients of linear layers and convolutions on a stream beside the output gradients.

    On CUDA the fit runs on a stream of high priority, and the weight gradients on one of lower priority. On a CPU they
    run on a second thread. A search of at most 38 training steps chooses the numbers of threads, and removes
    the second stream if it is not faster, with one ``NoEffectWarning``.

    Gradients equal, bit for bit, those of a plain strategy whose kernels have as many threads: with ``threads=(n, n)``
    and ``n = torch.get_num_threads()`` those of plain training.

    With ``fuse_updates=True`` this is ``fused_optimizer`` on two streams: each update runs right after its weight
    gradient, on the same stream. Updates of layers that stay in order run as in ``fused_optimizer``, and the search
    compares with it. Steps that cannot be fused exactly update in ``optimizer.step()``, with one ``NoEffectWarning``
    for each reason.

    Args:
        threads: of each kernel on the main stream and on the sub-stream, on a CPU, without a search; None: the search
            chooses them. With deterministic algorithms, as under ``Trainer(deterministic=True)``, there is no search,
            and both have as many as torch has.
        max_memory: bytes, or ``"500MB"``, of inputs and output gradients that may wait for their weight gradients;
            None: no bound.
        layers: names, in the LightningModule, of layers whose weight gradients may run on the sub-stream, as in
            ``report().setting.layers`` of an earlier fit; None: all, or with a search on a CPU those that its profile
            chooses.
        graph: capture parts of the model as CUDA graphs, so that the host does not issue their kernels
            one by one (section 4.2): each part whose code is certain to run the same kernels in each call
            (:mod:`retime.mechanisms.two_streams.graph`). ``training_step`` itself is not captured. On devices other
            than CUDA ``setup`` raises ValueError.
        fuse_updates: run updates inside the backward pass too.
        device: the one device; None: the one the Trainer chose.

    All other arguments are :class:`lightning.pytorch.strategies.SingleDeviceStrategy`'s.
    """

    strategy_name = "ooo_single_device"
    instead = "ooo_ddp"

    @checked
    def __init__(
        self,
        threads: Threads | None = None,
        max_memory: int | str | None = None,
        device: str | int | torch.device | None = None,
        accelerator: Accelerator | str | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        graph: bool = False,
        *,
        layers: Collection[str] | None = None,
        fuse_updates: bool = False,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
        if max_memory is not None:
            parse_bytes("max_memory", max_memory)
        if graph and fuse_updates:
            raise ValueError(f"{NO_UPDATES_IN_GRAPHS}: leave one of fuse_updates=True and graph=True out")
        self._options: dict[str, Any] = {"threads": threads, "max_memory": max_memory, "layers": layers, "graph": graph}
        self._two_streams: TwoStreamBackward | None = None
        self._main_stream = ExitStack()
        self._last_report: TwoStreamReport | None = None
        self._stepping = FusedStepping("backward", make_fusion=self._make_fusion) if fuse_updates else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, made in the middle of a fit too, has the report; its two streams begin with its own fit."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"_two_streams": None, "_main_stream": ExitStack(), "_last_report": self.report()}

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """Mechanisms that this strategy brings along."""
        fusion = () if self._stepping is None else (Mechanism.BACKWARD_FUSION,)
        return (Mechanism.TWO_STREAMS, *fusion)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._take_off()  # a fit that ended without teardown, as one for a batch size does
        module = self.lightning_module
        assert module is not None
        self._main_stream.enter_context(_high_priority(self.root_device))
        self._two_streams = TwoStreamBackward(module, **self._options)
        will = f"two streams for weight gradients of {self._two_streams.report().layers} layers"
        if self._stepping is not None:
            will += f"; {self._stepping.start(trainer)}"
        rank_zero_info(f"retime: {will}")

    def _make_fusion(self, optimizer: Optimizer, module: LightningModule) -> BackwardFusion:
        assert self._two_streams is not None
        return self._two_streams.fuse(optimizer, armed=False)

    def teardown(self) -> None:
        self._take_off()
        super().teardown()

    def report(self) -> TwoStreamReport | None:
        """Report of what ran where in this fit so far, or in the last one; None before the first fit."""
        if self._two_streams is None:
            return self._last_report
        fusion = None if self._stepping is None else self._stepping.report()
        return replace(self._two_streams.report(), fusion=fusion)

    def _take_off(self) -> None:
        if self._stepping is not None:
            self._stepping.stop()
        last, two_streams, self._two_streams = self.report(), self._two_streams, None
        with self._main_stream.pop_all():
            if two_streams is not None and last is not None:
                self._last_report = last
                two_streams.remove()
                rank_zero_info(f"retime: {last.headline}")


@contextmanager
def _high_priority(device: torch.device) -> Iterator[None]:
    """Work in here runs on a stream that the device prefers to those of priority 0, if it has streams."""
    if not has_streams(device):
        yield
        return
    before = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
