"""optimizer.in_backward: each parameter is updated as soon as backward has its gradient, which is then freed.

    backward of block n     gradients of its parameters (under FSDP: after their reduce-scatter)
                            update these parameters, free the gradients
    backward of block n-1   ...

Gradients of all parameters never exist together: of a model on one rank the largest one does, under FSDP
those of one block. That saves 4 bytes a parameter (2 with optimizer.master=none). It asks for three things
that a step otherwise decides after backward:

**Micro-batches.** Their gradients would have to add up before an update, so a step has one.

**Clipping.** The norm of all gradients is known when the last one is there. Gradients are multiplied by

    min(1, max_grad_norm / norm of the step before)

which is the factor that the step before would have had. The norm is saved in a checkpoint. The first step of
a run, which knows none, does not clip; nor does the first after a checkpoint of a run that updated after
backward. A step that is not finite leaves the norm as it is. What one gradient
adds to an update of AdamW is bounded, however large it is: (1 - beta1) / sqrt(1 - beta2) learning rates. An
update of sgd is not bounded, so the config refuses clipping there.

**Steps that are not finite.** Ranks agree on whether the loss is finite before backward (`before_backward`);
if it is not, nothing is updated. A gradient can be inf or NaN all the same. Its parameter is not updated, on
any rank: of each block ranks exchange which gradients are finite. But parameters whose gradients backward had
before keep their update, for which their own gradients were finite: no weight and no moment ever becomes NaN.
Such a step counts as skipped, and a line says so.

The update of a parameter is the optimizer's own step() over that parameter alone, so its bits are those of an
update after backward if nothing is clipped.

On CUDA under FSDP all this happens on the stream of the reduce-scatter, and the backward of the next block
goes on meanwhile. With parallel.cpu_offload FSDP sends reduced gradients to host memory, without waiting as
long as nobody asks for each of them. So those of a block are updated when the next block's are reduced: they
visit the GPU together with the weights and moments (from_host.py), on the stream of a hook of FSDP's. That
stream may be slower than backward, so the host waits there for the update before: gradients of no more than
two blocks are under way, on the GPU or in host memory.
"""

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lptune.base.errors import UserError
from lptune.checkpoint import wait_for_copy
from lptune.config import RunConfig
from lptune.distributed import World, on_this_rank
from lptune.linear import LowPrecision, fsdp_groups
from lptune.training.chunked_adamw import ChunkedAdamW
from lptune.training.from_host import FromHost
from lptune.training.optimizer import clipping_factor, counts_here
from lptune.training.update import Update, Updated


def build_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World, cfg: RunConfig, low: LowPrecision
) -> Update:
    """The update that `cfg` asks for: after backward, or within it. Arguments and errors as of these."""
    kind = UpdateInBackward if cfg.optimizer.in_backward else Update
    return kind(model, optimizer, world, cfg.max_grad_norm, low)


