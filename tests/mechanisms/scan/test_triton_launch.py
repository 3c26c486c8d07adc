"""Who may run the Triton kernels, and when "auto" does. Runs the kernels' own tests in Triton's interpreter."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from retime.mechanisms.scan import CostModel, choose_solver, set_cost_model, solvers, triton_launch
from retime.mechanisms.scan.solvers import CUDA, TritonChunk, check_solver
from retime.modules import ScanGRU
from support.scan import make_case

CPU = torch.device("cpu")
KERNELS = Path(__file__).with_name("test_triton_kernels.py")
needs_triton = pytest.mark.skipif(not triton_launch.has_triton(), reason="triton is not installed")
compiles = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton is its interpreter in this process")


@needs_triton
@compiles
@pytest.mark.timeout(900)
def test_the_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNELS)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=KERNELS.parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    if "does not go with this version of NumPy" in done.stdout:
        pytest.skip("this version of Triton's interpreter does not go with this version of NumPy")
    assert "in this process" not in done.stdout  # none was skipped for want of Triton


@needs_triton
@compiles
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size that ``why_not`` lets through compiles, in the shared memory that every such GPU has."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from retime.mechanisms.scan import triton_kernels

    for width, blocks, kind in itertools.product((16, 32, 64), (1, 4), ("fp32", "fp64")):
        itemsize = 4 if kind == "fp32" else 8
        too_large = blocks * width**2 * itemsize > triton_launch.LARGEST_MATRIX_BYTES
        if too_large or (kind == "fp64" and not triton_kernels.FLOAT64):
            continue
        constants = {"BLOCKS": blocks, "WIDTH": width, "ROWS": triton_launch.ROWS}
        for kernel in (triton_kernels.chunk_products, triton_kernels.pass_chunks, triton_kernels.sweep_chunks):
            given = {name: value for name, value in constants.items() if name in kernel.arg_names}
            signature = {
                name: "constexpr" if name in given else "i32" if name in triton_kernels.SIZES else f"*{kind}"
                for name in kernel.arg_names
            }
            compiled = triton.compile(
                ASTSource(fn=kernel, signature=signature, constexprs=given),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": 8 if blocks * width > 64 else 4, "enable_fp_fusion": True},
            )
            assert compiled.metadata.shared <= 99 * 1024


@pytest.mark.long
def test_importing_and_training_need_no_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, retime\n"
        "from retime.modules import ScanGRU\n"
        "ScanGRU(2, 3)(torch.randn(300, 1, 2))[0].sum().backward()\n"
        "assert 'retime.mechanisms.scan.triton_kernels' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_without_triton_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (solvers, triton_launch):
        monkeypatch.setattr(module, "has_triton", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[triton\].* or use solver='auto' or 'chunk'"):
        ScanGRU(2, 3, solver="triton")
    with pytest.raises(ValueError, match="triton is not installed"):
        TritonChunk().check("GRU", 3, torch.float32, CPU)
    check_solver("auto")


@pytest.mark.parametrize(
    ("mode", "hidden", "dtype", "reason"),
    [
        ("LSTM", 8, torch.float32, "not for LSTM"),
        ("GRU", 65, torch.float32, "up to 64, not 65"),
        ("GRU", 33, torch.float64, "up to a hidden size of 32, not 33"),
        ("RNN_TANH", 8, torch.complex64, "complex64"),
    ],
)
def test_what_the_kernels_cannot_run_is_refused(mode: str, hidden: int, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ValueError, match=f"cannot run this layer: .*{reason}.*Use solver='auto' or 'chunk'"):
        TritonChunk(4).check(mode, hidden, dtype, CPU)


@compiles
def test_a_layer_on_a_cpu_is_refused_before_its_forward_pass() -> None:
    case = make_case("GRU")
    with pytest.raises(ValueError, match=r"cannot run this layer: (its kernels run on NVIDIA GPUs|triton is not)"):
        case.scan(TritonChunk())


def choose_on_cuda(hidden: int = 20) -> str:
    with FakeTensorMode():
        x, state = torch.empty(1000, 1, 8, device="cuda"), torch.empty(1, 1, hidden, device="cuda")
        return repr(choose_solver("auto", "GRU", x, state))


def test_auto_chooses_triton_only_where_it_was_measured_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "why_not", lambda mode, hidden, *place: None if hidden <= 64 else "too wide")
    monkeypatch.setattr(TritonChunk, "check", lambda *layer: None)
    by_estimate, wide = choose_on_cuda(), choose_on_cuda(hidden=65)
    assert "triton" not in (by_estimate, wide)
    measured = CostModel({**CUDA.coefficients, "GRU triton": (1.0, 0.1, 0.0, 0.0, 0.0, 0.0)})
    set_cost_model("cuda", measured)
    try:
        assert choose_on_cuda() == "triton"
        assert choose_on_cuda(hidden=65) == wide
        monkeypatch.setattr(solvers, "why_not", lambda *layer: "no triton")
        assert choose_on_cuda() == by_estimate
    finally:
        set_cost_model("cuda", CUDA)
    assert not any("triton" in name for name in CUDA.coefficients)
