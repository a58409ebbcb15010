"""Where the Triton kernels run in a test: on the GPU if there is one, else in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1 before Triton is imported, for the whole process. Without a
GPU the files that import this module are skipped, and test_triton_interpreted.py runs them in a process of
their own.

What the interpreter (Triton 3.7) does not do, hence only a GPU shows: inline assembly, libdevice,
`tl.dot_scaled`; it rounds float32 to float8 half up and to bfloat16 by truncation, and reads subnormal
bfloat16 wrongly. Tensor descriptors, int8 and float8 operands of `tl.dot` and integer atomics work.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
import triton
from packaging.version import Version
from torch import Tensor

Case = TypeVar("Case")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

# Asked for by cuBLAS in deterministic mode, which is what poisons uninitialized memory.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip(
        "needs a CUDA device, or the interpreter (test_triton_interpreted.py)", allow_module_level=True
    )


if INTERPRETED and Version(triton.__version__) < Version("3.7"):
    # Its scalars are arrays of one element, which NumPy 2.5 no longer takes for an integer.
    from triton.runtime import interpreter

    patch_tensor: Callable[[Any, Any], None] = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_tensor_and_index


def some_interpreted(cases: Sequence[Case], few: Sequence[Case]) -> Sequence[Case]:
    """`cases` on a GPU, `few` of them in the interpreter, where a launch takes a tenth of a second."""
    return few if INTERPRETED else cases


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel forgets to write is NaN, or the largest integer.

    Nothing is tuned: it would compile every configuration for every shape; they have tests of their own.
    """
    monkeypatch.setenv("LPTUNE_AUTOTUNE", "0")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    assert (torch.empty(3, dtype=torch.int8, device=DEVICE) == 127).all()
    yield
    torch.use_deterministic_algorithms(before)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    a, b = a.cpu().contiguous(), b.cpu().contiguous()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(as_integers), b.view(as_integers))


def rounding_of_a_float8_sum(magnitudes: Tensor, length: int) -> Tensor:
    """What |out - exact| of a float8 GEMM may be at most, for each element of out in float32.

    Products of float8 numbers are exact in float32. Adding `length` of them in float32, in any order, errs by
    less than length * 2**-24 of the sum of their magnitudes; the two scales round once each, 2**-24 of the
    result. Hopper's tensor core keeps 13 bits behind the largest addend: of each instruction's 32 products
    and accumulator it cuts off less than 2**-13 of their sum, and 4 instructions make the 128 products after
    which the sum moves to float32.
    """
    in_tensor_core = 0.0 if INTERPRETED else 4 * 33 * 2.0**-13
    return magnitudes * ((length + 2) * 2.0**-24 + in_tensor_core)
