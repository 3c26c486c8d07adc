"""One rank of a row: runs scenarios in order and writes a record, or the traceback, for each.

Usage: `python -m contract.worker ROW FOLDER SCENARIO...` with the environment variables torchrun sets.
"""

import os
import sys
import traceback
from pathlib import Path

import torch

from contract.bench import run
from contract.broken import FAILS_ON_ONE_RANK, WRONG_IN_STAGES
from contract.record import Refusal
from contract.rows import PLAIN, STRATEGIES
from contract.scenarios import SCENARIOS

ROWS = {row.name: row for row in [*PLAIN.values(), *STRATEGIES, FAILS_ON_ONE_RANK, WRONG_IN_STAGES]}


def main(row: str, folder: Path, scenarios: list[str]) -> int:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in scenarios:
        path = folder / f"{name}.{rank}.pt"
        try:
            result = run(ROWS[row], SCENARIOS[name], folder / name, world_size)
        except BaseException as error:
            text = traceback.format_exc()
            if ROWS[row].refuses(SCENARIOS[name].marks, error):  # as all ranks do, at the same place
                _write(Refusal(text), path)
                continue
            # The ranks' collectives no longer match after an error, so this pair of processes is of no more use.
            _write(text, path)
            return 1
        _write(result, path)
    return 0


def _write(result: object, path: Path) -> None:
    """Write all of the file or nothing: the parent reads it as soon as it is there."""
    part = path.with_suffix(".part")
    torch.save(result, part)
    part.rename(path)


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without tearing down gloo, which would wait for a rank that may be gone.
    os._exit(code)
