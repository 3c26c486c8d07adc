"""``ooo_single_device``: what goes with it, what it logs, and that nothing is left of it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import retime
from retime.foundations.messages import NoEffectWarning
from retime.strategies import ooo_single_device
from support.failing import FailsBackward
from support.simulated_cuda import simulated_cuda
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:.*Checkpoint directory")]
STEPS = 6
LAYERS = 3


class Net(LightningModule):
    """A convolution, a recurrent layer and two linear layers."""

    fails_at = -1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.gru = nn.Conv1d(3, 4, 3, padding=1), nn.GRU(4, 4, batch_first=True)
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        states, _ = self.gru(self.conv(batch).transpose(1, 2))
        loss: Tensor = self.out(self.inner(states).tanh()).square().mean()
        if batch_idx == self.fails_at:
            loss = FailsBackward.apply(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(4 * STEPS, 3, 5, generator=generator), batch_size=4)


def trainer(strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    return quiet_trainer(strategy=strategy, max_epochs=1, callbacks=list(callbacks), **options)


def two_streams(**options: Any) -> retime.OOOSingleDeviceStrategy:
    return retime.OOOSingleDeviceStrategy(**{"threads": (1, 1), **options})


def fit(strategy: Any, *callbacks: Callback, **options: Any) -> tuple[Net, Trainer]:
    module, ours = Net(), trainer(strategy, *callbacks, **options)
    ours.fit(module)
    return module, ours


def assert_same(one: Net, other: Net) -> None:
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def assert_nothing_is_left(module: nn.Module) -> None:
    assert not any("forward" in vars(part) for part in module.modules())
    assert not [thread for thread in threading.enumerate() if thread.name == "retime sub-stream"]
    assert torch.get_num_threads() == 1


def test_a_fit_and_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(ooo_single_device, "rank_zero_info", logged.append)
    plain, _ = fit("auto")
    strategy = two_streams(max_memory="1KiB")
    assert strategy.report() is None
    module, _ = fit(strategy)
    assert_same(plain, module)
    assert_nothing_is_left(module)
    report = strategy.report()
    assert report.layers == LAYERS
    assert report.sub_stream + report.main_stream == LAYERS * (STEPS - 1)
    assert report.held_bytes <= 1024
    assert logged == ["retime: two streams for weight gradients of 3 layers", f"retime: {report.headline}"]


def test_only_fits_are_changed() -> None:
    strategy = two_streams()
    module = Net()
    module.validation_step = module.training_step  # type: ignore[method-assign]
    trainer(strategy).validate(module, module.train_dataloader(), verbose=False)
    assert strategy.report() is None


@pytest.mark.filterwarnings("ignore:two streams have no effect", "ignore:the search of two streams")
def test_the_registered_name_searches() -> None:
    module, ours = fit("ooo_single_device")
    assert isinstance(ours.strategy, retime.OOOSingleDeviceStrategy)
    assert_nothing_is_left(module)


def test_a_deterministic_fit_does_not_search() -> None:
    plain, _ = fit("auto", deterministic=True)
    module, ours = fit("ooo_single_device", deterministic=True)
    assert_same(plain, module)
    assert ours.strategy.report().setting.two_streams  # type: ignore[attr-defined]


@pytest.mark.parametrize("fuse_updates", [False, True])
def test_nothing_is_left_behind_a_fit_that_fails(fuse_updates: bool) -> None:
    module, strategy = Net(), two_streams(fuse_updates=fuse_updates)
    module.fails_at = 3
    with pytest.raises(ArithmeticError, match="in the middle"):
        trainer(strategy).fit(module)
    assert_nothing_is_left(module)
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    report = strategy.report()
    assert report.sub_stream + report.main_stream == LAYERS * 2


COMPOSES: dict[str, Callable[[Path], Callback]] = {
    "forward fusion": lambda path: retime.FuseOptimizer("forward"),
    "parallel scan": lambda path: retime.ParallelScanBackward(),
    "memory pool": lambda path: retime.CPUMemoryPool(),
    "timeline": lambda path: retime.StepTimeline(every_n_steps=2, warm_up=0, dirpath=path),
    "peak memory": lambda path: retime.PeakMemory(every_n_steps=2),
}


@pytest.mark.parametrize("name", COMPOSES)
def test_what_composes_gives_the_bits_that_it_gives_alone(name: str, tmp_path: Path) -> None:
    alone, _ = fit("auto", COMPOSES[name](tmp_path))
    both, ours = fit(two_streams(), COMPOSES[name](tmp_path))
    assert_same(alone, both)
    assert_nothing_is_left(both)
    report = ours.strategy.report()  # type: ignore[attr-defined]
    assert report.layers == LAYERS
    assert report.sub_stream + report.main_stream >= LAYERS * 2


# Updates behind their weight gradients.


UPDATES = LAYERS * 2 - 1
"""Of a step; one layer adds its bias to a sequence that lies otherwise, by a node of autograd's."""
FUSED: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, UPDATES * (STEPS - 1)),
    "value clipping": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, UPDATES * (STEPS - 1)),
    "accumulation": ({"accumulate_grad_batches": 2}, UPDATES * (STEPS // 2 - 1)),
    "bfloat16": ({"precision": "bf16-mixed"}, UPDATES * (STEPS - 1)),
}


@pytest.mark.parametrize("name", FUSED)
def test_updates_behind_weight_gradients(name: str) -> None:
    options, updates = FUSED[name]
    plain, module, strategy = Net(), Net(), two_streams(fuse_updates=True)
    trainer("auto", **options).fit(plain)
    trainer(strategy, **options).fit(module)
    assert_same(plain, module)
    assert_nothing_is_left(module)
    report = strategy.report()
    assert report.updates == updates
    assert report.fusion.fused_updates > updates  # the recurrent layer's too
    assert report.fusion.plain_steps == {}


class ReadsGradients(Callback):
    """Looks at gradients between the backward pass and the update."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert all(parameter.grad is not None for parameter in pl_module.parameters())


@pytest.mark.parametrize(
    ("callbacks", "options", "reason"),
    [
        ([], {"gradient_clip_val": 0.01}, "clipping by global norm needs all gradients"),
        ([ReadsGradients()], {}, "ReadsGradients.on_before_optimizer_step may read gradients"),
    ],
    ids=["norm clipping", "a reader of gradients"],
)
def test_steps_that_need_all_gradients_update_behind_them(
    callbacks: list[Callback], options: dict[str, Any], reason: str
) -> None:
    plain, _ = fit("auto", *callbacks, **options)
    strategy = two_streams(fuse_updates=True)
    with pytest.warns(retime.NoEffectWarning, match=reason):
        module, _ = fit(strategy, *callbacks, **options)
    assert_same(plain, module)
    report = strategy.report()
    assert report.sub_stream + report.main_stream == LAYERS * (STEPS - 1)
    assert report.updates == 0
    assert list(report.fusion.plain_steps.values()) == [STEPS]


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_second_fusion_and_a_backward_one_are_refused(mode: str) -> None:
    if mode == "backward":
        with pytest.raises(ValueError, match=r"two streams give weight gradients .* use FuseOptimizer\('forward'\)"):
            fit(two_streams(), retime.FuseOptimizer("backward"))
    with pytest.raises(ValueError, match="fus"):
        fit(two_streams(fuse_updates=True), retime.FuseOptimizer(mode))


class Simulable(Net):
    """Without the recurrent layer, whose kernel the simulation does not run late."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = Unchanged()  # type: ignore[assignment]


class Unchanged(nn.Module):
    """What a recurrent layer returns, from its inputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


class NotesStream(Callback):
    """Which stream a step runs on, and of which priority."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        stream = torch.cuda.current_stream()
        self.seen.append((stream, stream.priority))


@pytest.mark.parametrize("fails_at", [-1, 3])
def test_a_device_with_streams_runs_the_fit_on_one_of_high_priority(fails_at: int) -> None:
    plain = Simulable()
    trainer("auto").fit(plain)
    notes, module = NotesStream(), Simulable()
    module.fails_at = fails_at
    with simulated_cuda("late") as device:
        default = torch.cuda.current_stream()
        try:
            trainer(two_streams(), notes).fit(module)
        except ArithmeticError:
            assert fails_at == 3
        assert torch.cuda.current_stream() is default
        torch.cuda.synchronize()
    assert device.faults == []
    assert {priority for _, priority in notes.seen} == {-1}
    assert len({id(stream) for stream, _ in notes.seen}) == 1
    if fails_at < 0:
        assert_same(plain, module)
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_learning_rate_search_in_a_fit_takes_off_what_it_began() -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    class Tuned(Net):
        lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    def tuned(strategy: Any, root: Path) -> Net:
        module = Tuned()
        trainer(strategy, LearningRateFinder(num_training_steps=4), default_root_dir=root).fit(module)
        return module

    plain, module = (tuned(strategy, Path()) for strategy in ("auto", two_streams()))
    assert_same(plain, module)
    assert_nothing_is_left(module)


class Logs(LightningModule):
    """What is in no part: values that the host reads, logs, a scheduler, a count of steps, batches of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()),
            *(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2)),
        )
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).float().square().mean() * (1 + 0.1 * self.global_step)
        if loss.item() > 0 and batch_idx % 2:
            loss = loss + 0.01 * self.net[1].weight.square().sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self(batch).float().square().mean())

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(4 * STEPS + 2, 3, 5, generator=torch.Generator().manual_seed(1)), batch_size=4)

    val_dataloader = train_dataloader


@pytest.mark.filterwarnings("ignore:graph. 'net' runs kernel by kernel where inputs have other shapes")
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulation and clipping", "autocast"],
)
@pytest.mark.parametrize(
    "order", ["late", *(pytest.param(one, marks=pytest.mark.long) for one in ("eager", "random 0"))]
)
def test_a_fit_with_cuda_graphs_has_plain_bits_and_logs(order: str, options: dict[str, Any]) -> None:
    def run(module: Logs, strategy: Any) -> Logs:
        torch.manual_seed(2)
        runner = trainer(strategy, **{"num_sanity_val_steps": 0, "log_every_n_steps": 1, **options})
        runner.fit_loop.max_epochs = 2
        runner.fit(module)
        return module

    plain, module, strategy = run(Logs(), "auto"), Logs(), two_streams(graph=True)
    with simulated_cuda(order) as device:
        run(module, strategy)
        torch.cuda.synchronize()
    assert device.faults == []
    assert plain.losses == module.losses
    assert all(torch.equal(one, module.state_dict()[name]) for name, one in plain.state_dict().items())
    assert not any("forward" in vars(part) for part in module.modules())
    report = strategy.report()
    assert report.graph.parts == 1
    assert report.graph.replays == 2 * STEPS - 2
    assert list(report.graph.issued.values()) == [2]
    assert report.sub_stream == LAYERS * (2 * STEPS + 2 - 1)


def test_a_graph_is_refused_on_a_cpu_and_with_updates() -> None:
    with pytest.raises(ValueError, match=r"a CUDA graph has no updates.*leave one of fuse_updates=True and graph=True"):
        two_streams(graph=True, fuse_updates=True)
    with pytest.raises(ValueError, match="graph=True captures CUDA graphs, and the model is on cpu"):
        fit(two_streams(graph=True))


class Apart(Logs):
    """Calls layers one by one, although a forward pass is there that could be captured."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.net:
            batch = layer(batch)
        self.log("loss", batch.mean(), on_step=True, on_epoch=True)
        return batch.square().mean()


def test_a_step_that_calls_no_part_is_told() -> None:
    with (
        simulated_cuda("late"),
        pytest.warns(NoEffectWarning, match=r"graph=True has no effect: no module that may be captured is called \('"),
    ):
        trainer(two_streams(graph=True), num_sanity_val_steps=0).fit(Apart())
