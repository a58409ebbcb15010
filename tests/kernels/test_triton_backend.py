"""Which backend a GPU gets, and that a CPU gets no Triton."""

from collections.abc import Iterator

import pytest
import torch

from lptune import linear
from lptune.base.errors import UserError
from lptune.config import PrecisionConfig
from lptune.kernels import choose_backend
from tests.helpers import cold

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)


@pytest.fixture(autouse=True)
def fresh_choices() -> Iterator[None]:
    choose_backend.cache_clear()
    yield
    choose_backend.cache_clear()


@pytest.mark.parametrize(
    ("operation", "on_ampere", "on_hopper"),
    [
        ("quantize", "triton", "triton"),
        ("int8_gemm", "triton", "triton"),
        ("float8_gemm", "reference", "torch"),
        ("float8_other_gemm", "reference", "triton"),
        ("block_gemm", "reference", "triton"),
    ],
)
def test_each_operation_runs_on_the_fastest_that_the_gpu_can_run(
    operation: str, on_ampere: str, on_hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability, expected in ((AMPERE, on_ampere), (ADA, on_hopper), (HOPPER, on_hopper)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        choose_backend.cache_clear()
        assert choose_backend(operation, "cuda") == expected


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_the_environment_can_take_triton_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setenv("LPTUNE_KERNELS", name)
    assert choose_backend("int8_gemm", "cuda") == name
    assert choose_backend("float8_gemm", "cuda") == name


@pytest.mark.parametrize("has_triton", [True, False])
def test_before_ampere_torch_runs_int8(monkeypatch: pytest.MonkeyPatch, has_triton: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    if not has_triton:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_backend("int8_gemm", "cuda") == "torch"
    assert choose_backend("quantize", "cuda") == "reference"


@pytest.fixture
def hopper_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


@pytest.mark.parametrize("operation", ["int8_gemm", "float8_other_gemm", "quantize", "block_gemm"])
def test_without_triton_a_gpu_is_refused_and_does_not_take_slower_kernels(
    monkeypatch: pytest.MonkeyPatch, hopper_without_triton: None, operation: str
) -> None:
    with pytest.raises(
        UserError, match=r"^device: the kernels for CUDA need Triton, and this Python has none; "
    ):
        choose_backend(operation, "cuda")
    monkeypatch.setenv("LPTUNE_KERNELS", "reference")
    assert choose_backend(operation, "cuda") == "reference"


@pytest.mark.parametrize("kind", ["float8_tensorwise", "float8_rowwise", "int8_rowcol"])
def test_a_conversion_tells_that_triton_is_missing_before_anything_runs(
    hopper_without_triton: None, kind: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(UserError, match="need Triton"):
        linear.convert(model, PrecisionConfig(kind=kind), device=torch.device("cuda"))


def test_a_run_on_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None  # whoever imports it now fails\n"
        "import torch; from lptune.kernels import *\n"
        "x = torch.randn(32, 48); q, s = quantize_rows(x, 'int8')\n"
        "quantize_blocks(x, (1, 32), 'e4m3', e8m0=True)\n"
        "out = scaled_mm(q, q.t(), s, s.t(), torch.float32, layer_handle(-1), 0)\n"
        "print(out.isfinite().all().item(), 'lptune.kernels.triton' in sys.modules)"
    )
    done = cold.run("-c", code)
    done.check_returncode()
    assert done.stdout.split() == ["True", "False"]
