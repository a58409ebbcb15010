"""Parameters that keep float32 where the compute dtype is bfloat16: which they are, what reads them, and that
two ranks under FSDP make of them what one rank makes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lptune import checkpoint, distributed, linear, models
from lptune.config import FinetuneConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, load_config
from lptune.distributed import Execution
from lptune.distributed.shards import full_tensor
from lptune.plan.dry_run import dry_run
from lptune.training import build_optimizer
from tests.helpers import hf_types
from tests.helpers.packed import loaded
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import write_config

KEPT = {
    "deepseek_v3": {"mlp.gate.weight"},
    "ernie4_5_moe": {"mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"},
    "gpt_oss": {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"},
    "kimi_linear": {
        "mlp.gate.weight",
        "self_attn.forget_gate.A_log",
        "self_attn.forget_gate.dt_bias",
        "self_attn.o_norm.weight",
    },
    # Not `norm`, whose dtype its blocks give to all that follows.
    "nemotron_h": {"mixer.A_log", "mixer.D", "mixer.norm.weight", "mixer.gate.weight", "norm_f.weight"},
    "qwen3_moe": set(),
}
"""By type, those that its own code reads in float32, seen from a block or from the base model."""


@pytest.mark.parametrize("kind", slow_but(lambda kind: kind == "ernie4_5_moe", KEPT))
def test_they_are_those_that_transformers_keeps_or_computes_with_in_float32(
    kind: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    hf_types.causal(kind).save_pretrained(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stored = {name for name, each in reference.named_parameters() if each.dtype == torch.float32}
    assert bool(stored) == (kind == "ernie4_5_moe")
    model = models.build_on_meta(models.read_config(tmp_path))
    assert stored <= model.float32_names
    within = {name.removeprefix("model.").removeprefix("layers.") for name in model.float32_names}
    assert {name.partition(".")[2] if name[0].isdigit() else name for name in within} == KEPT[kind]
    # In all blocks that have one, also after others were left out.
    routers = {name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")}
    assert {name for name in model.float32_names if name.endswith("mlp.gate.weight")} == (
        routers if "mlp.gate.weight" in KEPT[kind] else set()
    )
    before = model.float32_names
    model.keep_blocks([2, 3])
    assert model.float32_names == {name for name in before if ".0." not in name and ".1." not in name}


def _masters(model: models.Backbone) -> None:
    """Values that bfloat16 does not have."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in model.float32_names:
                parameter.mul_(1 + 2.0**-10)


def test_one_rank_reads_a_router_in_float32(tmp_path: Path) -> None:
    hf_types.causal("deepseek_v3").save_pretrained(tmp_path)
    model = loaded(tmp_path)
    _masters(model)
    router: Any = model.get_submodule("model.layers.1.mlp.gate")
    master = router.weight.detach().clone()
    found: list[Any] = []
    router.register_forward_hook(lambda _, args, out: found.append((args[0], out)))
    with distributed.session("cpu") as world:
        distributed.parallelize(model, world, Execution(compile="none"))
        model(torch.ones(1, 8, dtype=torch.int64))
        assert model.get_parameter("model.layers.1.mlp.shared_experts.up_proj.weight").dtype == torch.bfloat16
        assert router.weight is model.get_parameter("model.layers.1.mlp.gate.weight")
    (hidden, out), *_ = found
    assert hidden.dtype == torch.bfloat16
    logits = out[0] if isinstance(out, tuple) else out
    exact, rounded = (F.linear(hidden.flatten(0, -2).float(), w) for w in (master, master.bfloat16().float()))
    assert torch.equal(logits.reshape(exact.shape), exact)
    assert not torch.equal(exact, rounded)


def _on_rank(rank: int, num_ranks: int, folder: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Two updates by AdamW from two micro-batches each, which the ranks share out; the whole weights."""
    base = checkpoint.read_base(folder, print)
    execution = Execution(compile="none", **keys)
    with distributed.session("cpu") as world:
        model = base.build_on_meta()
        linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
        distributed.parallelize(model, world, execution)
        distributed.materialize(model, world, execution)
        checkpoint.load_hf(model, base.index)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        losses, draw = [], torch.Generator().manual_seed(3)
        for _ in range(2):
            rows = torch.randint(3, 256, (2, 24), generator=draw)[rank::num_ranks]
            loss_sum = torch.zeros(())
            for number, row in enumerate(rows):
                distributed.sync_gradients(model, number == len(rows) - 1)
                loss = model(row[None], None, row[None])
                (loss * (num_ranks / 64)).backward()  # FSDP takes the mean over ranks; powers of 2 are exact
                loss_sum += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(world.sum(loss_sum))
        distributed.reshard(model)
        weights = {name: full_tensor(each).detach().clone() for name, each in model.named_parameters()}
        return {"losses": torch.tensor(losses), **weights}


@pytest.mark.parametrize(
    "kind", slow_but(lambda kind: kind == "deepseek_v3", ["deepseek_v3", "ernie4_5_moe", "kimi_linear"])
)
def test_two_ranks_train_the_bits_of_one(kind: str, tmp_path: Path) -> None:
    """Each rank has one of the two micro-batches, so both sums have the same terms: a + b is b + a."""
    hf_types.causal(kind).save_pretrained(tmp_path)
    with Ranks(2) as ranks:
        (expected,) = ranks.run(_on_rank, 1, str(tmp_path), {})
        gathered_once = {"parallel": ParallelConfig(reshard_after_forward=False)}
        for keys in ({}, gathered_once | {"activation_checkpointing": "full"}):
            for found in ranks.run(_on_rank, 2, str(tmp_path), keys):
                assert found.keys() == expected.keys()
                assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    "more", slow_but(any, [(("parallel.reshard_after_forward=false", "parallel.replicate=2"),), ((),)])
)
def test_a_dry_run_counts_those_of_the_blocks_that_it_leaves_out(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    """They are gathered, reduced and updated together, by collectives that no block stands for."""
    hf_types.config("ernie4_5_moe", num_hidden_layers=7, moe_layer_end_index=6).save_pretrained(tmp_path)
    config = write_config(tmp_path / "c.yaml", tmp_path, tmp_path / "run", compute_dtype="bfloat16")
    keys = ["data.seq_len=32", "precision.kind=int8_rowcol", *more]
    cfg, facts = load_config(FinetuneConfig, config, keys), models.read_config(tmp_path)
    ranks = 4 if more else 2
    found, full = (dry_run(cfg, facts, world_size=ranks, in_full=in_full) for in_full in (False, True))
    assert found.collectives == full.collectives
    assert found.peaks == full.peaks
    # 6 routers of 8 x 64 and biases of 1 x 8, whose one row takes one on each rank.
    gathered = 6 * 4 * (8 * 64 + 2 * 8)
    calls = {each: count for each, count in found.collectives.items() if each.dtype == "float32"}
    assert [each.num_bytes for each in calls if each.operation == "all_gather"] == [gathered]
