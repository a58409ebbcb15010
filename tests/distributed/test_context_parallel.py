"""Ranks that share rows (parallel.context) compute what one rank computes."""

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from lptune import distributed, models
from lptune.base.errors import UserError
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, ParallelConfig
from lptune.distributed import record_collectives
from lptune.models import attention, context
from lptune.training.first_loss import check_first_loss
from lptune.training.routing import Routing
from lptune.training.samples import greedy
from tests.distributed.test_tensor_parallel import preset_config
from tests.helpers import hf_types, packed, tiny_run
from tests.helpers.ranks import Ranks
from tests.helpers.slow import slow_but

LIMIT = 1e-5
"""Of a norm, relative: sums of up to 256 float32 terms in another order, which differ by some
sqrt(256) * 2^-24 = 1e-6, through four blocks of some ten products there and back, whose errors add up as
sqrt(40)."""


class Case(NamedTuple):
    """A model, and how it runs."""

    model: str
    """A preset of our decoder, or hf/TYPE of transformers."""
    compile: str = "none"
    recomputed: str = "none"
    backend: str = "sdpa"
    """Of attention; `documents`: also where rows are small."""
    kind: str = "none"
    key_heads: int = 2
    """Of four query heads; of transformers' models as hf_types says."""


EAGER = [Case("qwen3"), Case("gemma3"), Case("phi4"), Case("ministral3", backend="documents")]
HF = [Case("hf/qwen3"), Case("hf/gpt_oss"), Case("hf/cohere2"), Case("hf/deepseek_v3")]
OTHERWISE = [
    Case("qwen3", recomputed="full"),
    Case("hf/gpt_oss", recomputed="full"),
    Case("gemma3", "block", "full"),
]
OTHER_WAYS = [
    Case("qwen3", recomputed="selective", backend="documents"),
    Case("qwen3", "block", "selective"),
    Case("qwen3", "model"),
    Case("hf/qwen3", "block", "full"),
    Case("hf/cohere2", "block", "selective"),
]


def _facts(case: Case, folder: Path) -> models.Facts:
    kind = case.model.removeprefix("hf/")
    if kind == case.model:
        return preset_config(kind, num_key_value_heads=case.key_heads)
    return models.read_config(folder / kind, "transformers")


def _made(folder: Path, cases: list[Case]) -> str:
    """Puts the models of transformers where ranks find them."""
    for kind in {case.model.removeprefix("hf/") for case in cases if case.model.startswith("hf/")}:
        more = {"layer_types": ["sliding_attention", "full_attention"] * 2} if kind == "gpt_oss" else {}
        hf_types.causal(kind, **more).save_pretrained(folder / kind)
    return str(folder)


