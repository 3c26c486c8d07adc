"""DenseNet, MobileNet and ResNet as kernels: thread blocks and milliseconds counted from their shapes.

Nothing here is measured; the paper's executions, speedups and memory are. The tests of this file say which of its
figures these counts give. The rules:

- A layer ends with a convolution or linear layer and has what runs since the one before: its input's normalisation,
  activation and pooling. Branches stand one after another, as they run.
- A thread block computes 256 numbers of a product's result, a tile of 16 x 16; of other kernels it has 256 numbers of
  what is read or written, whichever is more, as pooling is parallel over what it reads. A weight gradient adds over all
  positions of all samples: a thread block adds at most 1,024 of them.
- A kernel that fills the device takes its roofline time; each of its thread blocks has an equal part. With fewer thread
  blocks than the device's capacity it takes longer in proportion.
- An output gradient computes as much as the forward pass and moves 1.5 times as many numbers, as in
  :mod:`retime.recipes.ooo.model_costs`; an update with momentum moves five numbers a parameter.
- Neither the algorithms of a library (Winograd, tiles that suit a shape) nor copies of concatenations are counted.

Legend: B batch, L layers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from retime import schedules
from retime.recipes.models import densenet, mobilenet_v3, resnet
from retime.recipes.ooo.model_costs import BYTES, OUTPUT_GRADIENT_TRAFFIC, V100, Gpu, Operations, count, kernel_ms
from retime.schedules import Device, Kernel, Kind, Task, TwoStreamSchedule, TwoStreamTimeline, simulate_two_streams

CAPACITY = 1520
"""Thread blocks that a V100 runs at once, where section 2 counts them."""

SETUP_MS = 0.0015
"""Between two kernels of a stream: the middle of section 2's 1 to 2 microseconds."""

ISSUE_MS = 0.060
"""Of a kernel: four times the shortest execution that section 2 names, 15 microseconds."""

ONE, READY = "one stream", "two streams, weight gradients once ready"
JOINT, PAPERS = "two streams, Algorithm 1", "two streams, as Figure 8 places them"
BACKWARD_ONLY = "two streams, Algorithm 1 within the backward pass"
BARRIERS = "two streams, a layer's gradients at once and a barrier behind them"
MEMORY_SHARE = 1.1
"""Of one stream's peak that Algorithm 1 may take, as in section 8.2."""

RESULTS_PER_BLOCK, POSITIONS_PER_BLOCK = 256, 1024
_UPDATE_TRAFFIC = 5

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{f"DenseNet-121 (k={growth})": partial(densenet, 121, growth) for growth in (12, 24, 32)},
    **{f"MobileNet V3 (alpha={width:g})": partial(mobilenet_v3, width=width) for width in (0.25, 0.5, 0.75, 1.0)},
    **{f"ResNet-{depth}": partial(resnet, depth) for depth in (50, 101)},
}
"""Table 1's networks for one GPU, by the names of Figure 7."""


@dataclass(frozen=True)
class CountedLayer:
    """One layer for one sample.

    Args:
        before: what runs since the layer before.
        product: its convolution or linear layer.
        positions: how many of a sample's positions a weight is used at: height times width of the result.
    """

    before: tuple[Operations, ...]
    product: Operations
    positions: int

    @property
    def input_numbers(self) -> float:
        """The output of the layer before as it arrives here, a concatenation where there is one."""
        return (self.before[0] if self.before else self.product).numbers_in

    @property
    def parameters(self) -> int:
        return self.product.parameters + sum(operation.parameters for operation in self.before)


