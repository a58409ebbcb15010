"""Runs the tests of the Triton kernels where there is no GPU: in Triton's interpreter.

It replaces `triton.jit` when Triton is imported, so it takes a process of its own. The arithmetic is NumPy's,
one program after the other: it proves the indices, masks and formulas, not the compiler (test_triton_aot.py)
and not the hardware (the same tests, marked gpu).
"""

import re

import pytest
import torch

from tests.helpers import cold

NAMES = ("quantize", "by_amax", "stochastic", "gemm", "grouped", "blocks", "dispatch")
FILES = [f"test_triton_{name}.py" for name in NAMES]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU")
@pytest.mark.parametrize("one_case_in", [12, pytest.param(1, marks=pytest.mark.kernels)])
def test_every_kernel_test_passes_in_the_interpreter(one_case_in: int) -> None:
    """The suite runs every test with each twelfth of its shapes, dtypes and formats, the first among them."""
    pytest_ = ("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--color=no")
    files = (f"tests/kernels/{file}" for file in FILES)
    variables = {"TRITON_INTERPRET": "1", "ONE_CASE_IN": str(one_case_in)}
    done = cold.run(*pytest_, *files, timeout_s=1200, **variables)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d\d passed", done.stdout), done.stdout[-2000:]
