"""A kind of precision that is written wholly in this file, as another one would be in lptune/linear/kinds.

Nothing in the library knows of it. It trains by the recipe on two ranks, is planned, verified and gathered in
8 bits, is in a dry run, and goes on from a checkpoint.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lptune import checkpoint, distributed, linear, models
from lptune.cli import recipe
from lptune.config import PRECISION_KINDS, FinetuneConfig, KindKeys, PrecisionConfig, load_config
from lptune.kernels import GRAD_INPUT, OUTPUT, Quantized, quantize_rows, scaled_mm
from lptune.linear import KINDS, GatheredWeight, Kind, LinearSpec
from lptune.linear.kind import Agree, Needs, Saved, Shard
from lptune.plan.dry_run import dry_run
from tests.helpers import tiny_run
from tests.helpers.ranks import run_ranks
from tests.helpers.saving import save
from tests.helpers.tiny_recipe import make_checkpoint, write_config
from tests.proofs import noise
from tests.recipes.conftest import losses

RECIPE = Path(__file__).parents[2] / "recipes" / "full_finetune.py"
NAME = "toy_ternary"
T, K, N = 96, 128, 80


class Ternary(Kind):
    """BitNet b1.58 (arXiv:2402.17764), by rows: W is -1, 0 or 1 times the mean magnitude of its row.

    output      x int8 row,        W ternary row
    grad_input  g * s_W int8 row,  W the same
    grad_weight compute dtype
    """

    name = NAME
    fmt = "int8"
    operations = ("int8_gemm",)
    row_scales = True

    def forward(
        self, spec: LinearSpec, x_TK: Tensor, w_NK: Tensor, layer: Tensor, quantized_x: Quantized | None
    ) -> tuple[Tensor, Saved]:
        assert quantized_x is None
        x, w = quantize_rows(x_TK, spec.fmt), _ternary(w_NK)
        if spec.output == "high":
            return x_TK @ _dequantized(w, x_TK.dtype).t(), (x_TK,)
        out_TN = scaled_mm(
            x.q_MK, w.q_NK.t(), x.scale_M1, w.scale.t(), x_TK.dtype, layer, OUTPUT, emulate=spec.emulate
        )
        return out_TN, (x_TK,)

    def backward(
        self, spec: LinearSpec, g_TN: Tensor, w_NK: Tensor, saved: Saved, layer: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Tensor | None]:
        gx_TK, w = None, _ternary(w_NK)
        if needs.input and spec.grad_input == "high":
            gx_TK = g_TN @ _dequantized(w, g_TN.dtype)
        elif needs.input:
            g = quantize_rows(g_TN, spec.grad_fmt, multiplier_1K=w.scale.t())
            gx_TK = scaled_mm(
                g.q_MK, w.q_NK, g.scale_M1, None, g_TN.dtype, layer, GRAD_INPUT, emulate=spec.emulate
            )
        return gx_TK, g_TN.t() @ saved[0] if needs.weight else None

    def describe(self, spec: LinearSpec, gemm: str) -> str:
        return "int8 x ternary" if gemm == "output" else "int8 x ternary folded"

    def describe_gather(self, spec: LinearSpec) -> str:
        return "int8 ternary rows"  # begins with the format that travels

    def quantize_shard(self, spec: LinearSpec, shard: Shard, agree: Agree) -> Quantized:
        return _ternary(shard.rows_MK.to(shard.compute_dtype))


def _ternary(w_NK: Tensor) -> Quantized:
    if isinstance(w_NK, GatheredWeight):
        return Quantized(w_NK.q_NK, w_NK.scale)
    scale_N1 = w_NK.float().abs().mean(dim=1, keepdim=True)
    return Quantized((w_NK.float() / scale_N1).round().clamp(-1, 1).to(torch.int8), scale_N1)


def _dequantized(w: Quantized, dtype: torch.dtype) -> Tensor:
    return (w.q_NK.float() * w.scale).to(dtype)


@noise.low_operands.register
def _(kind: Ternary, spec: LinearSpec, gemm: str, a: Tensor, w_NK: Tensor) -> noise.Operands:
    """A third of the range is a coarse step: nothing of the error of W is treated as noise."""
    w = _ternary(w_NK)
    w_noisy = noise.exact(w_NK).plus(noise.known(w.q_NK.double() * w.scale.double() - w_NK.double()))
    multiplied = a if gemm == "output" else a.float() * w.scale.t()
    rounded = noise.rounded(multiplied, (1, a.shape[1]), spec.fmt, power_of_two=False)
    return rounded, w_noisy.t() if gemm == "output" else w_noisy.times(1 / w.scale.double())


@contextlib.contextmanager
def toy() -> Iterator[None]:
    """Within, `precision.kind` may be the toy."""
    PRECISION_KINDS[NAME] = KindKeys(("folded", "high"), ("high",), ("int8",), can_gather_low=True)
    KINDS[NAME] = Ternary()
    try:
        yield
    finally:
        del PRECISION_KINDS[NAME], KINDS[NAME]


def _layer(**keys: str) -> tuple[nn.Sequential, linear.Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=False))
    return model, linear.convert(model, PrecisionConfig(kind=NAME, **keys))  # type: ignore[arg-type]


def test_the_plan_describes_it_and_the_first_step_is_verified() -> None:
    with toy():
        model, plan = _layer()
        row = plan.rows()[0]
        assert row[2:6] == ("int8 x ternary", "int8 x ternary folded", "high", "int8 ternary rows")
        x = torch.randn(T, K, requires_grad=True)
        with linear.verify_step(model, plan, 1) as verified:
            model(x).sum().backward()
        assert verified.num_gemms == 2
        model[0].spec = model[0].spec._replace(output="high")  # type: ignore[operator, union-attr, assignment]
        with (
            pytest.raises(linear.PrecisionNotAppliedError, match="output was to run 1 times"),
            linear.verify_step(model, plan, 1),
        ):
            model(x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_gemms_are_off_by_what_it_predicts(dtype: torch.dtype) -> None:
    with toy():
        model, plan = _layer()
        model.to(dtype)
        generator = torch.Generator().manual_seed(1)
        x, g = (torch.randn(T, size, generator=generator).to(dtype) for size in (K, N))
        x.requires_grad_()
        out = model(x)
        out.backward(g)
        weight = model.get_parameter("0.weight")
        x64, w64, g64 = (each.detach().double() for each in (x, weight, g))
        truth = {"output": x64 @ w64.t(), "grad_input": g64 @ w64}
        predicted = noise.predicted_errors(plan.layers[0].spec, x.detach(), weight.detach(), g)
        for gemm, ours in (("output", out), ("grad_input", x.grad)):
            assert ours is not None
            error = noise.relative_error(ours, truth[gemm])
            assert predicted[gemm].least <= error <= predicted[gemm].bound, (gemm, error)
            assert predicted[gemm].least > 0.3  # ternary


def test_a_dry_run_plans_it_and_counts_its_gathers(tmp_path: Path) -> None:
    with toy():
        config = models.config_from_dict(dict(models.PRESETS["llama3_1"]["tiny"]), "tiny")
        path = write_config(tmp_path / "tiny.yaml", tmp_path, tmp_path / "run")
        cfg = load_config(FinetuneConfig, path, [f"precision.kind={NAME}", "device=cpu"])
        found = dry_run(cfg, config, world_size=4)
        assert "int8 x ternary folded" in found.report()
        assert {layer.all_gather for layer in found.plan.converted} == {"int8 ternary rows"}
        gathers = {each.dtype for each in found.collectives if each.operation == "all_gather"}
        assert "uint8" in gathers


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("toy") / "base")


def test_the_recipe_trains_it_and_goes_on_from_its_checkpoint_bit_for_bit(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "tiny.yaml", base, tmp_path / "unused")
    common = [f"precision.kind={NAME}", "num_steps=6", "eval_every_steps=0", "checkpoint.every_steps=3"]
    half_way = tmp_path / "whole" / "checkpoints" / "step-00000003"
    with toy():
        for name, more in (("whole", []), ("resumed", [f"resume={half_way}"])):
            overrides = [*common, f"output_dir={tmp_path / name}", *more]
            recipe.load_main(RECIPE)(load_config(FinetuneConfig, config, overrides))
    printed = capsys.readouterr().out
    assert printed.count("8-bit GEMMs ran in the first step, as planned") == 2
    plan = json.loads((tmp_path / "whole" / "precision_plan.json").read_text(encoding="utf-8"))
    assert plan["kind"] == NAME
    assert "int8 x ternary folded" in {layer["grad_input"] for layer in plan["layers"]}
    assert {layer["all_gather"] for layer in plan["layers"] if layer["reason"] is None} == {
        "int8 ternary rows"
    }
    found = losses(tmp_path / "whole")
    assert found[-1] < found[0]
    assert losses(tmp_path / "resumed") == found[3:]
    exports = [tmp_path / name / "export" / "model.safetensors" for name in ("whole", "resumed")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


def _train(world: distributed.World, gather: str, folder: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of four steps, the weights after them, and the weights that came in 8 bits in the first."""
    cfg = tiny_run.config(NAME, precision={"all_gather": gather}, compute_dtype="bfloat16")
    run = tiny_run.TinyRun(cfg, world, tiny_run.decoder_config())
    found, num_low_gathers = list[float](), 0
    for step in range(4):
        if step == 2 and folder:
            path = save(Path(folder), step, run.model, run.optimizer, world)
            run = tiny_run.TinyRun(cfg, world, tiny_run.decoder_config(), seed=1)
            checkpoint.load_state(checkpoint.verify(path), run.model, run.optimizer)
            run.seed = 0
        with run.low.step(step, num_passes=len(run.batches(step))):
            loss, verified = run.verified_step(step)
        run.update()
        found.append(loss)
        num_low_gathers = num_low_gathers or verified.num_low_gathers
    return found, run.values(), num_low_gathers


def _on_two_ranks(rank: int, num_ranks: int, folder: str) -> None:
    with toy(), distributed.session("cpu") as world:
        low, weights, num_low_gathers = _train(world, "auto", "")
        assert num_low_gathers == 9  # qkv, o, gate_up and down of two blocks, and the head
        for gather, path, wanted in (("high", "", 0), ("auto", folder, 9)):
            again, same, num_low_gathers = _train(world, gather, path)
            assert num_low_gathers == wanted
            assert again == low
            assert all(torch.equal(same[name], value) for name, value in weights.items())


def test_on_two_ranks_neither_the_8_bit_gather_nor_a_resume_changes_a_bit(tmp_path: Path) -> None:
    run_ranks(2, _on_two_ranks, str(tmp_path))
