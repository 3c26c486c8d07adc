"""Out-of-order data parallel with one process: trains as the plain way does, and says so once."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contract.models import Net, sines
from retime import NoEffectWarning, ReverseFirstK
from retime.mechanisms.out_of_order import OutOfOrderDataParallel
from support.trainers import IGNORED_WARNINGS, quiet_trainer

# k is the same number on all ranks
pytestmark = [*IGNORED_WARNINGS, pytest.mark.filterwarnings("ignore:.*reverse_first_k.*sync_dist")]
ALONE = "has no effect.*with one process there is no communication to hide"


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if one.category is NoEffectWarning]


def fit(strategy: str, folder: Path, **options: Any) -> tuple[list[Tensor], Trainer]:
    torch.manual_seed(0)
    module = Net()
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, default_root_dir=folder, **options)
    trainer.fit(module, sines(12), sines(12))
    trainer.save_checkpoint(folder / f"{strategy}.ckpt")
    return [parameter.detach().clone() for parameter in module.parameters()], trainer


def test_in_a_trainer(tmp_path: Path) -> None:
    plain, _ = fit("ddp", tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        ours, trainer = fit("ooo_ddp", tmp_path, callbacks=[ReverseFirstK("auto")])
    assert all(map(torch.equal, plain, ours))
    (text,) = told(caught)
    assert text.startswith("strategy='ooo_ddp' has no effect: with one process")
    assert trainer.callback_metrics["reverse_first_k"] == 0
    assert trainer.strategy.report().steps == 0  # type: ignore[attr-defined]
    kept = [torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("ddp", "ooo_ddp")]
    assert kept[0].keys() == kept[1].keys()


def test_in_a_bare_loop(one_rank: None) -> None:
    results = []
    for retimed in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(6, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if retimed:
            with pytest.warns(NoEffectWarning, match=ALONE):
                ooo = OutOfOrderDataParallel(model, optimizer, k=1)
        for x, _ in sines(12):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    ooo.set_k(0)
    ooo.flush()
    ooo.remove()
    assert (ooo.k, ooo.report().steps, ooo.k_choice.to_save()) == (0, 0, None)
    assert all(map(torch.equal, *results))


def test_with_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs the extra lightning-retime[accelerate]")
    from retime.integrations.accelerate import OutOfOrderDataParallel as ForAccelerate

    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(6, 6)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    with pytest.warns(NoEffectWarning, match=ALONE):
        ooo = ForAccelerate(accelerator, model, optimizer)
    accelerator.backward(model(torch.ones(2, 6)).sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    ooo.set_k(3)
    ooo.flush()
    ooo.remove()
    assert (ooo.k, ooo.report().steps) == (0, 0)
    assert not [path for path in tmp_path.iterdir() if "retime" in path.name or "custom" in path.name]
