"""A long run, in tests/: `python -m contract.random_models --drivers bare_parts,bare_scan --start 0 --count 1000`."""

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from contract.random_models.mechanisms import BARE
from contract.random_models.run import MINIMISED, describe, run
from contract.random_models.several_ranks import ON_RANKS, Pair
from contract.random_models.strategies import LIGHTNING

ALL = {mechanism.name: mechanism for mechanism in [*BARE, *LIGHTNING, *ON_RANKS]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drivers", default=",".join(ALL), help="names, with commas")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minimise", type=int, default=MINIMISED, help="failures to make small")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for name in chosen.drivers.split(","):
        began = time.process_time()
        seeds = range(chosen.start, chosen.start + chosen.count)
        if not ALL[name].here:
            with TemporaryDirectory() as folder:
                outcome = Pair(ALL[name], seeds, Path(folder) / name).run()
        else:
            outcome = run(ALL[name], seeds)
        failed += len(outcome.failures)
        print(f"{name}: {outcome} ({(time.process_time() - began) / chosen.count * 1e3:.0f} ms of CPU a seed)")
        for text, times in outcome.refusals.most_common(12):
            print(f"  {times:5} {text}")
        if outcome.failures:
            print(f"  failing: {sorted(outcome.failures)}")
        for seed, verdict in list(outcome.failures.items())[: chosen.minimise]:
            text = verdict.text if not ALL[name].here else describe(ALL[name], seed, verdict)
            print(f"\nseed {seed}: {text}\n", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
