"""`@op`: a declared function is called as it is written, and is one opaque node of a compiled graph."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lptune import kernels
from lptune.kernels import stochastic
from lptune.kernels.op import op


class Halves(NamedTuple):
    left: Tensor
    right: Tensor


def _empty_halves(x: Tensor, *, twice: bool) -> tuple[Halves, Tensor]:
    half = x.new_empty((2 if twice else 1) * x.shape[0], x.shape[1] // 2)
    return Halves(half, torch.empty_like(half)), torch.empty_like(x, dtype=torch.int32)


@op(fake=_empty_halves)
def toy_halves(
    x: Tensor, factor: float, *, bias: Tensor | None = None, twice: bool = False
) -> tuple[Halves, Tensor]:
    """`x * factor + bias` in two halves, each twice over if `twice`; and x as integers."""
    scaled = (x * factor if bias is None else x * factor + bias).repeat(2 if twice else 1, 1)
    left, right = scaled.chunk(2, 1)
    return Halves(left.clone(), right.clone()), x.int()


def test_results_have_the_types_that_the_function_returns() -> None:
    x, bias = torch.randn(4, 6), torch.randn(4, 6)
    for options in ({}, {"twice": True}, {"bias": bias}, {"twice": True, "bias": bias}):
        halves, integers = toy_halves(x, 3.0, **options)  # type: ignore[arg-type]
        expected, expected_integers = inspect.unwrap(toy_halves)(x, 3.0, **options)  # type: ignore[arg-type]
        assert isinstance(halves, Halves)
        assert torch.equal(halves.left, expected.left)
        assert torch.equal(halves.right, expected.right)
        assert torch.equal(integers, expected_integers)
        torch.library.opcheck(torch.ops.lptune.toy_halves.default, (x, 3.0), options)


def test_a_compiled_graph_has_one_node_and_the_same_bits() -> None:
    x, bias = torch.randn(4, 6), torch.randn(4, 6)
    targets: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def call(x: Tensor) -> Tensor:
        return toy_halves(x, 3.0, bias=bias, twice=True)[0].right

    assert torch.equal(torch.compile(call, backend=backend, fullgraph=True)(x), call(x))
    assert [each for each in targets if "getitem" not in str(each)] == [torch.ops.lptune.toy_halves.default]


def test_a_fake_that_needs_what_the_op_lacks_is_refused_at_import() -> None:
    def fake(x: Tensor, size: int) -> Tensor:
        return x.new_empty(size)

    def toy_refused(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(TypeError, match="size"):
        op(fake=fake)(toy_refused)
    assert not hasattr(torch.ops.lptune, "toy_refused")


def test_each_op_has_the_parameters_of_a_function_of_its_name() -> None:
    ops = vars(torch.ops.lptune).items()
    declared = {name: each.default for name, each in ops if isinstance(each, torch._ops.OpOverloadPacket)}
    assert "quantize_rows" in declared
    others = {"toy_halves", "document_attention", "document_attention_backward"}  # not made by @op
    for name in declared.keys() - others:
        function = getattr(kernels, name, None) or getattr(stochastic, name)
        arguments = declared[name]._schema.arguments
        assert [each.name for each in arguments] == list(inspect.signature(function).parameters), name


def test_an_op_has_no_gradient_and_torch_says_so() -> None:
    x = torch.randn(2, 2, requires_grad=True)
    with pytest.warns(UserWarning, match="lptune::cast: an autograd kernel was not registered"):
        (kernels.cast(x, torch.bfloat16).sum() * x.sum()).backward()
    assert x.grad is not None
    expected = kernels.cast(x.detach(), torch.bfloat16).sum().expand(2, 2)
    assert torch.equal(x.grad, expected.float())
