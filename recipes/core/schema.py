"""The recipes' settings as dataclasses. Hydra checks every key and type of a command line against them.

`Settings` is what every recipe has; a paper's recipes extend it and register the extension with `register`, and an
experiment file in `conf/experiment/` names it: `defaults: [/schema: <name>]`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

OUTPUTS, RECORDED = "outputs", "results"
"""Where recipes write, from the working directory on: git ignores the first, and the second is tracked."""


@dataclass
class Hardware:
    """Where a recipe runs: `conf/hardware/cpu.yaml`, `cuda.yaml` or `emulated.yaml`."""

    name: str = MISSING
    device: str = MISSING
    # processor cores to pin to, with as many torch threads; null leaves the machine's own choice
    cores: int | None = MISSING


@dataclass
class Settings:
    """What every recipe can be told."""

    name: str = MISSING  # of the experiment
    title: str = MISSING  # one line for the list of experiments
    paper: str = MISSING
    where: str = MISSING  # figure or table
    recipe: str = MISSING  # dotted path of a Recipe class
    hardware: Hardware = field(default_factory=Hardware)
    seed: int = 0
    rounds: int = 7  # measured rounds: each gives every variant one number
    warmup_rounds: int = 1
    steps: int = 5  # training steps in a round of a variant
    results_dir: str = OUTPUTS
    record: bool = False  # into RECORDED, for a commit
    rerun: bool = False  # measure finished points again
    allow_dirty: bool = False  # record although the working tree has changes, which the pages then say


@dataclass
class FusionSettings(Settings):
    """The optimizer-fusion recipes' settings. `_target_` may name any importable callable."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (input, target) pairs
    optimizer: dict[str, Any] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    batch_size: int | None = None
    # axes of the figures that have one; a figure without that axis ignores none of them, it has them empty
    batch_sizes: list[int] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    cases: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    epochs: int = 1


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
    """What the simulated out-of-order recipes can be told; each figure reads some of it."""

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
    issue_ms: float = 0.06  # of a kernel: four times the shortest execution that section 2 names


@dataclass
class RecurrentSettings(Settings):
    """The settings of the parallel-scan recipes for recurrent networks."""

    model: dict[str, Any] = field(default_factory=dict)  # takes input_size, returns logits
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (sequence, class) pairs
    optimizer: dict[str, Any] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)  # "baseline" is torch.nn, any other name a solver
    batch_size: int = 16
    sequence_length: int = 1000
    # axes of the figures that have one
    sequence_lengths: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    features: list[str] = field(default_factory=list)  # IRMAS's feature sets of Table 3: S, M, L
    cases: dict[str, Any] = field(default_factory=dict)


@dataclass
class ConvolutionalSettings(Settings):
    """The settings of the parallel-scan recipes for convolutional networks. `steps` are training steps."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # a data set of (input, target) pairs; takes split="val" too
    optimizer: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    # Table 1
    operators: list[str] = field(default_factory=list)
    image_size: int = 32
    channels: int = 64  # of the first convolution
    columns: int = 100  # of a Jacobian that the baselines compute; their time for all columns is this time, scaled
    # Figure 6
    precisions: list[str] = field(default_factory=list)
    levels: list[int | None] = field(default_factory=list)  # up-sweep levels of each scan; null is the whole one
    evaluate_every: int = 10  # training steps between two test losses
    # Figure 10
    share: float = 0.97  # of the weights that pruning takes away
    retrain_steps: int = 0
    cases: dict[str, Any] = field(default_factory=dict)  # name: {pruning, zeros, levels}


@dataclass
class ScanPlanSettings(Settings):
    """The settings of what is counted from a scan's plan."""

    # axes of the figure
    matrices: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)


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


@dataclass
class AllocatorSettings(Settings):
    """The settings of the recipes about a CPU's memory. `rounds` are blocks in each process."""

    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, optimizer, ours, steps}
    allocators: list[str] = field(default_factory=list)  # that the plain step runs with
    libraries: dict[str, Any] = field(default_factory=dict)  # name: file, for libraries in unusual places
    processes: int = 5  # of each allocator: where memory lies is decided once a process
    timeout_s: float = 900.0


