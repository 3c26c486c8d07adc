"""One of two ranks of integrations/transformers/test_data_parallel.py: the same Trainer with and without an object."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from retime.integrations.transformers import CPUAccumulate, FusedOptimizer, MemoryBudget, OutOfOrderDataParallel
from support.ranks import run_rank
from support.transformers_trainers import assert_same, fit, trainer

WINDOWS = {"gradient_accumulation_steps": 3, "ddp_find_unused_parameters": False, "ddp_backend": "gloo"}
NO_CLIPPING = {"max_grad_norm": 0}
WAYS: dict[str, tuple[Callable[[Trainer], Any], dict[str, Any], str]] = {
    "forward": (lambda one: FusedOptimizer(one, "forward"), {}, "forward fusion: "),
    "backward": (lambda one: FusedOptimizer(one, "backward"), NO_CLIPPING, "backward fusion: "),
    "out of order": (lambda one: OutOfOrderDataParallel(one, k=1), {}, "blocks"),
    "host": (CPUAccumulate, {}, "2 ranks in shared memory"),
    "budget": (lambda one: MemoryBudget(one, "1GiB", dry_run="off"), {}, "memory budget 1 GiB: 8 steps"),
}


def same_bits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for way, (give, options, said) in WAYS.items():
            plain, ours = (trainer(Path(folder), **WINDOWS | options) for _ in range(2))
            one = give(ours)
            for _ in range(2):
                assert_same(fit(plain), fit(ours), norms=way != "backward")
                assert said in str(one.report()), one.report()
            one.remove()
            print("same bits", way, one.report(), flush=True)


if __name__ == "__main__":
    run_rank(globals(), ["same_bits"], joined=False)
