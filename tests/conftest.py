"""Shared by all tests: one thread a process, and the contract table's runs, each made once a session."""

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from contract.runs import Runs


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for one another


@pytest.fixture(scope="session")
def contract_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Runs]":
    from contract.runs import Runs  # here, so that tests of plain Python need not import Lightning

    chosen: dict[str, set[str]] = {}
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "row" in parameters and "scenario" in parameters:
            for row in (parameters["row"], parameters["row"].reference):
                chosen.setdefault(row.name, set()).add(parameters["scenario"].name)
    runs = Runs(tmp_path_factory.mktemp("contract"), chosen)
    gc.collect()  # else what earlier tests left in cycles stays to the end of the session
    gc.freeze()  # BatchSizeFinder collects garbage again and again; this spares it torch's own objects
    yield runs
    gc.unfreeze()
    runs.stop()