def _batch(vocab_size: int, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of rows of packed.LENGTHS, whose documents lie across the places where ranks cut."""
    tokens_BS, labels_BS = packed.batch(number, vocab_size)
    labels_BS[0, :3] = -100
    return tokens_BS, labels_BS


def _step(world: distributed.World, case: Case, facts: models.Facts) -> dict[str, Tensor]:
    """Loss, logits, log-probabilities and whole gradients of two micro-batches, dealt out to data ranks."""
    cfg = tiny_run.config(
        case.kind,
        data=DataConfig(source="unused", seq_len=packed.SEQ_LEN),
        parallel=ParallelConfig(context=world.ranks_per_row),
        compile=case.compile,
        activation_checkpointing=case.recomputed,
    )
    model = packed.built(facts, cfg, world)
    found, bounds = {}, packed.bounds()
    with torch.no_grad():
        tokens_BS, _ = _batch(facts.vocab_size, 0)
        found["logits"] = model(tokens_BS, bounds)
        found["logits of one document"] = model(tokens_BS)
        found["hidden states"] = model.hidden_states(tokens_BS, bounds)
    mine = list(range(2))[world.data_rank :: world.data_size]
    losses_2 = torch.zeros(2)
    for number in mine:
        distributed.sync_gradients(model, number == mine[-1])
        tokens_BS, labels_BS = _batch(facts.vocab_size, number)
        if number:  # numbers of tokens, weighted as an objective over answers does
            log_p_BS = model(tokens_BS, bounds, labels_BS, loss=models.log_probabilities)
            loss = -(log_p_BS * torch.linspace(0.5, 1.5, packed.SEQ_LEN)).sum()
        else:
            loss = model(tokens_BS, bounds, labels_BS)
        losses_2[number] += loss.detach()
        (loss * (world.data_size / 64)).backward()
    found["losses"] = torch.tensor(world.sums(losses_2))
    return found | packed.gradients(model)


def _steps(
    rank: int, num_ranks: int, folder: str, cases: list[Case], parallel: dict[str, int], fault: str = ""
) -> list[dict[str, Tensor]]:
    found, compiles = [], torch.compile
    with distributed.session("cpu", ParallelConfig(**parallel)) as world, _planted(fault):
        for case in cases:
            torch._dynamo.reset()  # its limit of graphs is for one model
            smallest = 0 if case.backend == "documents" else 2**15
            # By a backend that writes no C++: what is compiled is the same.
            traced = lambda *args, **keys: compiles(*args, **keys, backend="aot_eager")  # noqa: E731
            with (
                mock.patch.object(attention, "_MIN_FLOAT32_ROW", smallest),
                mock.patch.object(torch, "compile", traced),
            ):
                found.append(_step(world, case, _facts(case, Path(folder))))
    return found


def _planted(fault: str) -> Any:
    """Positions that begin anew where rows are cut; or attention to the rank's own documents alone."""

    def first(x_BS: Tensor, group: models.Group) -> Tensor:
        return x_BS[:, : x_BS.shape[1] // group.size].clone()

    def cut_mask(documents: models.DocumentBounds, *args: Any) -> Tensor:
        half = torch.arange(packed.SEQ_LEN) >= packed.SEQ_LEN // 2
        index_BS = 2 * documents.index_BS + half
        return mask(documents._replace(index_BS=index_BS), *args)

    mask = attention.visibility_mask
    if fault == "positions":
        return mock.patch("lptune.models.rope.part", first)
    if fault == "positions of transformers":
        return mock.patch("lptune.models.hf.model.part", first)
    return mock.patch.object(attention, "visibility_mask", cut_mask if fault else mask)


def _differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    return {
        name: float((actual[name] - each).norm() / each.norm())
        for name, each in expected.items()
        if each.norm() or actual[name].norm()
    }


@pytest.mark.parametrize(
    ("num_ranks", "parallel", "cases"),
    slow_but(
        lambda num_ranks, parallel, cases: (
            "replicate" in parallel or (num_ranks == 2 and cases is not OTHER_WAYS)
        ),
        [
            (2, {"context": 2}, EAGER),
            (2, {"context": 2}, HF),
            (2, {"context": 2}, OTHERWISE),
            (2, {"context": 2}, OTHER_WAYS),
            (4, {"context": 2, "replicate": 2}, [Case("qwen3", recomputed="full")]),
            (4, {"context": 2}, [Case("gemma3"), Case("hf/gpt_oss")]),
            (4, {"context": 4}, [Case("ministral3", key_heads=4), Case("hf/deepseek_v3")]),
        ],
    ),
    ids=["ours", "of transformers", "compiled or recomputed", "other ways", "HSDP", "two pairs", "four"],
)
def test_losses_logits_and_gradients_are_those_of_one_rank(
    num_ranks: int, parallel: dict[str, int], cases: list[Case], ranks: Ranks, tmp_path: Path
) -> None:
    by_rank = ranks.run(_steps, num_ranks, _made(tmp_path, cases), cases, parallel)
    alone = [case._replace(compile="none", recomputed="none", backend="sdpa") for case in cases]
    for case, actual, expected in zip(cases, by_rank[0], _steps_alone(alone, tmp_path), strict=True):
        assert (expected["logits"] != expected["logits of one document"]).any()
        for name, error in _differences(actual, expected).items():
            assert error < LIMIT, f"{case}: {name} differs by {error:.1e}"
    for other in by_rank[1:]:  # ranks that share rows have the same results, on each of them
        for actual, expected in zip(other, by_rank[0], strict=True):
            assert all(torch.equal(actual[name], expected[name]) for name in expected)


def _steps_alone(cases: list[Case], folder: Path) -> list[dict[str, Tensor]]:
    with distributed.session("cpu") as world:
        return [_step(world, case, _facts(case, folder)) for case in cases]


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        ("positions", "qwen3"),
        ("mask", "qwen3"),
        ("positions of transformers", "hf/qwen3"),
        ("mask", "hf/qwen3"),
    ],
)
def test_it_finds_positions_and_masks_that_know_one_part_of_a_row_alone(
    fault: str, model: str, ranks: Ranks, tmp_path: Path
) -> None:
    cases = [Case(model)]
    (actual,) = ranks.run(_steps, 2, _made(tmp_path, cases), cases, {"context": 2}, fault)[0]
    (expected,) = _steps_alone(cases, tmp_path)
    found = _differences(actual, expected)
    assert min(found[name] for name in ("losses", "logits")) > 3 * LIMIT
    assert max(found.values()) > 100 * LIMIT


