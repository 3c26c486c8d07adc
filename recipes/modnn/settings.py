"""What the recipes on moDNN (Chen et al. 2019) share: settings, a point a network, and the numbers of `claims.yaml`."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from retime.recipes.core.claims import claim_of, target_of
from retime.recipes.core.recipe import Recipe
from retime.recipes.core.schema import Settings


@dataclass
class MemorySettings(Settings):
    """The settings of the memory-budget recipes (moDNN). `steps` are training steps."""

    optimizer: dict[str, Any] = field(default_factory=dict)
    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, batch_size, ...}
    # Figures 10 to 14, simulated on one K40
    operations_per_s: float = 4.29e12  # its data sheet: single precision
    memory_bytes_per_s: float = 288e9
    efficiency: float = 0.25  # share of operations_per_s that implicit GEMM reaches
    fast_speedup: float = 2.7  # of the fastest convolution algorithm over it (section 7.3)
    workspace_share: float = 0.5  # of its input and output, which that algorithm needs on top
    memory_efficiency: float = 0.75  # share of memory_bytes_per_s that is reached
    transfer_bytes_per_s: float = 10e9  # over PCIe 3.0 x16, either way
    launch_ms: float = 0.01  # of a kernel
    threads: int = 30720  # that the GPU holds at once: with fewer outputs it is not filled
    budget_gb: float = 12.0
    # Figures 17 to 19, simulated on several
    devices: int = 4  # in modnn_fig17 real ranks
    cores: list[int] = field(default_factory=lambda: [1, 20])  # of the host, that sum gradients: one, or all of them
    sum_bytes_per_s: float = 10e9  # memory traffic of one core that sums
    cores_speedup: float = 2.5  # of all cores over one (section 7.5: 2 to 3)
    # percents of the ideal peak (modnn_fig17: of what a rank's share needs); "floor" is the smallest budget; in the
    # simulated figures GB
    budgets: list[Any] = field(default_factory=list)
    # the budget sweep and targets
    networks: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, ...}, for cases to name
    rules: list[str] = field(default_factory=list)  # of vDNN+, beside: "all" layers offload, or "conv" only
    peers: list[str] = field(default_factory=list)  # done by hand, beside: "parts", "checkpoint", "save_on_cpu"
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (input, target) pairs
    host: str = "disk:"  # "disk:FOLDER"; without a folder, one for temporary files
    headroom_mb: float = 0.0  # that RLIMIT_DATA leaves beyond the budget
    limit: str = "training"  # RLIMIT_DATA holds from the first step on; "planning": from before the model is built
    powercap: str = "/sys/class/powercap"  # where the kernel counts a processor's energy (Figures 15 and 16)
    allocators: list[str] = field(default_factory=list)  # with which the step without a budget trains too
    in_sub_batches: bool = False  # it trains in the plans' sub-batches too
    libraries: dict[str, Any] = field(default_factory=dict)  # name: file, for libraries in unusual places
    timeout_s: float = 900.0


claim = partial(claim_of, "modnn")
target = partial(target_of, "modnn")


class NetworkRecipe(Recipe[MemorySettings]):
    """A point a network, unless a recipe has more of them."""

    over: tuple[tuple[str, str], ...] = (("network", "cases"),)

    def detail(self, settings: MemorySettings, at: dict[str, Any]) -> dict[str, Any]:
        return {"network": settings.cases[at["network"]]}
