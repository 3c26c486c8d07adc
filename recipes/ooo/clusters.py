"""The paper's clusters (Table 2), its GPUs (Table 1) and how fast they are."""

from dataclasses import dataclass, replace

from retime.recipes.ooo.model_costs import Gpu
from retime.schedules import Cluster, Link

# Peaks in single precision and of the memory, from NVIDIA's data sheets.
TITAN_XP = Gpu("Titan XP", 12.15e12, 547.7e9)
P100 = Gpu("P100", 9.3e12, 732e9)  # the PCIe model, which the paper has
P100_SXM2 = Gpu("P100 SXM2", 10.6e12, 732e9)
V100 = Gpu("V100", 15.7e12, 900e9)

# Two of a V100's NVLinks, 25 GB/s each, in one direction of a ring over the four GPUs of a p3.8xlarge.
NVLINK = Link(2 * 25e9 * 8, 0.01)


@dataclass(frozen=True)
class Setting:
    """A cluster of Table 2 as Figure 10 uses it.

    Args:
        gpu: its GPUs.
        devices: the numbers of GPUs on Figure 10's axis.
        devices_per_node: GPUs in a full node.
        bits_per_s: of the network between nodes, as its data sheet has it.
        batch_size: per GPU, for networks that `batch_sizes` does not name.
        batch_sizes: per GPU and network, as section 8.3 gives them.
    """

    gpu: Gpu
    devices: tuple[int, ...]
    devices_per_node: int
    bits_per_s: float
    batch_size: int
    batch_sizes: dict[str, int]

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
