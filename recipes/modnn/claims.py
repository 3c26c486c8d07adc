"""What this project wants of a byte budget; what moDNN (Chen et al. 2018) states stands in `claims.yaml`."""

from functools import partial

from retime.recipes.core.claims import Target
from retime.recipes.core.published import claim_of

claim = partial(claim_of, "modnn")

SLOWDOWN_50 = Target("step time over the fastest unlimited one at 50 % of the ideal peak", "x", 1.10, at_most=True)
SLOWDOWN_25 = Target("step time over the fastest unlimited one at 25 % of the ideal peak", "x", 1.35, at_most=True)
OVER_BEST_PEER = Target("speed over the best peer that fits in the same bytes", "x", 1)
SMALLEST_BUDGET = Target("ideal peak over the smallest budget, VGG-like net", "x", 30)
PREDICTION_ERROR = Target("measured peak away from the predicted one, at most", "%", 5, at_most=True)
WITHIN_BUDGET = Target("measured peak over the budget", "x", 1, at_most=True)
ONCE_OVER_EACH = Target("gradients reduced once a batch over after every sub-batch", "x", 1)
HOST_MEANWHILE = Target("gradients added up on the host meanwhile over another way", "x", 1)
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
