"""What each layer of a network costs on the paper's GPUs, and the clusters that these are in.

Layers are counted on torch's meta device and timed with a roofline. A *layer* is a convolution or linear layer with all
that runs up to the next one (normalisation, activation, pooling): the unit that reverse-first-k defers, since only its
weight gradient is a kernel of its own worth deferring. Its batch normalisation's gradients come with the output
gradient. GPUs are those of the paper's Table 1, clusters those of Table 2.

Legend: B batch. One multiplication with its addition is one MAC, two operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from retime.schedules import Cluster, LayerCost, Link

BYTES = 4  # of a number: the paper trains in single precision
OUTPUT_GRADIENT_TRAFFIC = 1.5
"""Numbers that an output gradient moves over those of a forward pass, which reads one tensor of its input's or output's
size and writes one: it reads the gradient and what the forward pass kept, and writes one. A weight gradient reads input
and gradient."""


@dataclass(frozen=True)
class Operations:
    """One leaf module for one sample: MACs, numbers read, numbers written, and its parameters."""

    macs: float
    numbers_in: float
    numbers_out: float
    parameters: int
    has_kernel: bool
    """Whether it is a convolution or a linear layer, which starts a layer."""


@dataclass(frozen=True)
class Gpu:
    """A graphics processor: its data sheet, and which share of it training reaches."""

    name: str  # as in the paper's Table 1
    operations_per_s: float  # peak in single precision
    memory_bytes_per_s: float  # peak of the device memory
    efficiency: float = 1.0  # share of both peaks that is reached
    multiprocessors: int = 80  # by default a V100's


def count(build: Callable[[], nn.Module], image_size: int = 224) -> list[Operations]:
    """The leaf modules of an image network in the order they run, without computing anything.

    Args:
        build: makes a network of images `(B, 3, H, W)`; its weights are never allocated.
        image_size: H and W.
    """
    operations: list[Operations] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or isinstance(module, nn.Flatten | nn.Identity | nn.Dropout):
            return
        macs = 0.0
        if isinstance(module, nn.Conv2d):
            kernel = module.kernel_size[0] * module.kernel_size[1]
            macs = output.numel() * kernel * module.in_channels / module.groups
        elif isinstance(module, nn.Linear):
            macs = output.numel() * module.in_features
        parameters = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        numbers = inputs[0].numel() / samples, output.numel() / samples
        has_kernel = isinstance(module, nn.Conv2d | nn.Linear)
        operations.append(Operations(macs / samples, *numbers, parameters, has_kernel))

    samples = 2  # batch normalisation in training mode needs more than one
    with torch.device("meta"):
        model = build()
        handles = [m.register_forward_hook(note) for m in model.modules() if not list(m.children())]
        model(torch.empty(samples, 3, image_size, image_size))
    for handle in handles:
        handle.remove()
    return operations


def layer_costs(operations: Sequence[Operations], gpu: Gpu, batch_size: int) -> list[LayerCost]:
    """Milliseconds and gradient bytes of each layer.

    A kernel takes as long as its arithmetic or its memory traffic at the GPU's efficiency, whichever is longer. Output
    and weight gradient of a convolution or linear layer each take the MACs of its forward pass.
    """
    costs: list[LayerCost] = []
    for o in operations:
        if o.has_kernel or not costs:
            costs.append(LayerCost(0.0, 0.0, 0.0, 0))
        numbers, macs, layer = (o.numbers_in + o.numbers_out) * batch_size, o.macs * batch_size, costs[-1]
        forward_ms = kernel_ms(gpu, macs, numbers + o.parameters)
        costs[-1] = LayerCost(
            layer.forward_ms + forward_ms,
            layer.output_gradient_ms + kernel_ms(gpu, macs, OUTPUT_GRADIENT_TRAFFIC * numbers + o.parameters),
            layer.weight_gradient_ms + (forward_ms if o.has_kernel else 0.0),
            layer.size_bytes + BYTES * o.parameters,
        )
    return costs


def compute_ms(costs: Sequence[LayerCost]) -> float:
    """A step's forward and backward pass on one device; the first layer has no output gradient."""
    return sum(cost.compute_ms for cost in costs) - costs[0].output_gradient_ms


def calibrated(gpu: Gpu, operations: Sequence[Operations], batch_size: int, step_ms: float) -> Gpu:
    """The GPU with the efficiency at which this network's forward and backward pass take `step_ms`."""
    ideal_ms = compute_ms(layer_costs(operations, replace(gpu, efficiency=1.0), batch_size))
    return replace(gpu, efficiency=ideal_ms / step_ms)


def kernel_ms(gpu: Gpu, macs: float, numbers: float) -> float:
    """A kernel that fills the GPU, by its roofline.

    Args:
        gpu: its peaks and which share of them is reached.
        macs: that it computes.
        numbers: that it reads and writes.
    """
    seconds = max(2 * macs / gpu.operations_per_s, numbers * BYTES / gpu.memory_bytes_per_s)
    return seconds / gpu.efficiency * 1e3


# Peaks in single precision and of the memory, from NVIDIA's data sheets.
TITAN_XP = Gpu("Titan XP", 12.15e12, 547.7e9, multiprocessors=30)
P100 = Gpu("P100", 9.3e12, 732e9, multiprocessors=56)  # the PCIe model, which the paper has
P100_SXM2 = Gpu("P100 SXM2", 10.6e12, 732e9, multiprocessors=56)
V100 = Gpu("V100", 15.7e12, 900e9)

# Two of a V100's NVLinks, 25 GB/s each, in one direction of a ring over the four GPUs of a p3.8xlarge.
NVLINK = Link(2 * 25e9 * 8, 0.01)


@dataclass(frozen=True)
class Setting:
    """A cluster of Table 2 as Figure 10 uses it."""

    gpu: Gpu
    devices: tuple[int, ...]  # the numbers of GPUs on Figure 10's axis
    devices_per_node: int  # GPUs in a full node
    bits_per_s: float  # of the network between nodes, as its data sheet has it
    batch_size: int  # per GPU, for networks that `batch_sizes` does not name
    batch_sizes: dict[str, int]  # per GPU and network, as section 8.3 gives them

    def cluster(self, devices: int, share: float, latency_ms: float) -> Cluster:
        """So many of its GPUs on as few nodes as hold them; the network carries `share` of what it should.

        Raises:
            ValueError: the GPUs fill no whole number of nodes.
        """
        per_node = min(devices, self.devices_per_node)
        if devices % per_node:
            raise ValueError(f"devices={devices} do not fill nodes of {per_node}: give a multiple")
        network = Link(self.bits_per_s * share, latency_ms)
        return Cluster(devices // per_node, per_node, network, NVLINK)

    def with_efficiency(self, efficiency: float) -> "Setting":
        return replace(self, gpu=replace(self.gpu, efficiency=efficiency))


# Section 8.3 names the batch sizes of ResNet-50 and -101; the other networks take the smaller one.
SETTINGS = {
    "Priv-A": Setting(TITAN_XP, (1, 2, 4, 8), 1, 10e9, 64, {}),
    "Priv-B": Setting(P100, (1, 2, 4, 8, 16, 20), 1, 20e9, 64, {}),
    "Pub-A": Setting(V100, (1, 2, 4, 8, 16, 32, 48), 4, 10e9, 96, {"ResNet-50": 128}),
}
