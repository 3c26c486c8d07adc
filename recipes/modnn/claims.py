"""What moDNN (Chen et al. 2018) states in numbers, and what this project wants of a byte budget."""

from functools import partial

from retime.recipes.core.claims import Claim, Target

PAPER = "modnn"
_claim = partial(Claim, PAPER)

FIGURE_9 = "section 7.1, Figure 9"
REDUCTION = _claim(FIGURE_9, "x", 59, "ideal case over the lower bound, average of six networks")
REDUCTION_WEIGHTS = _claim(FIGURE_9, "x", 396, "the same with weights offloaded too")
VGG_101_IDEAL = _claim(FIGURE_9, "GB", 100, "ideal case of VGG-101 (nearly)")
VGG_101_FLOOR = _claim(FIGURE_9, "GB", 1.4, "lower bound of VGG-101")
ABOVE_12_GB = _claim(FIGURE_9, "networks", 5, "ideal cases above 12 GB: all but ResNet-34")
ABOVE_24_GB = _claim(FIGURE_9, "networks", 4, "ideal cases above 24 GB: the VGGs and ResNet-152")

FIGURE_10 = "section 7.2, Figure 10"
SLOWER_MODNN = _claim(FIGURE_10, "%", 3, "time that moDNN adds to a batch in 12 GB, average")
SLOWER_VDNN = _claim(FIGURE_10, "%", 31, "time that vDNN adds, average")
FEWER_BYTES = _claim("section 7.2, Figure 11", "x", 378, "bytes that vDNN moves over moDNN's, average")
OVER_VDNN_PLUS = _claim("section 7.2, Figure 12", "x", 1.26, "speed of moDNN over vDNN+, average of all budgets")

FIGURE_13, FIGURE_14 = "section 7.3, Figure 13", "section 7.3, Figure 14"
SUB_BATCH_MEMORY = _claim(FIGURE_13, "x", 42, "ideal memory over sub-batches' alone, average")
OFFLOAD_MEMORY = _claim(FIGURE_13, "x", 4.1, "ideal memory over offloading's alone, average")
ALGORITHM_MEMORY = _claim(FIGURE_13, "%", 15, "memory that algorithm choice alone saves, average")
SUB_BATCH_TIME = _claim(FIGURE_14, "x", 3.74, "time over ideal with sub-batches alone at their least memory, average")
OFFLOAD_TIME = _claim(FIGURE_14, "%", 28, "time that offloading alone adds, average")
ALGORITHM_TIME = _claim(FIGURE_14, "x", 2.7, "time over ideal with the least workspaces, average")

POWER = _claim("section 7.4, Figure 15", "%", 3, "average power that a budget adds to the ideal case's, at most")

_FIGURES_17 = ("section 7.5, Figure 17", "section 7.5, Figure 18", "section 7.5, Figure 19")
_FOUR = "speed of {} on four devices over the ideal case on one, average"
FOUR_IDEAL = _claim(_FIGURES_17[0], "x", 3.1, _FOUR.format("the ideal case, naive,"))
FOUR_MODNN = _claim(_FIGURES_17[0], "x", 3.7, _FOUR.format("moDNN, 1 core,"))
FOUR_6_GB = _claim(_FIGURES_17[1], "x", 3.4, _FOUR.format("moDNN, 6 GB, 1 core,"))
FOUR_6_GB_NAIVE = _claim(_FIGURES_17[1], "x", 2.9, _FOUR.format("moDNN, 6 GB, naive,"))
FOUR_3_GB = _claim(_FIGURES_17[1], "x", 3.1, _FOUR.format("moDNN, 3 GB, 1 core,"))
FOUR_3_GB_NAIVE = _claim(_FIGURES_17[1], "x", 2.6, _FOUR.format("moDNN, 3 GB, naive,"))
FOUR_3_GB_CORES = _claim(_FIGURES_17[1], "x", 3.2, _FOUR.format("moDNN, 3 GB, 20 cores,"))
OVER_ONE = _claim(_FIGURES_17[2], "x", 3.1, "speed of moDNN on four devices, 3 GB, 1 core, over one with 12 GB")
OVER_ONE_CORES = _claim(_FIGURES_17[2], "x", 3.3, "the same with 20 cores")

SLOWDOWN_50 = Target("step time over the fastest unlimited one at 50 % of the ideal peak", "x", 1.10, at_most=True)
SLOWDOWN_25 = Target("step time over the fastest unlimited one at 25 % of the ideal peak", "x", 1.35, at_most=True)
SMALLEST_BUDGET = Target("ideal peak over the smallest budget, VGG-like net", "x", 30)
PREDICTION_ERROR = Target("measured peak away from the predicted one, at most", "%", 5, at_most=True)
WITHIN_BUDGET = Target("measured peak over the budget", "x", 1, at_most=True)
ONCE_OVER_EACH = Target("gradients reduced once a batch over after every sub-batch", "x", 1)
RANKS_DIFFERENCE = Target("weights of ranks away from one process, relative", "ppm", 10, at_most=True)
REFUSALS = Target(
    "budgets below the floor refused before step 1, with a floor that trains and what would help", "%", 100
)
MOVED_SHARE = Target("bytes moved a step, of vDNN's at the same budget", "%", 10, at_most=True)
PLANNING_TIME = Target("profile and plan", "s", 10, at_most=True)
PLANNING_MEMORY = Target("extra memory of profile and plan, of the step's peak", "%", 1, at_most=True)
OUT_OF_MEMORY = Target("runs that ran out of memory under RLIMIT_DATA", "runs", 0, at_most=True)
OFFLOAD_DIFFERENCE = Target("weights of offload-only runs away from unlimited, relative", "ppm", 0, at_most=True)
SPLIT_DIFFERENCE = Target("weights of sub-batched runs away from unlimited, relative", "ppm", 10, at_most=True)
