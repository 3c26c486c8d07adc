"""Pipelines over real gloo ranks: gradients of one device, memory of a share, errors that say what to change."""

import subprocess
from functools import cache

import pytest

from support.ranks import run_ranks, said_in

SOON = "ooo2,ooo_v,ooo1_flush,gpipe,zbv,interleaved"
LATER = "ooo1,ooo,ooo2_flush,1f1b,zb_h1,interleaved_zero_bubble"
TORCHS = "GPipe,1F1B,Interleaved1F1B,LoopedBFS,InterleavedZeroBubble,ZBVZeroBubble"
WORKER = "pipeline_worker.py"
Case = tuple[int, str]
"""How many ranks, and what they run."""

SAME: dict[str, list[Case]] = {
    "schedules_of_ours": [(2, f"gradients|sequential|{SOON}|1"), (4, "gradients|sequential|ooo2,ooo_v,zbv|1")],
    "models_that_share_weights_or_freeze_them": [(2, "gradients|summed,tied,frozen|ooo2,zbv,gpipe|1")],
    "residual_connections_between_the_layers": [
        (2, "gradients|between|ooo2,zbv,1f1b|1"),
        (4, "gradients|between|ooo2|1"),
    ],
    # Also from a stage of the same rank.
    "layers_that_are_given_a_tensor_twice": [(2, "gradients|doubled|zbv,1f1b|1")],
    "layers_that_write_into_what_they_are_given": [
        (2, "gradients|in_place|ooo2,1f1b|1"),
        (2, "gradients|in_place_between,in_place_alone|zbv,ooo2,1f1b|1"),
    ],
    "models_without_a_list_of_layers": [
        (2, "gradients|attributes|ooo2,zbv,1f1b|1"),
        (4, "gradients|attributes|ooo2|1"),
    ],
    "a_head_that_the_loss_does_not_use": [(2, "gradients|two_heads,second_head_first|ooo2,1f1b|1")],
    "weights_that_a_layer_computes": [(2, "computed")],
    "buffers": [(2, "buffers"), (2, "begins")],
    "autocast_around_the_step": [(2, "autocast")],
    "orders_planned_anew_from_what_tasks_took": [(2, "replanned")],
    "all_values_on_all_ranks_without_gradients": [(2, "relays|between"), (2, "relays|attributes")],
    "random_numbers_with_any_schedule": [(2, "numbers")],
    "weights_written_between_steps": [(2, "written")],
    "a_nan_in_one_micro_batch": [(2, "not_a_number")],
}
"""What ranks train is what one device trains; each case prints so, as its last line."""
OF_TRANSFORMERS: dict[str, list[Case]] = {
    "unmodified_models": [(2, "gradients|gpt2,bert,llama,gpt2_checkpointed|ooo2|1")],
    # the first batch has none of it
    "means_over_labels_that_are_not_padding": [(2, "padded|between,bert|1f1b"), (2, "padded|between,llama|ooo2")],
    "batches_of_other_shapes": [(2, "shapes")],
}
LATER_SAME: dict[str, list[Case]] = {
    "schedules_of_ours_on_two_ranks": [(2, f"gradients|sequential|{LATER}|1")],
    "schedules_of_ours_on_four_ranks": [(4, f"gradients|sequential|{SOON},{LATER}|1")],
    "torchs_schedules": [(2, f"gradients|sequential|{TORCHS}|1"), (4, "gradients|sequential|InterleavedZeroBubble|1")],
    "single_precision": [(2, "gradients|sequential,tied,residual|ooo1,1f1b|1|float32")],
    "pipelines_side_by_side": [(4, "gradients|sequential,tied,residual|ooo1,1f1b|2")],
    "eight_ranks": [(8, "gradients|sequential,tied|ooo1,1f1b|2")],
    # Two ranks, each with a whole model.
    "models_that_are_not_cut": [(2, "gradients|sequential|ooo2,1f1b,zbv,InterleavedZeroBubble|2")],
    "checkpoints_around_the_layers_and_in_them": [
        (2, "gradients|checkpointed,segments|ooo2,zbv,1f1b|1"),
        (4, "gradients|checkpointed|ooo2|1"),
    ],
    "means_over_labels_of_a_third_transformer": [(2, "padded|gpt2|ooo2")],
}
"""Left to `make test-all`."""
KINDS = {"same": SAME, "transformers": OF_TRANSFORMERS, "later": LATER_SAME}
OTHERS: list[Case] = [(4, "memory"), (2, "splits"), (4, "hollow|sequential"), (2, "counted"), (2, "parts")]

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


