"""Settings of the out-of-order backprop recipes, and of their cases, which name what differs from the experiment's."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from retime.recipes.core.schema import Settings
from retime.recipes.cpu_memory.settings import AllocatorSettings


@dataclass
class OutOfOrderSettings(Settings):
    """The settings of the out-of-order data-parallel recipes that measure on ranks (`hardware=emulated`)."""

    hosts: int = 2
    # of each link in each direction, as tc spells it; null leaves links unshaped, balanced makes the communication of a
    # step's gradients take as long as its computation
    rate: str | None = "2gbit"
    emulate_compute: bool = False  # layers that sleep for the model's measured times, for more hosts than cores
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (input, target) pairs
    optimizer: dict[str, Any] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    batch_size: int = 256  # of each rank
    layer_bucket_mb: float = 4.0  # bucket_cap_mb of the *_layer_buckets variants: about one layer
    search_steps: int = 70  # of the one run in which k="auto" searches
    epochs: int = 1
    timeout_s: float = 900.0
    # axes of the figures that have one
    cases: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    host_counts: list[int] = field(default_factory=list)
    ks: list[int] = field(default_factory=list)


@dataclass
class SimulatedSettings(Settings):
    """Settings of the simulated out-of-order recipes; each figure reads some of them."""

    # Figure 4: unit times of forward, output gradient, weight gradient and synchronisation
    units: dict[str, float] = field(default_factory=dict)
    layers: int = 5
    k: int = 3
    # section 8.3 and Figure 10
    models: dict[str, Any] = field(default_factory=dict)  # name: a block with a _target_ that makes a network
    model: dict[str, Any] = field(default_factory=dict)
    image_size: int = 224
    batch_size: int = 128
    compute_ms: float = 380.0  # of a step of the discussed network on one V100; calibrates the GPUs
    overhead_ms: float = 350.0  # of its baseline at 16 GPUs; calibrates the network of "section 8.3"
    partition_bytes: int = 4_096_000  # BytePS's default
    bucket_bytes: int = 26_214_400  # DistributedDataParallel's default
    latency_ms: float = 0.05  # of a message between nodes
    clusters: list[str] = field(default_factory=list)
    networks: list[str] = field(default_factory=list)
    calibration: str = ""  # result.json of measured runs
    # Figures 1, 2, 7, 8 and 9: `networks` are names of counted networks
    batch_sizes: list[int] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)  # of Figure 7
    issue_ms: float = 0.06  # of a kernel: four times the shortest execution that section 2 names


@dataclass
class PaperPipelineSettings(SimulatedSettings):
    """Pipelines on paper; times are in units, of a layer's F, O or W for a micro-batch."""

    # Figures 5, 6 and 12
    layer_counts: list[int] = field(default_factory=list)
    ranks: int = 2
    micro_batches: int | None = None  # null: the batch is whole, as in cross-layer model parallelism
    # Figures 11 and 13
    schedules: list[str] = field(default_factory=list)
    micro_batch_counts: list[int] = field(default_factory=list)  # in place of those of the cases
    cases: dict[str, Any] = field(default_factory=dict)  # name: {layers, ranks, micro_batches, ratio, ...}


@dataclass
class PipelineSettings(Settings):
    """Pipelines of layers that sleep, on ranks of this machine."""

    cases: dict[str, Any] = field(default_factory=dict)  # name: any of the settings below
    ranks: int = 4
    layers: int = 16
    micro_batches: int = 4
    unit_ms: float = 20.0  # that each of a layer's F, O and W takes for a micro-batch
    # "ooo@32": with at most 32 layers' activations of a micro-batch alive on a rank
    schedules: list[str] = field(default_factory=list)
    rate: str | None = None  # of links between ranks, such as 200mbit; null: loopback
    message_kib: int = 1  # what goes from layer to layer for a micro-batch
    layers_per_stage: Any = 1  # under modulo allocation; "auto": those with the shortest step on paper
    # ranks that compute
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 16
    peers: list[str] = field(default_factory=list)  # torch's schedules and stages a rank: "Interleaved1F1B 2"
    timeout_s: float = 900.0


@dataclass
class SingleDeviceSettings(AllocatorSettings):
    """The settings of the recipes about two streams on one device (ooo-backprop)."""

    compiled: bool = False  # steps under torch.compile too
    compile_limit_s: float = 180.0  # for a process that compiles a first step


S = TypeVar("S", bound=Settings)
_NOT_OF_A_CASE = {"cases", *(field.name for field in fields(Settings))} - {"rounds", "warmup_rounds", "steps"}


def of_case(settings: S, name: str, *own: str) -> S:
    """The settings of the case `name`, whose keys `own` are no settings.

    Raises:
        ValueError: a key that a case cannot have.
    """
    case = settings.cases[name]  # type: ignore[attr-defined]
    there = [field.name for field in fields(settings) if field.name not in _NOT_OF_A_CASE]
    if unknown := [key for key in case if key not in (*there, *own)]:
        raise ValueError(f"cases.{name}.{unknown[0]} is no setting of a case; there are {', '.join((*there, *own))}")
    return replace(settings, **{key: value for key, value in case.items() if key not in own})
