"""Pipelines over real gloo ranks: gradients of one device, memory of a share, errors that say what to change."""

import pytest

from support.two_ranks import run_ranks

OURS = "ooo2,ooo,ooo_v,ooo2_flush,ooo1,ooo1_flush,gpipe,1f1b,zb_h1,zbv,interleaved,interleaved_zero_bubble"
TORCHS = "GPipe,1F1B,Interleaved1F1B,LoopedBFS,InterleavedZeroBubble,ZBVZeroBubble"
WORKER = "pipeline_worker.py"


def outputs(ranks: int, *arguments: str) -> list[str]:
    """What the ranks of a case print; none may fail."""
    done = run_ranks(ranks, WORKER, *arguments, timeout_s=300)
    for one in done:
        assert one.returncode == 0, one.stderr[-3000:]
    return [one.stdout.strip() for one in done]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_are_those_of_one_device(ranks):
    """With all schedules of ours; other models run those that differ most."""
    assert outputs(ranks, "gradients", "sequential", OURS, "1") == ["same"] * ranks


def test_gradients_in_single_precision():
    assert outputs(2, "gradients", "sequential,tied,residual", "ooo1,1f1b", "1", "float32") == ["same"] * 2


def test_gradients_of_models_that_are_not_cut():
    """Two ranks, each with a whole model."""
    assert outputs(2, "gradients", "sequential", "ooo2,1f1b,zbv,InterleavedZeroBubble", "2") == ["same"] * 2


def test_gradients_on_eight_ranks():
    """Four for each of two models; a model with tied weights beside."""
    assert outputs(8, "gradients", "sequential,tied", "ooo1,1f1b", "2") == ["same"] * 8


def test_gradients_with_torchs_schedules():
    assert outputs(2, "gradients", "sequential", TORCHS, "1") == ["same"] * 2
    assert outputs(4, "gradients", "sequential", "InterleavedZeroBubble", "1") == ["same"] * 4


def test_gradients_of_pipelines_side_by_side():
    assert outputs(4, "gradients", "sequential,tied,residual", "ooo1,1f1b", "2") == ["same"] * 4


def test_models_that_share_weights_or_freeze_them():
    assert outputs(2, "gradients", "summed,tied,frozen", "ooo2,zbv,gpipe", "1") == ["same"] * 2


def test_residual_connections_between_the_layers():
    assert outputs(2, "gradients", "between", "ooo2,zbv,1f1b", "1") == ["same"] * 2
    assert outputs(4, "gradients", "between", "ooo2", "1") == ["same"] * 4


def test_layers_that_are_given_a_tensor_twice():
    """Also from a stage of the same rank."""
    assert outputs(2, "gradients", "doubled", "zbv,1f1b", "1") == ["same"] * 2


def test_layers_that_write_into_what_they_are_given():
    assert outputs(2, "gradients", "in_place", "ooo2,1f1b", "1") == ["same"] * 2
    assert outputs(2, "gradients", "in_place_between,in_place_alone", "zbv,ooo2,1f1b", "1") == ["same"] * 2


def test_checkpoints_around_the_layers_and_in_them():
    assert outputs(2, "gradients", "checkpointed,segments", "ooo2,zbv,1f1b", "1") == ["same"] * 2
    assert outputs(4, "gradients", "checkpointed", "ooo2", "1") == ["same"] * 4


def test_weights_that_a_layer_computes_are_its_ranks():
    assert outputs(2, "computed") == ["same"] * 2


def test_without_gradients_all_ranks_have_all_values():
    assert outputs(2, "relays", "between") == ["same"] * 2
    assert outputs(2, "relays", "attributes") == ["same"] * 2


def test_models_without_a_list_of_layers():
    assert outputs(2, "gradients", "attributes", "ooo2,zbv,1f1b", "1") == ["same"] * 2
    assert outputs(4, "gradients", "attributes", "ooo2", "1") == ["same"] * 4


def test_a_head_that_the_loss_does_not_use():
    assert outputs(2, "gradients", "two_heads,second_head_first", "ooo2,1f1b", "1") == ["same"] * 2


def test_unmodified_transformers():
    pytest.importorskip("transformers")
    assert outputs(2, "gradients", "gpt2,bert,llama,gpt2_checkpointed", "ooo2", "1") == ["same"] * 2


def test_each_rank_keeps_its_share():
    said = outputs(4, "memory")
    assert all("with 2.004 MiB of 8.016 MiB of parameters" in one for one in said)


def test_layers_are_cut_evenly_by_fastest_or_by_name():
    first, last = outputs(2, "splits")
    even, again, fastest, named, *lines = first.splitlines()
    report = "\n".join(lines)
    layer = 4 * (144 * 144 + 144)
    assert even == again == f"({6 * layer}, {6 * layer})|(0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)"
    assert sum(map(int, fastest.partition(")")[0].strip("(").split(","))) == 12 * layer
    shares, cut, uneven, fewer = named.split("|")
    assert (shares, cut) == (f"({11 * layer}, {layer})", f"({', '.join(['0'] * 11)}, 1)")
    assert uneven.startswith("rank 0 of the pipeline keeps 897.2 KiB of 978.8 KiB of parameters, 1.83 times an even")
    assert fewer.startswith("microbatches=32 has no effect for the first batch of 16 samples, which has 16 micro-")
    assert "3 steps of 16 micro-batches (1 of 3) by 1f1b through 2 stages of the model\n" in report
    assert "  this rank has stage 1 with" in report
    assert "parameters by rank: 897.2 KiB, 81.56 KiB" in report
    assert "no effect" not in last  # told once


