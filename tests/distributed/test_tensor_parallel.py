"""Tensor and sequence parallelism compute what one rank computes."""

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from lptune import checkpoint, distributed, linear, models, training
from lptune.base.errors import UserError
from lptune.config import (
    PRECISION_KINDS,
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
)
from lptune.distributed import record_collectives
from lptune.distributed.tensor_parallel import cut, cut_backbone
from lptune.kernels import HEADER_BYTES
from tests.helpers.ranks import Ranks
from tests.helpers.saving import save
from tests.helpers.tiny_run import clip_grad_norm

SEQ_LEN, NUM_MICRO_BATCHES, ROWS = 16, 2, 2
LOW_TOKENS = ("int8_rowcol", "float8_rowwise", "int8_tensorwise", "float8_tensorwise")
FOLDED = ("int8_rowcol", "float8_rowwise")
STAND = ("none", "int8_rowcol", "float8_tensorwise", "float8_delayed", "int8_weight_only", "bitnet")
"""A kind for each way of cutting weights and scales; blocks of elements: test_stock_styles.py."""
OTHERS = tuple(kind for kind in PRECISION_KINDS if kind not in STAND)
GATHER = ("all_gather", "tensor")
"""Operation and axis of a gather of tokens."""


def _config(kind: str = "none", *, tokens: str = "auto", **parallel: Any) -> FinetuneConfig:
    folded = {"grad_weight": "folded"} if tokens != "auto" and kind in FOLDED else {}
    precision = PrecisionConfig(
        kind=kind, emulate=not kind.startswith("int8"), tp_all_gather=tokens, **folded
    )
    return FinetuneConfig(
        model=ModelConfig(path="unused"),
        data=DataConfig(source="unused", seq_len=SEQ_LEN),
        precision=precision,
        parallel=ParallelConfig(**parallel),
        compute_dtype="float32",
        compile="none",
        activation_checkpointing="none",
    )


def preset_config(preset: str, **content: Any) -> models.DecoderConfig:
    return models.config_from_dict(copy.deepcopy(models.PRESETS[preset]["tiny"]) | content, preset)