@dataclass(frozen=True)
class CountedNetwork:
    """A network's training step in kernels.

    Args:
        layers: in forward order.
        batch_size: B.
        gpu: whose roofline times the kernels, and whose multiprocessors run thread blocks.
    """

    layers: tuple[CountedLayer, ...]
    batch_size: int
    gpu: Gpu = V100

    @property
    def capacity(self) -> int:
        """Thread blocks that the GPU runs at once: as many a multiprocessor as a V100."""
        return CAPACITY * self.gpu.multiprocessors // V100.multiprocessors

    @property
    def blocks(self) -> list[list[int]]:
        """The layers (from 1) by the size of their images: a DenseNet's dense blocks, each with the transition behind.

        Layers that work on one position (squeeze and excite, the classifier) belong to the block before, a block of one
        layer (the stem) to the one behind.
        """
        blocks: list[list[int]] = []
        size: float = math.inf
        for number, layer in enumerate(self.layers, 1):
            if 1 < layer.positions < size:
                if len(blocks) != 1 or len(blocks[0]) > 1:
                    blocks.append([])
                size = layer.positions
            blocks[-1].append(number)
        return blocks

    @property
    def regions(self) -> tuple[schedules.Region, ...]:
        """A region a block and pass, as the paper cuts DenseNet-121 into eight."""
        return schedules.backward_and_forward_regions(self.blocks)

    def kernels(self, task: Task) -> list[Kernel]:
        """The kernels of one F, O, W or U."""
        layer = self.layers[task.layer - 1]
        product, batch = layer.product, self.batch_size
        match task.kind:
            case Kind.F:
                kernels = [self._kernel(_most(o) * batch, 0, self._moved(o)) for o in layer.before]
                macs = product.macs * batch
                return [*kernels, self._kernel(product.numbers_out * batch, macs, self._moved(product))]
            case Kind.O:
                more = OUTPUT_GRADIENT_TRAFFIC
                macs = product.macs * batch
                kernels = [self._kernel(product.numbers_in * batch, macs, more * self._moved(product))]
                behind = reversed(layer.before)
                return [*kernels, *(self._kernel(_most(o) * batch, 0, more * self._moved(o)) for o in behind)]
            case Kind.W:
                parts = math.ceil(layer.positions * batch / POSITIONS_PER_BLOCK)
                macs = product.macs * batch
                return [self._kernel(product.parameters, macs, self._moved(product), parts)]
            case _:
                return [self._kernel(layer.parameters, 0, _UPDATE_TRAFFIC * layer.parameters)]

    def buffers(self) -> list[schedules.Buffer]:
        """Memory of a backward and the next forward pass; parameters and optimizer state are left out.

        ``W_i`` reads the convolution's input, kept once as normalisation and activation work in place; what the layer
        before gave stays for the normalisation's ``O_i``.
        """
        size = self.batch_size * BYTES
        numbered = list(enumerate(self.layers, 1))
        kept = {i: round(layer.input_numbers * size) if layer.before else 0 for i, layer in numbered}
        return schedules.two_stream_buffers(
            [task for region in self.regions for task in region.tasks]
            + [Task(Kind.W, i) for i, _ in numbered[1:]]
            + [Task(Kind.U, i) for i, _ in numbered[1:]],
            activation_bytes={i - 1: round(layer.product.numbers_in * size) for i, layer in numbered},
            output_gradient_bytes={i: round(layer.input_numbers * size) for i, layer in numbered},
            weight_gradient_bytes={i: layer.parameters * BYTES for i, layer in numbered},
            other_activation_bytes=kept,
        )

    def device(self, *, issue_ms: float = 0.0) -> Device:
        """The GPU for the simulator; issuing takes time unless kernels are compiled before (section 4.2)."""
        return Device(self.capacity, setup_ms=SETUP_MS, issue_ms=issue_ms)

    def _moved(self, operation: Operations) -> float:
        return (operation.numbers_in + operation.numbers_out) * self.batch_size + operation.parameters

    def _kernel(self, results: float, macs: float, moved: float, parts: int = 1) -> Kernel:
        thread_blocks = math.ceil(results / RESULTS_PER_BLOCK) * parts
        return Kernel(thread_blocks, kernel_ms(self.gpu, macs, moved) * self.capacity / thread_blocks)


def counted_network(name: str, batch_size: int, *, image_size: int = 224, gpu: Gpu = V100) -> CountedNetwork:
    """Count one of :data:`NETWORKS` on torch's meta device.

    Args:
        name: such as ``"DenseNet-121 (k=32)"``.
        batch_size: B.
        image_size: H and W, at least 32.
        gpu: that runs it.

    Raises:
        ValueError: unknown name.
    """
    if name not in NETWORKS:
        raise ValueError(f"name={name!r}: choose one of {', '.join(map(repr, NETWORKS))}")
    return CountedNetwork(tuple(_layers(count(NETWORKS[name], image_size))), batch_size, gpu)


def placed_as_figure_8(network: CountedNetwork) -> TwoStreamSchedule:
    """Figure 8 by hand: a block's weight gradients beside its own ``O``, the last block's beside the first one's ``F``.

    The figure shows R1 to R5 of the eight regions. Where it does not say, weight gradients keep the layers' order.
    """
    blocks, regions = network.blocks, network.regions
    beside = [[], *reversed(blocks[:-1]), blocks[-1], *([] for _ in blocks[1:])]
    sub = [
        tuple(Task(kind, layer) for layer in reversed(layers) if layer > 1 for kind in (Kind.W, Kind.U))
        for layers in beside
    ]
    return TwoStreamSchedule(regions, tuple(sub))


def _placed_in_backward_pass(network: CountedNetwork, profile: schedules.Profile) -> TwoStreamSchedule:
    """Algorithm 1 where ``optimizer.step()`` stands before the next forward pass, which has no places then."""
    count = len(network.blocks)
    backward, forward = network.regions[:count], network.regions[count:]
    last = schedules.Region("F", tuple(task for region in forward for task in region.tasks))
    profile = schedules.Profile(
        profile.main_ms,
        {task: [*times[:count], math.inf] for task, times in profile.sub_ms.items()},
        {task: [*gains[:count], 0.0] for task, gains in profile.speedup.items()},
    )
    return schedules.joint_schedule((*backward, last), profile)