@dataclass
class SingleDeviceSettings(AllocatorSettings):
    """The settings of the recipes about two streams on one device (ooo-backprop)."""

    compiled: bool = False  # steps under torch.compile too
    compile_limit_s: float = 180.0  # for a process that compiles a first step


@dataclass
class AdviceSettings(Settings):
    """Training as `retime advise` says, and the demo. `steps` are of a fit, after those in which methods settle.

    In the demo they are those after which weights are compared.
    """

    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, optimizer}; demo: methods too
    processes: int = 5  # fits of each way, in processes of their own
    seconds: float = 60.0  # at most, of each method
    timeout_s: float = 900.0


@dataclass
class AccumulationSettings(Settings):
    """The settings of the recipes about gradient accumulation on the host. `steps` are of a fit, after its warm-up."""

    # sums alone
    rank_counts: list[int] = field(default_factory=list)
    sizes_mb: list[int] = field(default_factory=list)
    repeats: int = 20  # of a sum, for whether it comes out the same
    # fits
    cases: dict[str, Any] = field(default_factory=dict)  # name: {model, data, batch_size, optimizer, ranks, variants}
    variants: dict[str, Any] = field(default_factory=dict)  # label: a block with a _target_ that makes a strategy
    timeout_s: float = 900.0
    # memory
    batch_sizes: list[int] = field(default_factory=list)  # two, ascending: what an image takes is their difference
    # outputs while training: `rounds` seeds
    check_every: int = 20  # steps
    accuracy: float = 0.5  # share of held-out images


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


def register(name: str, settings: type[Settings]) -> None:
    """Offer a settings class to experiment files as `/schema: <name>`.

    Blocks such as `model` take any key (`model.depth=4`), as their target may be anybody's function; `build` checks the
    keys against that function's signature. All other keys are checked here.
    """
    node = OmegaConf.structured(settings)
    for block in dataclasses.fields(settings):
        if block.default_factory is dict:
            OmegaConf.set_struct(node[block.name], False)
    ConfigStore.instance().store(group="schema", name=name, node=node, package="_global_")


def register_all() -> None:
    """Put this module's classes and the `by_hardware` resolver where Hydra finds them; harmless when repeated."""
    ConfigStore.instance().store(name="settings", node=Settings)
    register("settings", Settings)
    register("fusion", FusionSettings)
    register("ooo_measured", OutOfOrderSettings)
    register("ooo_simulated", SimulatedSettings)
    register("bppsa_recurrent", RecurrentSettings)
    register("bppsa_convolutional", ConvolutionalSettings)
    register("bppsa_plan", ScanPlanSettings)
    register("modnn", MemorySettings)
    register("cpu_memory", AllocatorSettings)
    register("single_device", SingleDeviceSettings)
    register("advice", AdviceSettings)
    register("cpuacc", AccumulationSettings)
    register("pipeline", PipelineSettings)
    register("paper_pipeline", PaperPipelineSettings)
    OmegaConf.register_new_resolver("by_hardware", _by_hardware, replace=True)


def settings_of(config: DictConfig) -> Settings:
    """The settings as the dataclass that the experiment names.

    Raises:
        ValueError: the command line added a key (`+key=value`) that the dataclass does not have.
    """
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, Settings)
    for part, path in ((settings, ""), (settings.hardware, "hardware.")):
        known = {entry.name for entry in dataclasses.fields(part)}
        unknown = sorted(set(vars(part)) - known)
        if unknown:
            raise ValueError(
                f"{path}{unknown[0]} is no setting of this experiment; there are {', '.join(sorted(known))}"
            )
    return settings


def _by_hardware(sizes: DictConfig, *, _root_: DictConfig) -> Any:
    """`${by_hardware:{cpu: 64, cuda: 224}}` in an experiment file: the value for the chosen hardware."""
    name = _root_.hardware.name
    if name not in sizes:
        raise ValueError(f"this experiment has sizes for hardware={', '.join(map(str, sizes))}, not for {name}")
    return sizes[name]
