"""Out-of-order data parallel on two gloo ranks: same bits, order of sending, the search, refusals, a dying rank."""

import subprocess
from pathlib import Path

import pytest

from retime.foundations.ddp.reductions import bucket_mb
from retime.mechanisms.out_of_order.k_search import MOST_STEPS, KTuner
from support.paths import PYTHONPATH, SUPPORT
from support.ranks import run_ranks, run_two_ranks, said_in
from support.warm_start import run_program

IN_A_BARE_LOOP = [
    "same_bits",
    "search",
    "gradients_leave_in_forward_order",
    "ranks_that_differ",
    "k_changes_while_training",
    "refusals",
    "memory_bound",
    "two_forward_passes_and_one_backward_pass",
    "nothing_is_left_behind",
    "a_removed_optimizer_is_let_go",
]


IN_A_TRAINER = [
    "k_is_kept_in_the_checkpoint",
    "bucket_size_is_fixed_where_a_measurement_must_not_matter",
    "accelerate_loop",
    "callback_sets_k",
]
WITHOUT_A_FOLDER = "accelerate_refuses_a_budget_beside"


@pytest.fixture(scope="module")
def ranks() -> list[subprocess.CompletedProcess[str]]:
    """One pair of processes for all checks: starting one takes longer than most of them."""
    return run_two_ranks("ooo_ddp_worker.py", *IN_A_BARE_LOOP)


@pytest.mark.parametrize("name", IN_A_BARE_LOOP)
def test_in_a_bare_loop(name: str, ranks: list[subprocess.CompletedProcess[str]]) -> None:
    for rank in ranks:
        said_in(rank, name)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """Another pair, in which a Trainer or an Accelerator makes the process group, and the folder of its folders."""
    folder = tmp_path_factory.mktemp("trainers")
    cases = [f"{name}|{folder / name}" for name in IN_A_TRAINER]
    return folder, run_two_ranks("ooo_ddp_worker.py", *cases, WITHOUT_A_FOLDER)


@pytest.mark.parametrize("name", [*IN_A_TRAINER, WITHOUT_A_FOLDER])
def test_in_a_trainer(name: str, trainers: tuple[Path, list[subprocess.CompletedProcess[str]]]) -> None:
    for rank in trainers[1]:
        said_in(rank, name if name == WITHOUT_A_FOLDER else f"{name}|{trainers[0] / name}")


@pytest.mark.long
def test_memory_of_the_process_stays_below_max_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # freed tensors leave the process at once, on glibc
    name = "measured_peak_stays_below_the_bound"
    for rank in run_ranks(2, "ooo_ddp_worker.py", name, warm=False):
        said_in(rank, name)


@pytest.mark.parametrize("start", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_names_that_start_their_own_processes(start: str, tmp_path: Path) -> None:
    said = run_program((SUPPORT / "ooo_ddp_launcher.py").read_text(), start, str(tmp_path), **PYTHONPATH)
    assert "steps: 8, blocks: 3, updates: True" in said
    assert "brought home: 8 steps" in said


def test_a_rank_that_dies_ends_the_other_with_an_error(tmp_path: Path) -> None:
    first, second = run_two_ranks("ooo_ddp_worker.py", f"rank_dies_in_backward|{tmp_path}", timeout_s=60)
    assert second.returncode == 9
    assert first.returncode not in (0, None)
    assert "Error" in first.stderr


def drive(tuner: KTuner, seconds_of: dict[int, float], blocks_carry: float = 0.0) -> int:
    """Steps until the search ends; a step after a change of k takes longer by what the former k left."""
    now, steps, k, debt = 0.0, 0, tuner.k, 0.0
    tuner.tick(now)
    while not tuner.is_done:
        now += seconds_of[k] + debt
        debt = 0.0
        steps += 1
        if tuner.tick(now):
            k, debt = tuner.k, blocks_carry
    return steps


@pytest.mark.parametrize(("gbit", "size"), [(100, 25), (9.2, 16), (1.92, 4), (0.8, 1), (0.01, 1)])
def test_bucket_size_follows_the_network(gbit: float, size: int) -> None:
    assert bucket_mb(8 * 2**20 / (gbit * 1e9)) == size


@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 40, 100])
def test_search_ends_at_the_best_k_within_its_steps(blocks: int) -> None:
    best = blocks // 3
    tuner = KTuner(blocks, blocks, lambda seconds: seconds)
    steps = drive(tuner, {k: 1.0 + 0.02 * abs(k - best) for k in range(blocks + 1)}, blocks_carry=0.5)
    assert steps <= MOST_STEPS
    assert abs(tuner.k - best) <= (0 if blocks < 60 else 2)


def test_of_k_that_take_equally_long_the_one_with_least_memory_is_chosen() -> None:
    tuner = KTuner(6, 6, lambda seconds: seconds)
    drive(tuner, {0: 1.2, 1: 1.1, 2: 1.005, 3: 1.0, 4: 0.999, 5: 1.0, 6: 1.0})
    assert tuner.k == 2


def test_search_does_not_count_a_step_that_was_interrupted() -> None:
    tuner = KTuner(2, 2, lambda seconds: seconds)
    tuner.tick(0.0)
    tuner.tick(1.0)
    tuner.discard()
    tuner.tick(100.0)
    tuner.tick(101.0)
    tuner.tick(102.0)
    assert tuner.measured == {0: 1.0}