def test_orders_are_planned_anew_from_what_tasks_took():
    assert outputs(2, "replanned") == ["same"] * 2


def test_models_on_the_meta_device_have_a_ranks_layers_only():
    for said in outputs(4, "hollow", "sequential"):
        in_training, at_most = map(float, said.split())
        assert in_training == 0.25
        assert at_most == 0.25  # before that, one layer of eight at a time


def test_transformers_on_the_meta_device():
    pytest.importorskip("transformers")
    outputs(2, "hollow", "gpt2")


def test_batches_of_other_shapes():
    assert outputs(2, "shapes") == ["same"] * 2


def test_means_over_labels_that_are_not_padding():
    """The first batch has none of it."""
    pytest.importorskip("transformers")
    assert outputs(2, "padded") == ["same"] * 2


def test_a_sum_by_a_count_is_refused_or_told():
    """Without `loss_weight=`, nothing has a gradient; with it, gradients are those of one device."""
    for said in outputs(2, "counted"):
        refusal, same = said.splitlines()
        assert "`div` (pipeline_worker.py:" in refusal
        assert "divides by what is computed from the batch" in refusal
        assert "loss_weight=lambda batch: (batch[1] > 0).sum().clamp(min=1)" in refusal
        assert same == "same"


def test_random_numbers_do_not_depend_on_the_schedule():
    assert outputs(2, "numbers") == ["same"] * 2


def test_buffers_that_each_micro_batch_changes_are_named():
    first, last = outputs(2, "parts")
    assert first == "1\n4"
    assert last.startswith(
        "1\n4 the forward pass changes the buffer '4.parametrizations.weight.0._u' and 1 more, and runs"
    )
    assert last.count("the forward pass changes") == 1


REFUSALS = {
    "twice": "calls '0' a second time: a pipeline needs each layer once",
    "skip": "gives other numbers when stage 2 runs",
    "reentrant": "'blocks.0' runs inside of torch.utils.checkpoint.checkpoint(..., use_reentrant=True)",
    "reentrant behind": "which ranks need 'behind.weight' is not known: torch.utils.checkpoint.checkpoint(...",
    "unet": "what 'down' gives goes past the next layer to 'up', whose stage does not have it (a skip connection",
    "last unused": "the loss does not depend on what 'layers.2' gives, the last of the layers, as of a second head",
    "written": "gives other numbers when stage 3 runs",
    "skipped": "does not call '7'",
    "whole loss": "it goes through `std` (pipeline_worker.py:",
    "no weight": "loss_weight=... gave 0 for a whole batch",
    "wrong weight": "PipelineStep(loss_weight='tokens'): give 'samples' or 'sum', a function, or None",
    "no loss": "a step must return its loss",
    "no gradient": "has no gradient",
    "batches": "were given different batches",
    "order": "were given different batches",
    "kept": "what '1' gives goes past the next layer to what lies behind the layers, whose stage does not have it",
    "path": "layers='nowhere' is no module of the model; lists of layers in it: ''",
    "short": "name the list with layers=",
    "no chain": "does not call 2 modules or more with half of them",
    "chunks": "schedule='zbv' has two stages a rank, and 3 layers are too few for 2 ranks",
    "cap": "activation_cap=10 B is too low for schedule='ooo2'",
    "split": "split=['0', '9']: '9' is no layer. Give 'even', 'fastest', or the name of each stage's first layer",
    "split order": "names are to be in the order of the layers, each once",
    "split start": "the first stage begins with '0'",
    "split word": "PipelineStep(split='equal'): give 'even' or 'fastest' or texts in a list",
    "frozen": "were frozen or thawed",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_says_what_to_change(case):
    for said in outputs(2, "refused", case):
        assert REFUSALS[case] in said


def test_batches_that_differ_later_end_the_step_before_it_begins():
    first, last = outputs(2, "refused", "later batches")
    assert first == "lost"
    assert "were given different batches" in last
    assert "The first batches were the same" in last


@pytest.mark.parametrize("when", ["forward", "backward", "sends", "shared"])
def test_a_killed_rank_is_named(when):
    first, last = run_ranks(2, WORKER, "lost", when, timeout_s=60)
    assert last.returncode != 0
    whose = "rank 1 did not come" if when == "shared" else "rank 1 (stage"
    assert f"a message of {whose}" in first.stdout, first.stderr[-2000:]


def test_a_rank_that_sends_nothing_is_named_after_the_timeout():
    first, _ = run_ranks(2, WORKER, "lost", "hangs", timeout_s=60)
    assert "a message of rank 1 (stage" in first.stdout, first.stderr[-2000:]
    assert "imed out" in first.stdout


def test_an_exception_comes_through_on_its_rank():
    first, last = run_ranks(2, WORKER, "lost", "raises", timeout_s=60)
    assert last.stdout.strip() == "own of the step's own"
    assert "a message of rank 1 (stage" in first.stdout, first.stderr[-2000:]


def test_weights_may_be_written_between_steps():
    assert outputs(2, "written") == ["same"] * 2


def test_a_nan_in_one_micro_batch_is_that_of_one_device():
    assert outputs(2, "not_a_number") == ["same"] * 2
