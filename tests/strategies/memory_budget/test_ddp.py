"""The memory budget on two gloo ranks: the same weights as DDP's, one reduction a step, one refusal for all ranks."""

import subprocess
from functools import cache

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import retime
from support.two_ranks import run_two_ranks, said_in

CHECKS = [
    *("offload_keeps_the_bits", "sub_batches_add_up", "ranks_that_plan_differently"),
    *("gradients_are_reduced_once_a_step", "gradients_are_summed_in_host_memory", "epochs_without_a_backward_pass"),
    *("a_last_part_without_a_loss", "what_changes_in_mid_run_is_right_at_once"),
    *("a_first_part_that_reduces_begins_again", "a_rank_that_has_no_plan_any_more_ends_after_a_whole_batch"),
    *("a_layer_that_values_choose_keeps_batches_whole", "batch_norm_offloads_only", "planning_communicates_nothing"),
    *("synchronised_batch_norm_is_tried_out_alone", "groups_are_given_back"),
    *("ranks_reduce_again_after_a_batch_that_failed", "calls_that_a_step_counts_are_refused"),
    *("timelines_count_buckets", "peaks_with_buckets_stay_inside", "accelerate_loops"),
    *("a_rank_that_refuses_its_budget", "what_cannot_be_planned_is_refused"),
]


A_PAIR = 8


@cache  # a fixture with a parameter is set up anew for each test
def ranks(first: int) -> list[subprocess.CompletedProcess[str]]:
    """A pair of processes for eight checks: starting one takes longer than most of them."""
    return run_two_ranks("memory_budget_ddp_worker.py", *CHECKS[first : first + A_PAIR])


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    number = CHECKS.index(name)
    for rank in ranks(number - number % A_PAIR):
        said_in(rank, name)


def test_names_are_registered() -> None:
    assert retime.MemoryBudgetDDPStrategy.strategy_name == "memory_budget_ddp"
    for name in ("memory_budget_ddp", "memory_budget_ddp_spawn", "memory_budget_ddp_fork"):
        assert StrategyRegistry[name]["description"]