@cache
def started(ranks: int, kind: str) -> list[subprocess.CompletedProcess[str]]:
    """All cases of a kind in one start: starting ranks takes longer than most of them."""
    listed = {kind: [case for cases in named.values() for case in cases] for kind, named in KINDS.items()}
    listed["transformers"].append((2, "hollow|gpt2"))
    listed |= {"others": OTHERS, "refused": [(2, f"refused|{name}") for name in REFUSALS]}
    return run_ranks(ranks, WORKER, *(case for count, case in listed[kind] if count == ranks), timeout_s=280)


def outputs(ranks: int, case: str, kind: str = "others") -> list[str]:
    """What the ranks of a case print; none may fail."""
    return [said_in(one, case) for one in started(ranks, kind)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.long] if kind == "later" else [])
        for kind, named in KINDS.items()
        for name in named
    ],
)
def test_trains_as_one_device(kind: str, name: str) -> None:
    if "transformer" in kind + name:
        pytest.importorskip("transformers")
    for ranks, case in KINDS[kind][name]:
        assert outputs(ranks, case, kind) == ["same"] * ranks


def test_each_rank_keeps_its_share() -> None:
    assert all("with 2.004 MiB of 8.016 MiB of parameters" in one for one in outputs(4, "memory"))


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


def test_models_on_the_meta_device_have_a_ranks_layers_only():
    for said in outputs(4, "hollow|sequential"):
        in_training, at_most = map(float, said.split())
        assert in_training == 0.25
        assert at_most == 0.25  # before that, one layer of eight at a time


def test_transformers_on_the_meta_device():
    pytest.importorskip("transformers")
    outputs(2, "hollow|gpt2", "transformers")


def test_a_sum_by_a_count_is_refused_or_told():
    """Without `loss_weight=`, nothing has a gradient; with it, gradients are those of one device."""
    for said in outputs(2, "counted"):
        refusal, same = said.splitlines()
        assert "`div` (pipeline_worker.py:" in refusal
        assert "divides by what is computed from the batch" in refusal
        assert "loss_weight=lambda batch: (batch[1] > 0).sum().clamp(min=1)" in refusal
        assert same == "same"


def test_buffers_that_each_micro_batch_changes_are_named():
    first, last = outputs(2, "parts")
    assert first == "1\n4"
    assert last.startswith(
        "1\n4 the forward pass changes the buffer '4.parametrizations.weight.0._u' and 1 more, and runs"
    )
    assert last.count("the forward pass changes") == 1


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_says_what_to_change(case):
    for said in outputs(2, f"refused|{case}", "refused"):
        assert REFUSALS[case] in said


def test_batches_that_differ_later_end_the_step_before_it_begins():
    first, last = run_ranks(2, WORKER, "refused|later batches", timeout_s=60)
    assert first.stdout.splitlines()[1:] == ["lost"], first.stderr[-3000:]
    assert "were given different batches" in last.stdout
    assert "The first batches were the same" in last.stdout


@pytest.mark.parametrize("when", ["forward", "backward", "sends", "shared"])
def test_a_killed_rank_is_named(when):
    first, last = run_ranks(2, WORKER, f"lost|{when}", timeout_s=60)
    assert last.returncode != 0
    whose = "rank 1 did not come" if when == "shared" else "rank 1 (stage"
    assert f"a message of {whose}" in first.stdout, first.stderr[-2000:]


@pytest.mark.long
def test_a_rank_that_sends_nothing_is_named_after_the_timeout():
    first, _ = run_ranks(2, WORKER, "lost|hangs", timeout_s=60)
    assert "a message of rank 1 (stage" in first.stdout, first.stderr[-2000:]
    assert "imed out" in first.stdout


def test_an_exception_comes_through_on_its_rank():
    first, last = run_ranks(2, WORKER, "lost|raises", timeout_s=60)
    assert last.stdout.splitlines()[1:] == ["own of the step's own", "kept True"]
    assert "a message of rank 1 (stage" in first.stdout, first.stderr[-2000:]
    assert first.stdout.endswith("\nkept True\n"), "what shared parameters had of the batch before"
