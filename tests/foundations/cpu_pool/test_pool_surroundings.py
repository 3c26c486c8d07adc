"""The pool beside other allocators, whose blocks outlive it, the kernel's limits, loading workers, a long life."""

import os
import subprocess
import sys

import pytest

from retime.recipes.cpu_memory.allocators import NoAllocatorError, environment_of
from support.warm_start import run_program

WITHOUT_LIGHTNING = """
import sys
from importlib.util import find_spec, module_from_spec
sys.modules["retime"] = module_from_spec(find_spec("retime"))  # its __init__ imports what takes seconds
"""
PRELUDE = """
import resource
import torch
from retime.foundations.cpu_pool import MemoryPool
torch.set_num_threads(1)
pool = MemoryPool()
assert pool.install(), pool.why_not
pool.follow(1.1)

def mapped(kind="VmData"):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))
"""


@pytest.fixture(autouse=True)
def _on_linux(pool):
    """Skips where there is no pool."""


STEPS = """
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(0)
x = torch.randn(128, 256)

def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "name", ["tcmalloc", *(pytest.param(one, marks=pytest.mark.long) for one in ("huge_heap", "jemalloc"))]
)
def test_another_allocator_below(name: str) -> None:
    try:
        environment = environment_of(name, {})
    except NoAllocatorError as error:
        pytest.skip(str(error))
    program = WITHOUT_LIGHTNING + PRELUDE + STEPS + "for _ in range(5): step()\nassert pool.counts().reused > 0"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_limit_of_the_kernel(kind: str) -> None:
    """What is free goes back before an allocation fails, and a failed one leaves everything usable."""
    run_program(f"""{PRELUDE}
MIB = 2**20
torch.ones(10)
now = mapped({{"RLIMIT_DATA": "VmData", "RLIMIT_AS": "VmSize"}}["{kind}"])
resource.setrlimit(resource.{kind}, (now + 96 * MIB, resource.RLIM_INFINITY))
blocks = [torch.empty(9 * MIB, dtype=torch.uint8) for _ in range(8)]
del blocks                                              # 72 MiB are retained
whole = torch.empty(81 * MIB, dtype=torch.uint8).fill_(1)
try:
    torch.empty(40 * MIB, dtype=torch.uint8)
except RuntimeError as error:
    assert "can't allocate memory" in str(error)
else:
    raise AssertionError("there was no limit")
assert int(whole.numpy().min()) == 1
del whole
assert int(torch.empty(60 * MIB, dtype=torch.uint8).fill_(3).numpy().min()) == 3
""")


def test_workers_that_load_data() -> None:
    run_program(f"""{PRELUDE}
from torch.utils.data import DataLoader
data = [torch.full((64, 512), float(i)) for i in range(12)]
for _ in range(2):
    batches = list(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"))
    assert [batch[:, 0, 0].tolist() for batch in batches] == [[2.0 * i, 2.0 * i + 1] for i in range(6)]
""")


def test_a_long_life_stays_small() -> None:
    """By what is mapped: the kernel adds up what is resident late, and makes huge pages of it when it likes."""
    grown = run_program(
        PRELUDE
        + STEPS
        + """
def many():
    for _ in range(20):
        for _ in range(10):
            step()
        pool.remove()
        pool.install()
        pool.follow(1.1)

many()
before = mapped()
many()
print(mapped() - before)
"""
    )
    assert int(grown) < 20 * 2**17, "not an activation stays each time"


def test_sizes_that_never_come_again() -> None:
    """Blocks that wait for their size are merged, and the list of sizes does not grow without end."""
    most, used = run_program(
        f"""{PRELUDE}
import random
random.seed(0)
most = used = 0
alive = []
for i in range(2000):
    alive.append(torch.empty(random.randrange(20_000, 3_000_000), dtype=torch.uint8))
    most = max(most, pool.counts().live)
    if len(alive) > 20:
        alive.pop(random.randrange(20))
    counts = pool.counts()
    used = max(used, counts.live + counts.free)
print(most, used)
"""
    ).split()
    assert int(used) <= 1.1 * int(most) + 4 * 2**20


def test_a_block_that_is_freed_after_the_pool_has_gone() -> None:
    program = f"""{PRELUDE}
pool.limit(2**30)
block = torch.rand(512, 512).to_mkldnn()
pool.remove()
del block
print("freed")
"""
    assert run_program(program) == "freed\n"
