"""CPUMemoryPool: the same numbers from reused memory, an end with the fit, and training without it where it must."""

import copy
import mmap
import pickle
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from retime import CPUMemoryPool, NoEffectWarning
from retime.foundations.cpu_pool.pool import MemoryPool
from support.trainers import IGNORED_WARNINGS, quiet_trainer

pytestmark = IGNORED_WARNINGS
ROWS, WIDTH = 64, 512  # an activation is 128 KiB, a weight 1 MiB


class Wide(BoringModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def train_dataloader(self):
        return DataLoader(torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=ROWS)

    val_dataloader = train_dataloader


def fit(*callbacks, epochs=2):
    model = Wide()
    trainer = quiet_trainer(max_epochs=epochs, callbacks=list(callbacks))
    trainer.fit(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def there(pool):
    """Where there is a pool, and no other user."""
    pool.remove()


@pytest.mark.usefixtures("there")
def test_training_is_the_same_reuses_memory_and_the_pool_ends_with_the_fit():
    callback = CPUMemoryPool()
    plain, pooled = fit(), fit(callback)
    assert all(map(torch.equal, plain, pooled))
    report = callback.report()
    assert report.reused_bytes > 5 * report.mapped_bytes > 0
    assert report.faults_avoided == (report.reused_bytes + report.moved_bytes) // mmap.PAGESIZE
    assert "reused" in str(report)
    assert not callback._pool.installed
    assert MemoryPool().install()
    assert torch.empty(10**6).sum() is not None


class Broken(Callback):
    def on_train_batch_end(self, *_):
        raise ArithmeticError


@pytest.mark.usefixtures("there")
def test_it_ends_with_an_exception():
    callback = CPUMemoryPool()
    with pytest.raises(ArithmeticError):
        fit(callback, Broken())
    assert not callback._pool.installed
    fit(callback)  # again
    assert callback.report().reused_bytes > 0


@pytest.mark.usefixtures("there")
def test_as_a_context_manager_it_serves_a_plain_loop():
    with CPUMemoryPool(slack=1.0) as pool:
        for _ in range(20):
            torch.ones(10**6).mul_(2)
        inside = pool.report()
    assert inside.reused_bytes >= 19 * 4 * 10**6
    assert inside.retained_bytes >= 4 * 10**6
    assert pool.report().reused_bytes == inside.reused_bytes  # the report outlives the pool


@pytest.mark.usefixtures("there")
def test_it_ends_with_the_outermost_of_its_uses():
    pool = CPUMemoryPool()
    with pool:
        with pool:
            pass
        assert pool._pool.installed
        fit(pool)
        with pytest.raises(ArithmeticError):
            fit(pool, Broken())
        assert pool._pool.installed
        copied = copy.deepcopy(pool)
    assert not pool._pool.installed
    pool.__exit__(None, None, None)  # once more than it was entered
    with pool:
        assert pool._pool.installed
    assert not pool._pool.installed
    with copied:
        pass
    assert not copied._pool.installed


@pytest.mark.usefixtures("there")
def test_one_that_was_never_entered_says_so():
    pool = CPUMemoryPool()
    assert pool.report().what_stayed_plain() == [
        "it was never in use; give it to a Trainer as a callback, or use it in a `with`"
    ]
    with pool:
        pass
    assert "reused" in str(pool.report())


class TestLimit:
    """Live and free bytes together stay below the slack times the most that was alive."""

    SPARE = 4 * 2**20  # for what is rounded to 2 MiB

    @pytest.mark.usefixtures("there")
    def test_it_follows_what_was_alive(self):
        with CPUMemoryPool(slack=1.5) as pool:
            most = 0
            for size in (3, 11, 7, 2, 16, 5, 13, 1):
                tensors = [torch.empty(size * 2**20 + 5000 * i, dtype=torch.uint8) for i in range(3)]
                most = max(most, pool.report().live_bytes)
                report = pool.report()
                assert report.live_bytes + report.retained_bytes <= 1.5 * most + self.SPARE
                del tensors
            report = pool.report()
            assert report.retained_bytes > most // 2
            assert report.live_bytes + report.retained_bytes <= 1.5 * most + self.SPARE

    @pytest.mark.usefixtures("there")
    def test_what_nobody_needs_any_more_leaves_with_the_second_window(self):
        with CPUMemoryPool(slack=1.0) as pool:
            del [torch.empty(64 * 2**20, dtype=torch.uint8)][0]
            for retained in (True, False):
                pool.on_train_epoch_end(None, None)
                assert (pool.report().retained_bytes >= 64 * 2**20) == retained


def test_without_a_compiler_it_says_so_once_and_trains(no_compiler):
    callback = CPUMemoryPool()
    with pytest.warns(NoEffectWarning, match="no CPU memory pool: .*C\\+\\+ compiler"):
        fit(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        fit(callback)
    assert "no CPU memory pool" in str(callback.report())


def test_copies_are_not_installed():
    with CPUMemoryPool(slack=1.25) as pool:
        for other in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
            assert other.slack == 1.25
            assert not other._pool.installed


@pytest.mark.parametrize("slack", [0.9, -1, float("nan")])
def test_too_little_slack_is_refused(slack):
    with pytest.raises(ValueError, match="slack"):
        CPUMemoryPool(slack=slack)
