"""A model that is no Decoder, written wholly in this file, as another member of Backbone would be.

Its folder stores a head that is tied, a fused tensor that is cut into three parameters, two that are stacked
in one, two that are joined by rows, one transposed that is no matrix, all under other names, and one that
is no part of the model. Nothing in the library knows of it. It trains by the recipe on one rank and on two,
goes on from checkpoints of either, exports what its base stored, is planned, and generates without a cache.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lptune import checkpoint, distributed, models
from lptune.base.errors import UserError
from lptune.cli import recipe
from lptune.config import FinetuneConfig, PrecisionConfig, SamplingConfig, load_config
from lptune.inference import load_model
from lptune.inference.decode import Answer, decode
from lptune.inference.sampling import Sampler
from lptune.inference.score import Pair, score
from lptune.models.backbone import ChunkLoss
from lptune.models.documents import visibility_mask
from lptune.models.keys import Keys
from lptune.models.members import MEMBERS
from lptune.plan.dry_run import dry_run
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_recipe import make_checkpoint, write_config
from tests.recipes.conftest import losses, read_metrics

RECIPE = Path(__file__).parents[2] / "recipes" / "full_finetune.py"
H, I, TAPS, LAYERS = 64, 96, 3, 2  # noqa: E741  (sizes, as in the other files)
# At the rate of the other tiny runs, 3e-3, one rounding to another integer moves later losses by 1e-4.
COMMON = (
    "precision.kind=int8_rowcol",
    "optimizer.lr=1e-3",
    "num_steps=4",
    "eval_every_steps=0",
    "checkpoint.every_steps=2",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyFacts(models.Facts):
    def build(self) -> "Toy":
        return Toy(self)


def read_toy(keys: Keys, folder: Path) -> ToyFacts | None:
    if keys.get("model_type") != "toy":
        return None
    return ToyFacts(
        family="toy",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=H,
        intermediate_size=I,
        num_heads=1,
        num_kv_heads=1,
        head_dim=H,
        layers=(models.Layer(),) * keys.integer("num_layers"),
        max_position_embeddings=4096,
        tied=True,
        word_names=("toy.words", "toy.head"),
    )


@contextlib.contextmanager
def toy() -> Iterator[None]:
    """The member exists within it."""
    MEMBERS["toy"] = read_toy
    try:
        yield
    finally:
        del MEMBERS["toy"]


class Block(nn.Module):
    """Attention, a convolution over three tokens of a document, and a product of two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(H, H, bias=False) for _ in "qkv")
        self.taps = nn.Parameter(torch.empty(H, 1, TAPS))
        self.up = nn.Parameter(torch.empty(2, I, H))
        self.down = nn.Linear(I, H, bias=False)

    def forward(self, hidden_BSH: Tensor, visible_B1SS: Tensor) -> Tensor:
        x_BSH, seq_len = self.norm(hidden_BSH), hidden_BSH.shape[1]
        q, k, v = (each(x_BSH)[:, None] for each in (self.q_proj, self.k_proj, self.v_proj))
        mixed_BSH = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_B1SS)[:, 0]
        for back in range(TAPS):
            seen_BS = F.pad(visible_B1SS[:, 0].diagonal(-back, 1, 2).to(x_BSH.dtype), (back, 0))[:, :seq_len]
            earlier_BSH = F.pad(x_BSH, (0, 0, back, 0))[:, :seq_len]
            mixed_BSH = mixed_BSH + self.taps[:, 0, back] * earlier_BSH * seen_BS[..., None]
        hidden_BSH = hidden_BSH + mixed_BSH
        gate_BSI, up_BSI = (hidden_BSH @ self.up[number].t() for number in (0, 1))
        out_BSH: Tensor = hidden_BSH + self.down(F.silu(gate_BSI) * up_BSI)
        return out_BSH