class UpdateInBackward(Update):
    """Updates within backward. `before_backward` comes before each backward, and the call after it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        max_grad_norm: float,
        low: LowPrecision | None = None,
    ) -> None:
        """model: parallelized. optimizer: reads `found_inf`; else UserError is raised. low: as of Update."""
        super().__init__(model, optimizer, world, max_grad_norm, low)
        if not self._skips_on_device:
            raise UserError(
                f"optimizer.in_backward: {type(optimizer).__name__} does not read found_inf, so it could not "
                "skip a gradient that is not finite (docs/resume.md); set in_backward=false"
            )
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._together = dict(_reduced_together(model))
        self._finished = dict[nn.Parameter, list[nn.Parameter]]()  # first of those together -> which
        self._norms = dict[nn.Parameter, Tensor]()
        self._bad_loss: Tensor | None = None
        self._factor: Tensor | None = None
        """By which this step's gradients are multiplied; None: they are not clipped."""
        self._norm_before: float | None = None
        self._was_torn = False
        self._from_host: FromHost | None = None
        self._updated: torch.cuda.Event | None = None
        """After the last update of a block from host memory."""
        if isinstance(optimizer, ChunkedAdamW) and optimizer.from_host and optimizer.from_host.weights:
            self._from_host = optimizer.from_host
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_all_reduce_hook(_calling(weakref.ref(self), UpdateInBackward.reduces_another))
            return
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(
                _calling(weakref.ref(self), UpdateInBackward.has_gradient)
            )

    def counts(self) -> dict[str, float]:
        """As of Update, and the norm by which the next step clips, unless there is none."""
        norm = {} if self._norm_before is None else {"last_grad_norm": self._norm_before}
        return {**super().counts(), **norm}

    def restore(self, saved: Mapping[str, float]) -> None:
        """Goes on from the `counts` of a checkpoint."""
        super().restore(saved)
        self._norm_before = saved.get("last_grad_norm")

    def __call__(self, loss_sum: Tensor, num_targets: float) -> Updated:
        """Ends the step, after its backward. A collective. Arguments as of Update."""
        updated = super().__call__(loss_sum, num_targets)
        if not updated.skipped:
            self._norm_before, self._was_torn = updated.grad_norm, False
        elif math.isfinite(updated.loss):
            self._was_torn = True
            self._world.print(
                "warning: a gradient was not finite; what backward had reached before it is updated, the "
                "rest is not (optimizer.in_backward)"
            )
        return updated

    def _kept(self, step: int) -> str:
        if not self._was_torn:
            return super()._kept(step)
        return f"the weights are those of step {step}, but for parameters with finite gradients since"

    @torch.no_grad()
    def before_backward(self, loss: Tensor) -> None:
        """Decides on the device whether the loss is finite on all ranks, and waits for a save in the
        background. A collective. Raises RuntimeError for a second loss in a step.
        """
        if self._bad_loss is not None:
            raise RuntimeError("optimizer.in_backward allows one loss and one backward() in a step")
        wait_for_copy(self._optimizer)
        self._bad_loss = (~loss.detach().isfinite().all()).to(torch.float32)
        self._world.max_(self._bad_loss)
        self._factor = None
        if self._max_grad_norm and self._norm_before is not None:
            norm = torch.full((), self._norm_before, dtype=torch.float32, device=loss.device)
            self._factor = clipping_factor(self._max_grad_norm, norm)

    @torch.no_grad()
    def has_gradient(self, parameter: nn.Parameter) -> None:
        """Called by backward when `parameter` has its gradient, reduced over ranks."""
        self._check_first([parameter])
        together = self._together.get(parameter, (parameter,))
        finished = self._finished.setdefault(together[0], [])
        finished.append(parameter)
        if len(finished) == len(together):
            self._update(self._finished.pop(together[0]))

    @torch.no_grad()
    def reduces_another(self, reduced: Tensor) -> None:
        """Called by FSDP, on a stream of its own, when it has reduced the gradients of a block: those before
        are on their way to host memory (parallel.cpu_offload). reduced: the gradients, of this rank.
        """
        self._check_first([])
        if reduced.device.type != "cuda":
            self._update_rest()
            return
        here = torch.cuda.current_stream()
        # FSDP allocates it on another stream, and frees it before this one has copied it to the host.
        reduced.record_stream(here)
        if self._updated is not None:
            self._updated.synchronize()
        self._update_rest()
        self._updated = here.record_event()

    def _update_rest(self) -> None:
        """Updates the parameters that have a gradient. A collective."""
        if rest := [parameter for parameter in self._group_of if parameter.grad is not None]:
            self._check_first(rest)
            self._update(rest)

    def _check_first(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises RuntimeError for a backward whose loss is not known, and for a second one."""
        if self._bad_loss is None:
            raise RuntimeError(
                "optimizer.in_backward: step.add(loss) comes before loss.backward(), which updates weights"
            )
        if any(parameter in self._norms for parameter in parameters):
            raise RuntimeError("optimizer.in_backward allows one loss and one backward() in a step")

    def norm_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The norm of its gradient on this rank (0 where another rank counts it), which is kept from its
        update to the end of the step.
        """
        return self._norms.get(parameter)

    def _update(self, parameters: list[nn.Parameter]) -> None:
        """Updates `parameters`, and frees their gradients. A collective."""
        assert self._bad_loss is not None
        gradients = [on_this_rank(p.grad) for p in parameters if p.grad is not None]
        if self._from_host is not None:
            # After FSDP's copy to host memory, since both are on this stream.
            gradients = [each.to(self._from_host.device, non_blocking=True) for each in gradients]
            self._optimizer.gradients = dict(zip(parameters, gradients, strict=True))  # type: ignore[attr-defined]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        bad_P = (~torch.stack(norms).isfinite()).to(torch.float32)
        self._world.max_(bad_P)
        bad_P = bad_P.maximum(self._bad_loss)
        if self._factor is not None:
            torch._foreach_mul_(gradients, self._factor)
        del gradients
        for parameter, norm, bad in zip(parameters, norms, bad_P.unbind(), strict=True):
            self._norms[parameter] = norm if counts_here(parameter) else torch.zeros_like(norm)
            self._step_unless(bad, [parameter], functools.partial(self._step, parameter))
            parameter.grad = None
        if self._from_host is not None:
            self._optimizer.gradients = {}  # type: ignore[attr-defined]

    def _step(self, parameter: nn.Parameter) -> None:
        """The optimizer's step over `parameter` alone, without the hooks of a step: they belong to its end,
        and measure all weights again.
        """
        optimizer: Any = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**self._group_of[parameter], "params": [parameter]}]
        try:
            type(optimizer).step.__wrapped__(optimizer)
        finally:
            optimizer.param_groups = groups

    def _squares(self) -> Tensor:
        self._update_rest()  # others of their block have no gradient in this step
        self._finished.clear()
        norms = [self._norms[p] for p in self._model.parameters() if p in self._norms]
        if not norms:
            return super()._squares()
        return torch.stack(norms).to(torch.float64).square().sum()

    def _apply(self, norm: Tensor, skipped: Tensor) -> None:
        """Nothing is left to update: the step only tells its hooks that weights have changed."""
        self._optimizer.step()
        self._norms.clear()
        self._bad_loss = None


def _reduced_together(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[nn.Parameter, ...]]]:
    """Each trained parameter with those whose gradients FSDP reduces in the same collective."""
    for group in fsdp_groups(model):
        trained = tuple(parameter for parameter in group.parameters if parameter.requires_grad)
        yield from ((parameter, trained) for parameter in trained)


def _calling(
    update: Callable[[], UpdateInBackward | None], method: Callable[[UpdateInBackward, Any], None]
) -> Callable[[Any], None]:
    """A hook. update: a weak reference, since Python's garbage collector does not look into the hooks of a
    tensor.
    """

    def hook(argument: Any) -> None:
        if (found := update()) is not None:
            method(found, argument)

    return hook
