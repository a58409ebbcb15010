"""Sharding, checkpointing and compilation change where and when things are computed, not what."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lptune import distributed, kernels, linear, models
from lptune.base.errors import UserError
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, ParallelConfig, PrecisionConfig
from lptune.distributed import check_compiler
from lptune.kernels import RECOMPUTED, gathered_bytes, record_gemms
from lptune.linear.kinds import rowwise
from tests.distributed.test_tensor_parallel import build, preset_config
from tests.helpers.pinning import pinned_addresses
from tests.helpers.ranks import Ranks


def _decoder_config(tied: bool) -> models.DecoderConfig:
    # A vocabulary of 131 rows divides by no number of ranks.
    return preset_config("llama3_2", vocab_size=131, tie_word_embeddings=tied)


def _config(**keys: object) -> FinetuneConfig:
    values: dict[str, object] = {
        "model": ModelConfig(path="unused"),
        "data": DataConfig(source="unused"),
        "precision": PrecisionConfig(kind="int8_rowcol"),
        "compute_dtype": "float32",
        "compile": "none",
        "activation_checkpointing": "none",
    }
    return FinetuneConfig(**(values | keys))  # type: ignore[arg-type]


def _gradients(world: distributed.World, cfg: FinetuneConfig, tied: bool) -> dict[str, torch.Tensor]:
    """Loss and full gradients of two micro-batches per step, cut over the ranks."""
    model = build(world, cfg, _decoder_config(tied))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 131, (8, 2, 16), generator=generator)
    mine = tokens.chunk(world.data_size)[world.data_rank]
    total = torch.zeros(())
    for number, batch_BS in enumerate(mine, start=1):
        each = cfg.parallel.reduce_every_micro_batch
        distributed.sync_gradients(model, number == len(mine), each=each)
        loss = model(batch_BS[:, :-1], None, batch_BS[:, 1:])
        (loss * (world.data_size / tokens.numel())).backward()
        total += loss.detach()
    for name, module in model.named_modules():
        if isinstance(module, linear.LowPrecisionLinear):
            assert gathered_bytes(module.number) != 0, f"{name} was not gathered in 8 bits"
    gradients = {"loss": torch.tensor(world.sum(total))}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert isinstance(parameter.grad, DTensor) == distributed.uses_fsdp(cfg.parallel, world.size)
        gradients[name] = distributed.full_tensor(parameter.grad)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return gradients


def _gradients_on(
    rank: int, num_ranks: int, tied: bool, kind: str, parallel: dict[str, Any]
) -> dict[str, torch.Tensor]:
    cfg = _config(precision=PrecisionConfig(kind=kind), parallel=ParallelConfig(**parallel))
    with distributed.session("cpu", cfg.parallel) as world:
        return _gradients(world, cfg, tied)


@pytest.mark.parametrize(
    ("num_ranks", "tied", "kind", "parallel"),
    [
        (2, True, "int8_rowcol", {}),
        (4, False, "none", {"reshard_after_forward": False, "prefetch_blocks": 1}),
        (4, True, "int8_rowcol", {"replicate": 2, "prefetch_blocks": 2}),
        (4, False, "none", {"replicate": 2, "reduce_every_micro_batch": True}),
    ],
    ids=str,
)
def test_ranks_with_uneven_rows_and_tied_heads_give_the_gradients_of_one(
    ranks: Ranks, num_ranks: int, tied: bool, kind: str, parallel: dict[str, Any]
) -> None:
    with distributed.session("cpu") as world:
        expected = _gradients(world, _config(precision=PrecisionConfig(kind=kind)), tied)
    actual = ranks.run(_gradients_on, num_ranks, tied, kind, parallel)[0]
    for name, tensor in expected.items():
        # One backward sums 8 micro-batches, in another order: a few float32 ulps of the largest terms.
        assert torch.allclose(actual[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max())), name


@pytest.mark.parametrize("kind", ["int8_rowcol", "int8_weight_only"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_does_not_change_a_bit(mode: str, kind: str) -> None:
    precision = PrecisionConfig(kind=kind)
    with distributed.session("cpu") as world:
        expected = _gradients(world, _config(precision=precision), tied=False)
        cfg = _config(precision=precision, activation_checkpointing=mode)
        actual = _gradients(world, cfg, tied=False)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("kind", ["int8_rowcol", "int8_weight_only"])
def test_selective_checkpointing_recomputes_no_gemm_and_full_recomputes_all_outputs(kind: str) -> None:
    counts = {}
    for mode in ("none", "selective", "full"):
        cfg = _config(precision=PrecisionConfig(kind=kind), activation_checkpointing=mode)
        with distributed.session("cpu") as world, record_gemms() as executed:
            _gradients(world, cfg, tied=False)
        counts[mode] = [
            sum(count for (_, what), count in executed.items() if what == gemm) for gemm in (0, RECOMPUTED)
        ]
    assert counts == {"none": [8 * 14, 0], "selective": [8 * 14, 0], "full": [8 * 14, 8 * 14]}


def test_a_compiled_block_that_is_recomputed_keeps_its_input_and_weights_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As on a GPU, where a GEMM wants its operands transposed: torch 2.11 kept these and outputs of GEMMs.
    for module in (kernels, rowwise):
        monkeypatch.setattr(module, "k_major", lambda device: True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with distributed.session("cpu") as world:
        cfg = _config(compile="block", activation_checkpointing="full")
        model = build(world, cfg, _decoder_config(tied=False))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.body(torch.zeros(2, 48, dtype=torch.int64), None)
        inner = model.facts.intermediate_size
    assert kept
    assert (2 * 48, inner) not in [tuple(each.shape) for each in kept]
    assert all(each.is_contiguous() for each in kept if each.dtype == torch.int8)  # transposed ones are not


def test_a_compiled_graph_is_taken_from_disk_by_the_checkpointing_that_made_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    # The graphs that Dynamo makes under both modes are equal; what they keep for backward is not.
    for mode in ("selective", "selective", "full but attention"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        block = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
        distributed.checkpoint_activations([block], mode)
        distributed.compile_forward([block], "block", fullgraph=True)
        block(torch.ones(4, 16)).sum().backward()
        counts = torch._dynamo.utils.counters["aot_autograd"]
        found.append([what for what in ("hit", "miss", "bypass") if counts[f"autograd_cache_{what}"]])
    assert found == [["miss"], ["hit"], ["miss"]]


@pytest.mark.parametrize("kind", ["int8_rowcol", pytest.param("int8_weight_only", marks=pytest.mark.slow)])
def test_one_compiled_graph_serves_all_blocks_and_steps_and_one_the_head_and_the_loss(kind: str) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with distributed.session("cpu") as world:
        precision = PrecisionConfig(kind=kind)
        compiled = _gradients(world, _config(compile="block", precision=precision), tied=False)
        eager = _gradients(world, _config(precision=precision), tied=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    # Fused float32 arithmetic differs by ulps, which flips the rounding of a few int8 values.
    assert float(compiled["loss"]) == pytest.approx(float(eager["loss"]), rel=1e-4)


def test_a_whole_model_is_one_graph_with_the_gradients_of_an_eager_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiles = torch.compile  # by a backend that writes no C++; graphs and ops are the same
    monkeypatch.setattr(torch, "compile", lambda *args, **keys: compiles(*args, **keys, backend="aot_eager"))
    parallel = ParallelConfig(reshard_after_forward=False)
    with distributed.session("cpu") as world:
        precision = PrecisionConfig(kind="int8_rowcol")
        compiled, eager = (
            _gradients(world, _config(compile=how, precision=precision, parallel=parallel), tied=False)
            for how in ("model", "none")
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compiled.keys() == eager.keys()
    for name, tensor in eager.items():
        assert torch.equal(compiled[name], tensor), name


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_block_of_your_own_is_recomputed_with_the_dropout_of_its_forward(mode: str) -> None:
    def gradient(mode: str) -> torch.Tensor:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1, bias=False))
        model = nn.Sequential(block)
        settings = distributed.Execution(
            compute_dtype="float32", compile="none", activation_checkpointing=mode
        )
        distributed.parallelize(model, world, settings, blocks=[block])
        torch.manual_seed(1)
        model(torch.randn(8, 16)).sum().backward()
        found = block[0].weight.grad
        assert found is not None
        return distributed.full_tensor(found)

    with distributed.session("cpu") as world:
        assert torch.equal(gradient(mode), gradient("none"))


@pytest.mark.parametrize("reshard", [True, None])
def test_parameters_are_float32_and_names_stay(reshard: bool | None) -> None:
    parallel = ParallelConfig(reshard_after_forward=reshard)
    with distributed.session("cpu") as world:
        model = models.build_on_meta(_decoder_config(tied=False))
        names = [name for name, _ in model.named_parameters()]
        linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
        distributed.parallelize(
            model,
            world,
            _config(activation_checkpointing="full", compute_dtype="bfloat16", parallel=parallel),
        )
        assert [name for name, _ in model.named_parameters()] == names
        assert all(isinstance(p, DTensor) == (reshard is True) for p in model.parameters())
        assert all(p.dtype == torch.float32 for p in model.parameters())


def test_an_evaluation_leaves_no_gathered_parameter_behind_after_reshard() -> None:
    with distributed.session("cpu") as world:
        model = models.build_on_meta(_decoder_config(tied=False))
        distributed.parallelize(model, world, _config(parallel=ParallelConfig(reshard_after_forward=True)))
        model.to_empty(device="cpu")
        model.reset_buffers("cpu")
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long))
        assert not all(isinstance(p, DTensor) for p in model.parameters())  # what FSDP does
        distributed.reshard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())


def test_missing_headers_of_python_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh")  # found on every PATH, and not run
    check_compiler("block")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    with pytest.raises(
        UserError, match=r"compile: needs Python's headers, and /nowhere/Python\.h is not there"
    ):
        check_compiler("block")
    check_compiler("none")


def _sum(rank: int, num_ranks: int) -> float:
    with distributed.session("cpu") as world:
        # 2**53 - 1 is the largest odd integer that float64 holds; float32 would give 2**53.
        return world.sum(2**53 - 2 if rank == 0 else 1)


def test_sums_over_ranks_are_float64(ranks: Ranks) -> None:
    assert ranks.run(_sum, 2) == [2**53 - 1] * 2


@pytest.mark.parametrize("kind", ["none", "int8_rowcol", "int8_tensorwise", "int8_weight_only"])
def test_offloaded_weights_are_pinned_and_gathered_alike(kind: str) -> None:
    results = []
    for offload in (False, True):
        cfg = _config(
            precision=PrecisionConfig(kind=kind),
            parallel=ParallelConfig(
                cpu_offload=offload, reduce_every_micro_batch=offload, reshard_after_forward=True
            ),
        )
        with distributed.session("cpu") as world, pinned_addresses() as addresses:
            results.append(_gradients(world, cfg, tied=False))
    expected, actual = results
    # The 14 linear layers, the head, the embedding and the norms; in INT8 rows and scales apart.
    assert len(addresses) >= 21
    for name, tensor in expected.items():
        # Offloaded gradients are reduced and added micro-batch by micro-batch: another order.
        assert torch.allclose(actual[name], tensor, rtol=1e-5, atol=1e-6 * float(tensor.abs().max())), name
