"""The shadow check of a run (`precision.shadow_every`): when it runs, what it says, and what follows from it.

Before every N-th step, each rank runs its first micro-batch of that step twice, with the step's own weights,
amax histories and random bits: in the precision of training, where each layer measures its errors
(linear/steps/shadow.py), and in high precision, for the loss. Nothing that the training reads changes.

The recipe runs both passes, since it has the loss: `ShadowCheck.batches` yields the micro-batch twice, and
the recipe does what it does for any other, forward and `backward()`. But in these passes that call computes
no gradient of a parameter (`_Backward`).

    shadow.jsonl     a line for each check, with the errors of each layer
    metrics.jsonl    three numbers in the row of the step, of a mixture four

A layer is bad if the SQNR of one of its GEMMs is below `precision.shadow_min_sqnr_db`. Ranks have different
rows, and only one of them may have a fault, so each number is that of the rank where it is worst. All ranks
then agree on what is bad, and with `shadow_on_bad: fallback` they switch the same layers.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lptune.base.files import named, open_regular
from lptune.checkpoint import Run
from lptune.config import RunConfig
from lptune.data import Batch, Loader
from lptune.distributed import World, keep_compute_weights, reshard
from lptune.linear import LowPrecision, weights_changed
from lptune.linear.steps.shadow import LayerErrors, ShadowPass
from lptune.training.evaluating import eval_mode
from lptune.training.metrics import without_nan
from lptune.training.routing import Routing

CountOf = Callable[[Batch], int]
"""The number of targets (or answers, or preferences) of a batch."""


class ShadowCheck:
    """Makes the shadow checks of a run, one before each step that is a multiple of
    `precision.shadow_every`.
    """

    def __init__(
        self,
        model: nn.Module,
        low: LowPrecision,
        loader: Loader,
        cfg: RunConfig,
        world: World,
        run: Run,
    ) -> None:
        """run: its folder exists, and shadow.jsonl has no line after the step that the run continues."""
        self._model, self._low, self._loader, self._world, self._run = model, low, loader, world, run
        self._precision, self._path = cfg.precision, run.path / "shadow.jsonl"
        self._losses = list[Tensor]()
        self.found = dict[str, float]()
        """What the last check adds to its row of metrics.jsonl."""

    def is_due(self, step: int) -> bool:
        """Whether there is a check before the step after `step`, the number of steps done."""
        return self._precision.checks_shadow and (step + 1) % self._precision.shadow_every == 0

    def add(self, loss: Tensor) -> None:
        """Takes the loss of the pass that runs, summed over what `batches` was told."""
        self._losses.append(loss.detach())

    def batches(self, step: int, count_of: CountOf) -> Iterator[Batch]:
        """The micro-batch of the check, twice; makes the check after the second pass. A collective. step:
        number of steps done. count_of: says of what in a batch the loss is the sum.

        Raises RuntimeError if the passes call neither `add` nor `backward()`.
        """
        started_s, batch = time.perf_counter(), self._loader.micro_batches(step)[0]
        self._losses.clear()
        number = self._world.token_rank * self._loader.micro_batches_per_rank
        with leaving_no_trace(self._model, self._low, step, number):
            passes = ShadowPass(self._model, self._low.plan)
            routing = Routing(self._model, batch.is_padding)
            with passes.comparing(), routing.of("low"), _Backward(passes) as low:
                yield batch
            with passes.high(), routing.of("high"), torch.no_grad(), _Backward() as high:
                yield batch
        if len(self._losses) != 2 or not (low.was_called and high.was_called):
            raise RuntimeError(
                "the loop over step.shadow_batches() is to call loss.backward() and step.add(loss) once each"
            )
        count = torch.tensor(float(count_of(batch)), device=self._losses[0].device)
        sums = self._world.sums(torch.stack([*(loss.sum().float() for loss in self._losses), count]))
        loss, high_loss = (each / max(1.0, sums[2]) for each in sums[:2])
        shares = self._of_all_ranks(routing.counts())
        self._conclude(step, loss, high_loss, self._of_worst_rank(passes.by_layer()), shares, started_s)

    def _conclude(
        self,
        step: int,
        loss: float,
        high_loss: float,
        errors: dict[str, LayerErrors],
        shares: dict[str, float],
        started_s: float,
    ) -> None:
        """Says and writes what was found, the same on all ranks, and switches layers if it is to."""
        bad = [name for name, each in errors.items() if each.worst_sqnr_db < self._precision.min_sqnr_db]
        bad.sort(key=lambda name: errors[name].worst_sqnr_db)
        switched = bad if self._precision.falls_back else []
        if bad:
            self._world.print(self._message(step + 1, bad, errors[bad[0]]))
        if switched:
            self._low.switch_to_high(switched)
            self._run.plan_changed(self._low.plan, step, switched)
        self._write(
            {
                "step": step + 1,
                "loss": loss,
                "shadow_loss": high_loss,
                "layers": {name: _as_json(each) for name, each in errors.items()},
                **({"routing": shares} if shares else {}),
                "switched_to_high": switched,
                "time_s": time.perf_counter() - started_s,
            }
        )
        self.found = {
            "shadow_loss_difference": loss - high_loss,
            "shadow_worst_gradient_cosine": min(each.grad_weight_cosine for each in errors.values()),
            "shadow_worst_sqnr_db": min(each.worst_sqnr_db for each in errors.values()),
        }
        if shares:
            self.found["shadow_worst_routing_agreement"] = min(shares.values())

    def _of_worst_rank(self, found: dict[str, LayerErrors]) -> dict[str, LayerErrors]:
        """Each number as of the rank where it is worst. All ranks have run the same layers."""
        signs = torch.tensor(_SIGNS, dtype=torch.float64, device=self._world.device)
        table = torch.tensor([list(each) for each in found.values()], dtype=torch.float64)
        worst = table.to(self._world.device) * signs
        self._world.max_(worst)
        rows = (worst * signs).tolist()
        return {name: LayerErrors(*row) for name, row in zip(found, rows, strict=True)}

    def _of_all_ranks(self, counts: dict[str, Tensor]) -> dict[str, float]:
        """The share of tokens with the same experts, by mixture, of the counts that this rank has of each."""
        if not counts:
            return {}
        sums = self._world.sums(torch.cat(list(counts.values())))
        return {name: same / total for name, same, total in zip(counts, sums[::2], sums[1::2], strict=True)}

    def _message(self, step: int, bad: list[str], worst: LayerErrors) -> str:
        shown = ", ".join(bad[1:4]) + (f" and {len(bad) - 4} more" if bad[4:] else "")
        others = f"; also below it: {shown}" if bad[1:] else ""
        action = ""
        if self._precision.falls_back:
            action = f"; {'they run' if bad[1:] else 'it runs'} in high precision from this step on"
        return (
            f"warning: shadow check of step {step}: {bad[0]}: the SQNR of {worst.worst_gemm} is "
            f"{worst.worst_sqnr_db:.1f} dB, below precision.shadow_min_sqnr_db="
            f"{self._precision.min_sqnr_db:g}{others}{action}"
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._world.is_main:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with named(self._path), open(open_regular(self._path, flags), "a", encoding="utf-8") as file:
                file.write(json.dumps(without_nan(line), allow_nan=False) + "\n")


class _Backward(TorchFunctionMode):
    """Within it, `loss.backward()` runs the backward of `passes` instead (None: does nothing)."""

    def __init__(self, passes: ShadowPass | None = None) -> None:
        super().__init__()
        self._passes, self.was_called = passes, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.backward:
            return func(*args, **(kwargs or {}))
        self.was_called = True
        if self._passes is not None:
            self._passes.backward(args[0])
        return None


@contextmanager
def leaving_no_trace(model: nn.Module, low: LowPrecision, step: int, number: int) -> Iterator[None]:
    """Surrounds passes before the step `step` (counted from 0) that update nothing, with the random bits of
    the micro-batch `number` and without dropout, which would differ between passes that are compared.
    The step then finds what it would find without them: weights to be gathered, scales to be measured.
    """
    reshard(model)
    with keep_compute_weights(model), low.outside_of_steps(step, number), eval_mode(model):
        yield
    reshard(model)
    weights_changed(model)


_SIGNS = (-1.0, -1.0, -1.0, -1.0, 1.0, 1.0)
"""By which the fields of LayerErrors are multiplied, so that a larger number is worse."""


def _as_json(errors: LayerErrors) -> dict[str, float]:
    return {
        "gradient_cosine": errors.grad_weight_cosine,
        "gradient_sqnr_db": errors.grad_weight_sqnr_db,
        "output_sqnr_db": errors.output_sqnr_db,
        "grad_input_sqnr_db": errors.grad_input_sqnr_db,
        "saturated": errors.saturated,
        "underflowed": errors.underflowed,
    }
