"""Configs and presets of families that transformers' code builds: planned, made, trained, read back."""

import shlex
from pathlib import Path

import pytest

from lptune.cli import catalog, ls, recipe
from lptune.config import FinetuneConfig, load_config
from lptune.hardware.devices import named_device
from lptune.models import HF_PRESETS, facts_of_preset, members, read_config
from lptune.plan.dry_run import dry_run
from lptune.plan.fit import fits
from tests.helpers import warm
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import write_config
from tests.recipes.conftest import read_metrics

_TRAINED = ("glm4_moe",)
NAMES = [name for name in catalog.configs() if name.partition("/")[0] in HF_PRESETS]
RECIPE = Path(__file__).parents[3] / "recipes" / "full_finetune.py"


def _int8_command(text: str) -> list[str]:
    lines = text.split("\n\n")[0].replace("\\\n#", "").splitlines()
    return shlex.split(next(line for line in lines if "int8_rotated" in line).strip("# "))


# Five seconds to minutes. test_types.py plans small recurrent models, tests/training/test_lasting.py one with
# experts, and tests/config/test_configs.py loads every config and compares its parameters.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_int8_command_is_planned_and_fits_an_h100(name: str) -> None:
    """On meta. The experts' GEMMs are in 8 bits, and weights are gathered in 8 bits."""
    path = catalog.configs()[name]
    command = _int8_command(path.read_text(encoding="utf-8"))
    flags = dict(zip(command[2::2], command[3::2], strict=False))
    ranks = int(flags.get("--nnodes", 1)) * int(flags.get("--nproc-per-node", 1))
    overrides = command[command.index("--config") + 2 :]
    cfg = load_config(FinetuneConfig, path, overrides)
    found = dry_run(cfg, facts_of_preset(name), ranks, named_device("h100"))
    preset = HF_PRESETS[name.partition("/")[0]][name.partition("/")[2]]
    assert found.num_parameters == preset.num_weights == ls.num_weights(name)
    low = sum(3 * layer.flops_per_gemm for layer in found.plan.converted)
    # The head stays high (16 % of gpt-oss, whose vocabulary is large); of the rest only routers do.
    head = sum(3 * layer.flops_per_gemm for layer in found.plan.layers if layer.name == "lm_head")
    assert low / (found.plan.flops_per_token - head) > 0.99
    grouped = [layer for layer in found.plan.layers if layer.num_groups]
    assert all(layer.spec and layer.spec.gathers_low for layer in grouped)
    assert bool(grouped) == ("num_experts_per_tok" in preset.content or "num_experts" in preset.content)
    if name == "qwen3_moe/30b":  # the tied and the large heads of others are gathered in bfloat16
        assert found.num_parameters == 30_532_122_624  # as published
        assert low / found.plan.flops_per_token > 0.85
        num_passes = 2 * cfg.global_batch_size // (cfg.micro_batch_size * ranks)  # forward and backward
        gathered = found.collectives.num_bytes(operation="all_gather")
        assert gathered < 0.56 * 2 * num_passes * found.num_parameters  # of bfloat16's
    assert fits(found.peak_bytes, named_device("h100"))


@pytest.mark.parametrize(
    "family",
    # test_recipe.py trains qwen3_moe and gpt_oss and has transformers read them; test_types.py trains a step
    # of each type; recurrent layers in plain PyTorch (qwen3_5) take most of a minute.
    slow_but(lambda name: name in _TRAINED, HF_PRESETS),
)
def test_a_new_checkpoint_is_read_by_transformers_and_trains(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    warm.lptune(["new-checkpoint", f"{family}/tiny", str(base)], folder=tmp_path).check_returncode()
    _, report = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert read_config(base).family == HF_PRESETS[family]["tiny"].content["model_type"]
    config = write_config(tmp_path / "c.yaml", base, tmp_path / "run")
    options = ["precision.kind=int8_rotated", "num_steps=3", "eval_every_steps=0"]
    recipe.load_main(RECIPE)(load_config(FinetuneConfig, config, options))
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.slow  # test_parity.py compares the names of parameters
def test_a_run_that_transformers_code_began_goes_on_with_our_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the parameters of the checkpoint's own names, which are all that a resume compares."""
    base = tmp_path / "base"
    warm.lptune(["new-checkpoint", "hunyuan/tiny", str(base)], folder=tmp_path).check_returncode()
    config = write_config(tmp_path / "c.yaml", base, tmp_path / "run")
    main = recipe.load_main(RECIPE)

    def train(num_steps: int, *more: str) -> list[float]:
        options = ["precision.kind=int8_rotated", "eval_every_steps=0", "checkpoint.every_steps=2"]
        options += ["schedule.kind=constant"]
        main(load_config(FinetuneConfig, config, [*options, f"num_steps={num_steps}", *more]))
        return [row["loss"] for row in read_metrics(tmp_path / "run")]

    with monkeypatch.context() as before:
        before.setattr(members, "FAMILIES", {})
        began = train(2)
    found = train(4)
    assert found[:2] == began
    for path in (tmp_path / "run").glob("*"):
        path.rename(tmp_path / f"first-{path.name}")
    # Float32, two INT8 roundings of hidden states that differ in their last bits.
    assert train(4) == pytest.approx(found, rel=1e-3)