def test_the_first_loss_in_int8_is_that_of_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    cases = [Case("qwen3", kind="int8_rotated")]
    (actual,) = ranks.run(_steps, 2, str(tmp_path), cases, {"context": 2})[0]
    (expected,) = _steps_alone(cases, tmp_path)
    # Scales of rows are those of a token. Gradients have scales over the tokens of a rank, as on data ranks.
    assert (actual["losses"] - expected["losses"]).abs().max() < LIMIT * expected["losses"].abs().max()
    noise = _differences(actual, expected)["model.layers.0.mlp.down_proj.weight"]
    assert LIMIT < noise < 0.05


def _exchanged(rank: int, num_ranks: int) -> tuple[dict[str, int], list[list[int]]]:
    """Calls and bytes over the group in forward and backward, and the greedy answers of a sharded model."""
    cfg = FinetuneConfig(
        model=ModelConfig(path="unused"), data=DataConfig(source="unused", seq_len=packed.SEQ_LEN),
        parallel=ParallelConfig(context=num_ranks), compute_dtype="float32", compile="none",
        activation_checkpointing="selective",
    )  # fmt: skip
    with distributed.session("cpu", cfg.parallel) as world:
        model = models.build_on_meta(preset_config("qwen3"))
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        with torch.no_grad():
            for parameter in model.parameters():
                distributed.local_rows(parameter)[0].normal_(0.0, 0.02)
        tokens_BS, labels_BS = _batch(128, 0)
        with record_collectives(world.mesh, world.context) as counted:
            model(tokens_BS, packed.bounds(), labels_BS).backward()
        answers = greedy(
            model, [[1, 2, 3], [4]], max_new_tokens=4, stop_ids=[], pad_id=0, multiple_of=world.ranks_per_row
        )
        assert "each row on 2 of them" in distributed.describe_mesh(model, world)
        numbers: list[int] = []  # of random bits: not those of the same rows' other tokens
        low: Any = mock.Mock(micro_batch=numbers.append)
        assert list(distributed.accumulate(model, "ab", world, cfg, low)) == ["a", "b"]
        assert numbers == [2 * rank, 2 * rank + 1]
        found = {
            name: counted.num_calls(operation=name, axis="context") for name in ("all_to_all", "all_reduce")
        }
        return found | {"bytes": counted.num_bytes(operation="all_to_all", axis="context")}, answers


def test_what_ranks_exchange_is_what_the_closed_form_says(ranks: Ranks) -> None:
    (found, answers), (_, others) = ranks.run(_exchanged, 2)
    config = preset_config("qwen3")
    assert answers == others
    assert [len(each) for each in answers] == [4, 4]
    # q, k, v and the result of each block, in forward, again in backward, and their gradients.
    assert found["all_to_all"] == 3 * 4 * config.num_layers
    assert found["all_reduce"] == 1
    sizes = 2 * config.num_heads + 2 * config.num_kv_heads
    assert found["bytes"] == 3 * config.num_layers * sizes * config.head_dim * 4 * 2 * packed.SEQ_LEN // 2


def test_all_to_alls_undo_each_other_and_the_data_size_is_of_rows(ranks: Ranks) -> None:
    for found in ranks.run(_there_and_back, 4):
        assert found == (True, True, (2, 4), 2)