class Toy(models.Backbone):
    def __init__(self, facts: ToyFacts) -> None:
        super().__init__()
        self.facts = facts
        self.words = nn.Embedding(facts.vocab_size, H)
        self.layers = nn.ModuleList(Block() for _ in facts.layers)
        self.norm = nn.RMSNorm(H)
        self.out = nn.Linear(H, facts.vocab_size, bias=False)
        self.out.weight = self.words.weight
        self.chunk_loss = ChunkLoss(facts.vocab_size)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    @property
    def embedding(self) -> nn.Module:
        return self.words

    @property
    def head(self) -> nn.Module:
        return self.out

    def body(self, tokens_BS: Tensor, documents: models.DocumentBounds | None = None) -> Tensor:
        hidden_BSH = self.words(tokens_BS)
        visible_B1SS = visibility_mask(documents, tokens_BS.shape[1], None, tokens_BS.device)
        for block in self.layers:
            hidden_BSH = block(hidden_BSH, visible_B1SS)
        normed_BSH: Tensor = self.norm(hidden_BSH)
        return normed_BSH

    def attention_backend(self, *args: Any, **keys: Any) -> str:
        return "sdpa of the toy"

    def initial_value(self, name: str, seed: int) -> Tensor:
        shape = self.get_parameter(name).shape
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        with torch.device("cpu"):
            values = torch.empty(shape).normal_(0.0, 0.1, generator=generator)
        return values + 1 if len(shape) == 1 else values

    def stored_as(self, name: str, shape: tuple[int, ...]) -> Sequence[models.Part]:
        _, number, *rest = name.split(".")
        start = (0,) * len(shape)
        match rest:
            case [("q_proj" | "k_proj" | "v_proj") as each, _]:  # cut out of one
                row = ("q_proj", "k_proj", "v_proj").index(each) * H
                return [models.Part(f"toy.{number}.qkv", start, shape, origin=(row, 0))]
            case ["up"]:  # a stack
                return [
                    models.Part(f"toy.{number}.up.{e}", (e, 0, 0), (1, I, H), dims=(None, 0, 1))
                    for e in range(2)
                ]
            case ["down", _]:  # joined
                half = H // 2
                return [
                    models.Part(f"toy.{number}.{end}", (row, 0), (half, I))
                    for end, row in (("low", 0), ("high", half))
                ]
            case ["taps"]:  # transposed
                return [models.Part(f"toy.{number}.taps", start, shape, dims=(2, 1, 0))]
        renamed = {"words.weight": "toy.words", "out.weight": "toy.head"}
        return [models.Part(renamed.get(name, f"toy.{name}"), start, shape)]

    def passes_on(self, stored: str) -> bool:
        return stored.startswith("vision.")