def simulated_plans(
    network: CountedNetwork, names: Iterable[str], profile: schedules.Profile | None = None
) -> dict[str, TwoStreamTimeline]:
    """Simulate one stream and further plans, with issue compiled away.

    Args:
        network: the layers.
        names: of ``READY``, ``JOINT``, ``BACKWARD_ONLY`` and ``PAPERS``.
        profile: of its regions; counted unless given.
    """
    regions, buffers = network.regions, network.buffers()
    profile = profile or schedules.profile_regions(regions, network.kernels, network.device())
    timelines: dict[str, TwoStreamTimeline] = {}
    for name in (ONE, *names):
        if name == ONE:
            plan = schedules.one_stream(regions)
        elif name == READY:
            plan = schedules.joint_schedule(regions, profile, prescheduled=len(regions))
        elif name == PAPERS:
            plan = placed_as_figure_8(network)
        elif name == BACKWARD_ONLY:
            plan = _placed_in_backward_pass(network, profile)
        else:
            max_bytes = int(MEMORY_SHARE * timelines[ONE].timeline.peak_bytes)
            plan = schedules.joint_schedule_within(max_bytes, regions, profile, buffers)
        timelines[name] = simulate_two_streams(plan, network.kernels, network.device(), buffers=buffers)
    return timelines


def barriers_ms(network: CountedNetwork) -> float:
    """The step of section 8.2's simpler order, where the streams wait for each other behind each layer's gradients."""
    device, step_ms = network.device(), 0.0
    for task in [task for region in network.regions for task in region.tasks]:
        if task.kind is Kind.O:
            beside = Task(Kind.W, task.layer), Task(Kind.U, task.layer)
            layer = TwoStreamSchedule((schedules.Region("R1", (task,)),), (beside,))
            step_ms += simulate_two_streams(layer, network.kernels, device).makespan_ms
        else:
            step_ms += sum(map(device.alone_ms, network.kernels(task)))
    return step_ms


def forward_ms(network: CountedNetwork) -> list[float]:
    """The forward pass's kernels by block, one after the other."""
    blocks = [[kernel for i in block for kernel in network.kernels(Task(Kind.F, i))] for block in network.blocks]
    return [sum(map(network.device().alone_ms, kernels)) for kernels in blocks]


def issue_ratios(network: CountedNetwork, issue_ms: float = ISSUE_MS) -> list[list[float]]:
    """Figure 1: by block, each convolution's issue over its execution in the forward pass.

    Args:
        network: the layers.
        issue_ms: of one kernel; a number of a machine that no count gives.
    """
    device = Device(network.capacity)
    return [
        [issue_ms / device.alone_ms(network.kernels(Task(Kind.F, layer))[-1]) for layer in block]
        for block in network.blocks
    ]


def issue_waits_ms(network: CountedNetwork, issue_ms: float = ISSUE_MS) -> list[float]:
    """Figure 2: by block, how long the device waits for the forward pass's kernels to be issued.

    Args:
        network: the layers; one stream runs their forward pass, and issuing starts with it.
        issue_ms: of one kernel.
    """
    forward = TwoStreamSchedule(network.regions[len(network.blocks) :], ((),) * len(network.blocks))
    waits_ms = [
        [region.end_ms - region.start_ms for region in simulate_two_streams(forward, network.kernels, device).regions]
        for device in (network.device(issue_ms=issue_ms), network.device())
    ]
    return [issued - compiled for issued, compiled in zip(*waits_ms, strict=True)]


def memory_by_layer(timeline: schedules.Timeline) -> dict[int, int]:
    """Figure 9: the bytes alive when the output gradient of each layer ends, by layer, the last one first."""
    ends = [(end_ms, task.layer) for task, end_ms in timeline.end_ms.items() if task.kind is Kind.O]
    moments = [moment_ms for moment_ms, _ in timeline.memory]
    before = 1e-9  # what a task frees is still there
    return {layer: timeline.memory[bisect_left(moments, end_ms - before) - 1][1] for end_ms, layer in sorted(ends)}


def _most(operation: Operations) -> float:
    return max(operation.numbers_in, operation.numbers_out)


def _layers(operations: Sequence[Operations]) -> list[CountedLayer]:
    layers: list[CountedLayer] = []
    before: list[Operations] = []
    for operation in operations:
        if not operation.has_kernel:
            before.append(operation)
            continue
        # each weight is used once a position; a bias is one more parameter, not one more multiplication
        positions = max(1, round(operation.macs / operation.parameters))
        layers.append(CountedLayer(tuple(before), operation, positions))
        before = []
    return layers
