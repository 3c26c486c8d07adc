"""One of two ranks: checks seeds in order and writes what became of each.

Usage: `python -m contract.random_models.worker MECHANISM FOLDER SEED...` with the variables torchrun sets.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from contract.random_models.check import Verdict, check_spec
from contract.random_models.generator import generate
from contract.random_models.run import MINIMISED, describe
from contract.random_models.several_ranks import ON_RANKS, agreed
from contract.random_models.spec import Spec
from support.garbage import pass_over_what_is_there


def main(name: str, folder: Path, seeds: list[str]) -> None:
    torch.set_num_threads(1)
    mechanism = next(one for one in ON_RANKS if one.name == name)
    small = 0

    def judge(spec: Spec) -> Verdict:
        return agreed(check_spec(mechanism, spec))

    for seed in seeds:
        pass_over_what_is_there()
        verdict = judge(mechanism.fit(generate(int(seed))))
        if verdict.kind == "failed" and small < MINIMISED:
            small += 1
            verdict = replace(verdict, text=describe(mechanism, int(seed), verdict, judge))
        path = folder / f"{seed}.{os.environ['RANK']}.pt"
        part = path.with_suffix(".part")
        torch.save(verdict, part)
        part.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without tearing down gloo, which would wait for a rank that may be gone.
    os._exit(0)