def build(world: distributed.World, cfg: FinetuneConfig, config: models.DecoderConfig) -> Any:
    """A parallelized decoder with the initial values of seed 0, on any mesh. `scaling` holds its
    histories.
    """
    model: Any = models.build_on_meta(config)
    plan = linear.convert(model, cfg.precision, device=world.device)
    model.scaling = linear.DelayedScaling(plan, world.device, world.max_, world.data_size)
    linear.StochasticRounding(model, plan, seed=0).start(0, 0)
    distributed.parallelize(model, world, cfg)
    distributed.materialize(model, world, cfg)
    whole, fused = models.build_on_meta(config), distributed.fused_rows(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = whole.initial_value(name, 0)
            value = value + torch.linspace(-0.1, 0.1, len(value)) if name.endswith("bias") else value
            for piece in distributed.local_pieces(parameter, fused.get(name, ())):
                piece.values.copy_(value[piece.region])
    return model


def _step(world: distributed.World, model: Any) -> dict[str, Tensor]:
    """Loss, logits and whole gradients of one step's micro-batches, which are cut over the data ranks."""
    with model.scaling.step():
        return _gradients_of_a_step(world, model)


def _gradients_of_a_step(world: distributed.World, model: models.Decoder) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (NUM_MICRO_BATCHES, ROWS, SEQ_LEN + 1)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=generator)
    with torch.no_grad():
        results = {"logits": model(tokens[0, :, :-1])}
    mine = tokens.chunk(world.data_size)[world.data_rank]
    total = torch.zeros(())
    for number, batch in enumerate(mine, start=1):
        distributed.sync_gradients(model, number == len(mine))
        labels = batch[:, 1:].clone()
        labels[0, :3] = -100
        loss = model(batch[:, :-1], None, labels)
        (loss * (world.data_size / tokens.numel())).backward()
        total += loss.detach()
    results["loss"] = torch.tensor(world.sum(total))
    fused = distributed.fused_rows(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = distributed.full_tensor(parameter.grad, fused.get(name, ())).contiguous()
    results["grad_norm"] = clip_grad_norm(model, 0.0)
    return results


FAMILIES = {
    "llama3_2": {"vocab_size": 131},
    "llama3_1": {"attention_bias": True, "mlp_bias": True},
    "llama3_3": {},
    "qwen2_5": {},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {},
    "gemma2": {},
    "gemma3": {},
    "phi4": {"num_key_value_heads": 2},
    "olmo2": {},
    "smollm3": {},
    "granite3": {},
    "olmo3": {},
    "ministral3": {},
    "gemma": {"num_key_value_heads": 2},
    "seed_oss": {"attention_out_bias": True},
    "hunyuan": {},
    "ernie4_5": {},
    "exaone4": {},
}
"""Every family; with a vocabulary that does not divide, with biases, tied and not, fused (phi4)."""
ALIKE = {
    "llama3_3": "llama3_2",
    "qwen2_5": "llama3_1",  # biases
    "mistral": "qwen3",  # untied, with a window that no rank cuts
    "gemma": "gemma2",
    "ministral3": "llama3_2",
    "olmo3": "olmo2",
}
"""Families whose layers are cut as another's are."""


def _families(rank: int, num_ranks: int, presets: list[str]) -> dict[tuple[str, bool], dict[str, Tensor]]:
    found = {}
    with distributed.session("cpu", ParallelConfig(tensor=num_ranks)) as world:
        for sequence, preset in itertools.product((True, False), presets):
            if not sequence and preset not in ("llama3_1", "olmo2", "qwen3"):
                continue
            cfg = _config(tensor=num_ranks, sequence=sequence)
            config = preset_config(preset, **FAMILIES[preset])
            found[preset, sequence] = _step(world, build(world, cfg, config))
    return found


@pytest.mark.parametrize(
    "presets",
    [[each for each in FAMILIES if each not in ALIKE], pytest.param([*ALIKE], marks=pytest.mark.slow)],
    ids=["each way", "alike"],
)
def test_every_family_has_the_loss_logits_and_gradients_of_one_rank(presets: list[str], ranks: Ranks) -> None:
    assert FAMILIES.keys() == models.PRESETS.keys()
    found = ranks.run(_families, 2, presets)[0]
    assert len(found) == len(presets) + (3 if "qwen3" in presets else 0)
    for (preset, sequence), actual in found.items():
        with distributed.session("cpu") as world:
            expected = _step(world, build(world, _config(), preset_config(preset, **FAMILIES[preset])))
        for name, tensor in expected.items():
            # Sums of up to 256 float32 terms in another order, through two blocks there and back.
            error = (actual[name] - tensor).norm() / tensor.norm()
            assert error < 1e-5, f"{preset}, {sequence}: {name} differs by {error:.1e}"


OfKinds = dict[tuple[str, str], dict[str, Tensor]]
"""(kind, how tokens are gathered) -> the results of a step."""


def _of_kinds(rank: int, num_ranks: int, kinds: tuple[str, ...]) -> OfKinds:
    found: OfKinds = {}
    cases = [(kind, "auto") for kind in kinds]
    cases += [(kind, "low") for kind in FOLDED if kind in kinds]
    cases += [(kind, "high") for kind in LOW_TOKENS if kind in kinds]
    with distributed.session("cpu", ParallelConfig(tensor=2)) as world:
        for kind, tokens in cases:
            cfg = _config(kind, tokens=tokens, tensor=2)
            model = build(world, cfg, preset_config("llama3_2"))
            with record_collectives(world.mesh) as executed:
                results = _step(world, model)
            of_tokens = (each for each in executed.elements() if (each.operation, each.axis) == GATHER)
            low = [each.num_bytes for each in of_tokens if each.dtype == "uint8"]
            found[kind, tokens] = results | {"low_gathers": torch.tensor(low)}
    return found


@pytest.fixture(
    scope="module", params=[STAND, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"]
)
def on_a_mesh_of_2_x_2(ranks: Ranks, request: pytest.FixtureRequest) -> OfKinds:
    """Results of these kinds, by fsdp x tensor ranks."""
    return cast(OfKinds, ranks.run(_of_kinds, 4, request.param)[0])


def _gradients(results: dict[str, Tensor]) -> Tensor:
    return torch.cat([results[name].flatten() for name in sorted(results) if name.startswith("model.layers")])


def test_every_kind_under_fsdp_and_tensor_parallelism_is_as_exact_as_on_one_rank(
    on_a_mesh_of_2_x_2: OfKinds,
) -> None:
    found = {}
    for kind in dict.fromkeys(("none", *(kind for kind, _ in on_a_mesh_of_2_x_2))):
        with distributed.session("cpu") as world:
            found[kind] = _step(world, build(world, _config(kind), preset_config("llama3_2")))
    truth = _gradients(found["none"])
    for (kind, tokens), results in on_a_mesh_of_2_x_2.items():
        if tokens != "auto":
            continue
        alone = found[kind]
        if kind == "none":
            assert (_gradients(results) - truth).norm() < 1e-5 * truth.norm()
            continue
        # A part of a row or tensor has a scale of its own, never larger than the whole's: the noise is no
        # larger in expectation. Two draws of a norm over 1e4 to 1e5 elements, whose noise is correlated along
        # tokens and layers, differ by some percent.
        for what, of in (("gradients", _gradients), ("logits", lambda r: r["logits"])):
            noise_alone, noise = ((of(r) - of(found["none"])).norm() for r in (alone, results))
            assert 0.3 * noise_alone < noise < 1.1 * noise_alone, (
                f"{kind}: {what} {noise:.4f}, {noise_alone:.4f}"
            )
        # To first order the loss of a token changes by <p - onehot, change of its logits>, |p - onehot| is at
        # most the root of 2, and the logits are those of one of two micro-batches; a few ulps of the sum.
        change = (results["logits"] - alone["logits"]).norm() * 2 + alone["loss"] * 2**-21
        assert (results["loss"] - alone["loss"]).abs() < change, kind


def test_gathering_tokens_in_8_bits_changes_no_bit_and_moves_what_the_closed_form_says(
    on_a_mesh_of_2_x_2: OfKinds,
) -> None:
    kinds = [kind for kind, tokens in on_a_mesh_of_2_x_2 if tokens == "high"]
    assert len(kinds) == 2
    for kind in kinds:
        # Scales of a tensor do not hinder it: there it is what `auto` does.
        low, high = (on_a_mesh_of_2_x_2[kind, how] for how in ("low" if kind in FOLDED else "auto", "high"))
        gathered = low["low_gathers"].tolist()
        assert high["low_gathers"].tolist() == []
        for name in high.keys() - {"low_gathers"}:
            assert torch.equal(low[name], high[name]), (kind, name)
        config = preset_config("llama3_2")
        tokens, hidden = ROWS * SEQ_LEN, config.hidden_size
        bytes_of_one = tokens * (hidden + (HEADER_BYTES if kind in FOLDED else 0))
        # One for q, k and v and one for gate and up, in each block: for the logits, and for this rank's
        # micro-batch.
        assert gathered == [bytes_of_one] * (2 * config.num_layers * 2)


def _save_or_load(rank: int, num_ranks: int, folder: str, kind: str, parallel: dict[str, int]) -> None:
    """A step, saved under 0; or what was saved there, loaded and saved again under 1."""
    cfg, path = _config(kind, **parallel), Path(folder)
    with distributed.session("cpu", cfg.parallel) as world:
        model = build(world, cfg, preset_config("phi4", num_key_value_heads=2))
        optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-2))
        if (path / "0").exists():
            checkpoint.load_state(checkpoint.verify(path / "0" / "step-00000001"), model, optimizer)
            path = path / "1"
        else:
            _step(world, model)
            optimizer.step()
            path = path / "0"
        save(path, 1, model, optimizer, world)
        # torch's own way to load keeps the parts that tensor parallelism cut.
        model.load_state_dict(model.state_dict(), assign=True)
        with torch.no_grad():
            assert model(torch.zeros(1, SEQ_LEN, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("kind", ["int8_rowcol", "int8_weight_only"])
def test_checkpoints_have_one_order_of_rows_and_load_on_any_mesh(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    for num_ranks in (4, 2):
        ranks.run(_save_or_load, num_ranks, str(tmp_path), kind, {"tensor": 2})
    config = preset_config("phi4", num_key_value_heads=2)
    states = []
    for number in range(2):
        with distributed.session("cpu") as world:
            cfg = _config(kind)
            model = build(world, cfg, config)
            optimizer = training.build_optimizer(model, OptimizerConfig(lr=1e-2))
            checkpoint.load_state(
                checkpoint.verify(tmp_path / str(number) / "step-00000001"), model, optimizer
            )
            state = {
                name: distributed.full_tensor(linear.dequantized(p)) for name, p in model.named_parameters()
            }
            moments = {
                name: distributed.full_tensor(optimizer.state[p]["exp_avg"])
                for name, p in model.named_parameters()
            }
            states.append((state, moments))
    (first, first_moments), (second, second_moments) = states
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert torch.equal(first_moments[name], second_moments[name]), name
    # The rows of q, k and v are where one rank has them: one step of AdamW moves each by its learning rate.
    with distributed.session("cpu") as world:
        cfg = _config(kind)
        before = {
            n: distributed.full_tensor(linear.dequantized(p))
            for n, p in build(world, cfg, config).named_parameters()
        }
    for name, tensor in first.items():
        moved = (tensor - before[name]).abs().max()
        assert 0 < moved < 0.05, (name, moved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_key_value_heads": 1}, r"2 ranks do not divide num_key_value_heads=1; .* that do: 1"),
        ({"intermediate_size": 48, "hidden_size": 64}, r"2 ranks leave 24 x 64 of a layer of 48 x 64"),
    ],
)
def test_what_two_ranks_cannot_share_is_one_line(content: dict[str, Any], message: str) -> None:
    with _two_fake_ranks() as mesh:
        model = models.build_on_meta(preset_config("llama3_2", **content))
        linear.convert(model, _config("int8_rowcol").precision, device=torch.device("cpu"))
        with pytest.raises(UserError, match=message):
            cut_backbone(model, mesh, True)


@contextlib.contextmanager
def _two_fake_ranks() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    try:
        yield torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    finally:
        torch.distributed.destroy_process_group()


def test_an_8_bit_gather_that_was_asked_for_and_cannot_be_is_one_line() -> None:
    precision = PrecisionConfig(kind="int8_tensorwise", tp_all_gather="low", skip=("lm_head", "k_proj"))
    with _two_fake_ranks() as mesh:
        for keys, sequence, why in (
            ({}, True, "layers that share an input differ"),
            ({"skip": ("lm_head",)}, False, "gathers none"),
        ):
            model = models.build_on_meta(preset_config("llama3_2"))
            linear.convert(model, dataclasses.replace(precision, **keys), device=torch.device("cpu"))
            with pytest.raises(UserError, match=f"tp_all_gather: low is not possible, .*{why}"):
                cut_backbone(model, mesh, sequence)


@pytest.mark.parametrize(
    ("module", "style", "message"),
    [
        (
            nn.Linear(16, 48),
            distributed.ColumnParallel((16, 17, 15)),
            r"fused_rows=\(16, 17, 15\) must add up",
        ),
        (nn.Linear(16, 48), distributed.ColumnParallel((16, 16)), r"must add up to 48 output features"),
        (nn.Embedding(8, 16, padding_idx=0), distributed.VocabParallelEmbedding(), "padding_idx"),
        (nn.Embedding(1, 16), distributed.VocabParallelEmbedding(), "1 words leave some of 2 ranks without"),
        (nn.BatchNorm1d(16), distributed.Replicated(), "BatchNorm1d is no RMSNorm or LayerNorm"),
        (nn.Sequential(nn.Linear(16, 16)), distributed.GatheredInput(), "no column-parallel layer yet"),
        (nn.Bilinear(16, 16, 16), distributed.RowParallel(), "Bilinear is no nn.Linear"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_style_cannot_cut_right_is_one_line(module: nn.Module, style: Any, message: str) -> None:
    with _two_fake_ranks() as mesh, pytest.raises(UserError, match=message):
        parallelize_module(module, mesh, style)


def test_a_parameter_that_no_style_takes_is_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    with _two_fake_ranks() as mesh, pytest.raises(UserError, match=r"the plan has no style for 1\.weight"):
        cut(model, mesh, {"0": distributed.ColumnParallel()})


def test_rows_that_do_not_divide_are_one_line() -> None:
    with pytest.raises(UserError, match=r"data\.seq_len: 16 tokens do not divide among 3 ranks"):
        _config(tensor=3)
    _config(tensor=3, sequence=False)


def test_a_gather_of_tokens_that_its_gemms_do_not_allow_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"tp_all_gather: low is not possible with precision\.kind: mxfp8; int8_row"
    ):
        PrecisionConfig(kind="mxfp8", tp_all_gather="low")
    with pytest.raises(UserError, match=r"it needs output=low and grad_weight=folded"):
        PrecisionConfig(kind="int8_rowcol", tp_all_gather="low")
    assert PrecisionConfig(kind="float8_tensorwise").gathers_tokens_low
    assert not PrecisionConfig(kind="float8_tensorwise", grad_weight="high").gathers_tokens_low