def _stored(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the folder stores of a model with these parameters, without the map."""
    tensors = {"toy.words": values["words.weight"], "toy.norm.weight": values["norm.weight"]}
    for number in range(LAYERS):
        block = {name: values[f"layers.{number}.{name}"] for name in ("up", "taps", "norm.weight")}
        qkv = [values[f"layers.{number}.{each}_proj.weight"] for each in "qkv"]
        down = values[f"layers.{number}.down.weight"]
        tensors |= {
            f"toy.{number}.qkv": torch.cat(qkv),
            f"toy.{number}.up.0": block["up"][0],
            f"toy.{number}.up.1": block["up"][1],
            f"toy.{number}.low": down[: H // 2],
            f"toy.{number}.high": down[H // 2 :],
            f"toy.{number}.taps": block["taps"].permute(2, 1, 0),
            f"toy.layers.{number}.norm.weight": block["norm.weight"],
        }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the toy, in two files, with the tokenizer of another model."""
    folder = make_checkpoint(tmp_path_factory.mktemp("toy") / "base")
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    content = {
        "model_type": "toy",
        "vocab_size": vocab_size,
        "num_layers": LAYERS,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with toy():
        model = models.build_on_meta(models.read_config(folder))
    tensors = _stored({name: model.initial_value(name, 0) for name, _ in model.named_parameters()})
    tensors["vision.patches"] = torch.arange(6.0).to(torch.float16)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    file_of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}  # a parameter in both
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def _train(base: Path, folder: Path, name: str, *more: str, rank: int = 0) -> Path:
    """A run of the recipe on the ranks that call this."""
    config = write_config(folder / f"{name}-{rank}.yaml", base, folder / name)
    with toy():
        recipe.load_main(RECIPE)(load_config(FinetuneConfig, config, [*COMMON, *more]))
    return folder / name


def _on_rank(rank: int, num_ranks: int, base: str, folder: str, name: str, *more: str) -> None:
    _train(Path(base), Path(folder), name, *more, rank=rank)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(base, tmp_path_factory.mktemp("run"), "whole")


def test_the_recipe_trains_it_in_int8_and_goes_on_bit_for_bit(
    base: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half_way = run / "checkpoints" / "step-00000002"
    resumed = _train(base, tmp_path, "resumed", f"resume={half_way}")
    printed = capsys.readouterr().out
    assert "8-bit GEMMs ran in the first step, as planned" in printed
    assert "attention by sdpa of the toy" in printed
    plan = json.loads((run / "precision_plan.json").read_text(encoding="utf-8"))
    assert plan["num_converted"] == 4 * LAYERS  # q, k, v and down; not the head, which is tied
    found = losses(run)
    assert found[-1] < found[0]
    assert losses(resumed) == found[2:]
    for file in (run / "export").glob("*.safetensors"):
        assert (resumed / "export" / file.name).read_bytes() == file.read_bytes()


def test_it_exports_what_its_base_stored(base: Path, run: Path) -> None:
    before, after = _tensors(base), _tensors(run / "export")
    assert {name: (t.dtype, t.shape) for name, t in after.items()} == {
        name: (t.dtype, t.shape) for name, t in before.items()
    }
    assert torch.equal(after["vision.patches"], before["vision.patches"])
    saved = {}
    for file in (run / "checkpoints" / "step-00000004").glob("model-*.safetensors"):
        saved |= load_file(file)
    expected = _stored(saved)
    assert all(torch.equal(after[name], value) for name, value in expected.items())
    assert not any(torch.equal(before[name], value) for name, value in expected.items())
    with toy():  # and it is read back
        index = checkpoint.read_index(run / "export")
        model = models.build_on_meta(checkpoint.read_config(index, print)).to_empty(device="cpu")
        checkpoint.load_hf(model, index)
    assert model.out.weight is model.words.weight
    assert all(torch.equal(model.get_parameter(name), value) for name, value in saved.items())


def test_a_mean_of_checkpoints_and_frozen_parts_are_exported_box_by_box(base: Path, tmp_path: Path) -> None:
    more = ("freeze=[k_proj]", "export.average_checkpoints=2", "checkpoint.keep_last=2")
    run = _train(base, tmp_path, "frozen", *more)
    before, after = _tensors(base), _tensors(run / "export")
    q, k, v = (after["toy.0.qkv"] == before["toy.0.qkv"]).split(H)
    assert k.all()
    assert not q.all()
    assert not v.all()
    steps = [
        {k: v for file in (run / "checkpoints" / step).glob("model-*") for k, v in load_file(file).items()}
        for step in ("step-00000002", "step-00000004")
    ]
    mean = _stored({name: (steps[0][name].double() + steps[1][name]).div(2).float() for name in steps[0]})
    assert torch.equal(after["toy.1.up.1"], mean["toy.1.up.1"])
    assert torch.equal(after["toy.0.taps"], mean["toy.0.taps"])


def test_two_ranks_train_like_one_and_go_on_from_its_checkpoint(
    base: Path, run: Path, tmp_path: Path
) -> None:
    half_way = Path("checkpoints", "step-00000002")
    with Ranks(2) as ranks:
        for name, more in (
            ("whole", []),
            ("of_one", [f"resume={run / half_way}"]),
        ):
            ranks.run(_on_rank, 2, str(base), str(tmp_path), name, *more)
    found = losses(tmp_path / "whole")
    assert found == pytest.approx(losses(run), rel=1e-4)
    # Before the first update the ranks have the same weights and, up to the order of a sum, gradients.
    first, alone = (read_metrics(folder)[0] for folder in (tmp_path / "whole", run))
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert first["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
    assert losses(tmp_path / "of_one") == pytest.approx(losses(run)[2:], rel=1e-4)


def test_a_dry_run_plans_it(base: Path, tmp_path: Path) -> None:
    cfg = load_config(FinetuneConfig, write_config(tmp_path / "c.yaml", base, tmp_path / "run"), [*COMMON])
    with toy():
        facts = models.read_config(base)
    facts = facts.with_layers([0] * 5)
    found, full = (dry_run(cfg, facts, world_size=2, in_full=in_full) for in_full in (False, True))
    assert found.report() == full.report()
    assert found.peaks == full.peaks
    assert found.num_parameters == models.num_parameters(models.build_on_meta(facts))
    assert found.attention_flops == facts.attention_flops([128]) / 128
    assert [each.name for each in found.plan.others][:2] == ["layers.0.taps", "layers.0.up"]
    cut = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, tensor=2))
    with pytest.raises(UserError, match=r"parallel\.tensor: nothing says how ranks cut .* 'toy'"):
        dry_run(cut, facts, world_size=2)


class NoText:
    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


def test_it_generates_and_scores_without_a_cache(run: Path) -> None:
    with toy(), distributed.session("cpu") as world:
        model = load_model(
            str(run / "export"), PrecisionConfig(kind="none"), "float32", world, num_tokens=8
        ).model
        prompts = [[5, 6, 7, 8], [9, 10]]
        answers = [Answer(NoText(), (), (), 5) for _ in prompts]  # type: ignore[arg-type]
        list(decode(model, prompts, answers, Sampler(SamplingConfig(), 0, range(2))))
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = list(prompt)
            for _ in range(5):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            assert answer.ids == ids[len(prompt) :]
        pairs = [Pair(prompt, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
        scored = score(model, pairs, world, batch_size=2, max_length=64)
    assert all(each.is_greedy for each in scored)


def test_a_tensor_that_is_missing_or_of_another_shape_is_named_as_stored(base: Path, tmp_path: Path) -> None:
    tensors = _tensors(base)
    for name, change, message in (
        ("toy.1.up.1", None, r"tensor 'toy\.1\.up\.1' is missing"),
        (
            "toy.0.qkv",
            tensors["toy.0.qkv"][:H].clone(),
            r"'toy\.0\.qkv' has shape \[64, 64\], .* \[192",
        ),
        ("toy.0.extra", torch.zeros(2), r"'toy\.0\.extra' is not part of this model"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((base / "config.json").read_bytes())
        changed = {each: t for each, t in (tensors | {name: change}).items() if t is not None}
        save_file(changed, folder / "model.safetensors")
        with toy(), pytest.raises(UserError, match=message):
            checkpoint.read_base(str(folder), print).build_on_meta()