def _there_and_back(rank: int, num_ranks: int) -> tuple[bool, bool, tuple[int, int], int]:
    with distributed.session("cpu", ParallelConfig(context=2)) as world:
        group = world.context
        assert group is not None
        assert (world.data_rank, group.rank, world.token_rank) == (rank // 2, rank % 2, rank)
        whole = torch.arange(2 * 6 * 4 * 3.0).view(2, 6, 4, 3)  # B, S, N, D
        mine = context.part(whole, group)
        heads = context.to_heads(mine, group)
        ours = whole[:, :, 2 * group.rank : 2 * group.rank + 2]
        returned = context.to_tokens(heads, group)
        sizes = world.data_size, world.token_size
        return torch.equal(heads, ours), torch.equal(returned, mine), sizes, world.ranks_per_row


@pytest.mark.parametrize(
    ("content", "context", "message"),
    [
        ({"num_key_value_heads": 1}, 2, r"2 ranks do not divide the 1 key heads .*set it to 1, which is"),
        (
            {},
            4,
            r"parallel\.context: 4 ranks do not divide the 2 key heads of 'qwen3'; set it to 2, which is",
        ),
    ],
)
def test_heads_that_ranks_cannot_share_are_one_line(
    content: dict[str, int], context: int, message: str
) -> None:
    facts = preset_config("qwen3", **content)
    with pytest.raises(UserError, match=message):
        facts.check_execution(1, "none", context)


def test_models_that_need_all_tokens_elsewhere_are_refused(tmp_path: Path) -> None:
    for kind, message in (("lfm2", "layers other than attention"), ("llama4_text", "place in a row")):
        more = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} if kind == "lfm2" else {}
        hf_types.causal(kind, **more).save_pretrained(tmp_path / kind)
        facts = models.read_config(tmp_path / kind, "transformers")
        with pytest.raises(UserError, match=rf"parallel\.context: .*{message}.*; set it to 1"):
            facts.check_execution(1, "none", 2)


def test_settings_that_exclude_shared_rows_are_one_line() -> None:
    with pytest.raises(UserError, match=r"parallel\.context: 2 ranks .*parallel\.tensor=2"):
        ParallelConfig(context=2, tensor=2)
    with pytest.raises(UserError, match=r"data\.seq_len: 9 tokens do not divide among 2 ranks"):
        tiny_run.config(
            "none", data=DataConfig(source="unused", seq_len=9), parallel=ParallelConfig(context=2)
        )
    with pytest.raises(UserError, match=r"replicate=2 x tensor=1 x context=2 needs a multiple of 4 ranks"):
        distributed.mesh_axes(ParallelConfig(replicate=2, context=2), 6)
    cfg = tiny_run.config("none", parallel=ParallelConfig(context=2), global_batch_size=4, micro_batch_size=2)
    cfg.check_ranks(4)
    with pytest.raises(UserError, match=r"do not divide among 4 data ranks"):
        cfg.check_ranks(8)


def _checked(rank: int, num_ranks: int, folder: str) -> tuple[dict[str, list[float]], list[int]]:
    """Of one forward twice: the tokens with the same experts and all, over all ranks; and the micro-batch
    whose random bits the check of the first loss draws.
    """
    with distributed.session("cpu", ParallelConfig(context=num_ranks)) as world:
        cfg = tiny_run.config("int8_rowcol", parallel=ParallelConfig(context=num_ranks))
        model = models.build_on_meta(models.read_config(Path(folder), "transformers"))
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        with torch.no_grad():
            for parameter in model.parameters():
                distributed.local_rows(parameter)[0].normal_(0.0, 0.02)
        tokens_BS, _ = _batch(128, 0)
        is_padding_BS = torch.arange(packed.SEQ_LEN).expand_as(tokens_BS) >= packed.SEQ_LEN - 5
        routing = Routing(model, is_padding_BS)
        for name in ("low", "high"):
            with torch.no_grad(), routing.of(name):
                model(tokens_BS, packed.bounds())
        counts = {name: world.sums(each) for name, each in routing.counts().items()}
        numbers: list[int] = []
        low, loader = mock.MagicMock(), mock.MagicMock(rank=world.data_rank, micro_batches_per_rank=3)
        low.outside_of_steps.side_effect = lambda step, number: numbers.append(number)
        with pytest.raises(TypeError, match="context manager"):  # by then it has the number
            check_first_loss(model, low, loader, cfg, world, 0)
        return counts, numbers


def test_checks_count_the_tokens_of_all_ranks_and_draw_the_bits_of_training(
    ranks: Ranks, tmp_path: Path
) -> None:
    hf_types.causal("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    for rank, (counts, numbers) in enumerate(ranks.run(_checked, 2, str(tmp_path))):
        assert list(counts.values()) == [[2 * packed.SEQ_LEN - 10] * 2]
        assert numbers == [3 * rank]
