"""`distill`: loss and gradients are those of transformers' models; its runs are as exact as others."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lptune import checkpoint, data, distillation, distributed
from lptune.cli import catalog
from lptune.cli.recipe import load_main
from lptune.config import (
    DataConfig,
    DistillationConfig,
    DistillConfig,
    ModelConfig,
    ParallelConfig,
    TeacherConfig,
)
from tests.helpers import warm
from tests.helpers.cold import Finished
from tests.helpers.tiny_recipe import make_teacher, write_config
from tests.helpers.tiny_run import micro_batch
from tests.recipes.conftest import Run, losses, refusal, weights


@pytest.fixture(scope="module")
def teacher(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_teacher(tiny_checkpoint, tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture
def tiny_config(tiny_checkpoint: Path, teacher: Path, tmp_path: Path) -> Path:
    """The config of `run_recipe` here."""
    run, path = tmp_path / "run", tmp_path / "tiny.yaml"
    return write_config(path, tiny_checkpoint, run, teacher={"path": str(teacher)})


def _rows(model: nn.Module, batch: data.Batch) -> list[tuple[Tensor, Tensor]]:
    """transformers' logits of each document alone, with its labels."""
    found = []
    for b in range(len(batch.tokens_BS)):
        for number in batch.document_BS[b].unique():
            here = batch.document_BS[b] == number
            logits = model(batch.tokens_BS[b, here][None]).logits[0]
            found.append((logits, batch.labels_BS[b, here]))
    return found


@pytest.mark.parametrize(
    "goal",
    [
        DistillationConfig(labels=0.0),
        DistillationConfig(labels=0.3, reverse=0.4, temperature=2.0),
        DistillationConfig(labels=0.5, reverse=1.0),
    ],
    ids=lambda goal: f"labels={goal.labels},reverse={goal.reverse},temperature={goal.temperature}",
)
def test_loss_and_gradients_are_those_of_two_models_of_transformers(
    tiny_checkpoint: Path, teacher: Path, goal: DistillationConfig
) -> None:
    cfg = DistillConfig(
        model=ModelConfig(path=str(tiny_checkpoint)),
        teacher=TeacherConfig(path=str(teacher), precision="none"),
        distillation=goal,
        data=DataConfig(source="builtin", seq_len=32),
        compute_dtype="float32",
        compile="none",
        activation_checkpointing="none",
    )
    batch = micro_batch(0, 0, 0)
    theirs, its = (AutoModelForCausalLM.from_pretrained(each) for each in (tiny_checkpoint, teacher))
    total = torch.zeros(())
    for (logits, labels), (targets, _) in zip(_rows(theirs, batch), _rows(its, batch), strict=True):
        log_q, log_p = (torch.log_softmax(x / goal.temperature, -1) for x in (logits, targets.detach()))
        forward = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        reverse = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
        divergence = (1 - goal.reverse) * forward + goal.reverse * reverse
        nll = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        values = goal.labels * nll + (1 - goal.labels) * goal.temperature**2 * divergence
        total = total + values[labels != -100].sum()
    total.backward()  # type: ignore[no-untyped-call]

    batch_loss = load_main(catalog.find_recipe("distill")).__globals__["batch_loss"]
    with distributed.session("cpu", ParallelConfig()) as world:
        base = checkpoint.read_base(str(tiny_checkpoint), print)
        model = base.build_on_meta()
        distributed.parallelize(model, world, cfg)
        distributed.materialize(model, world, cfg)
        checkpoint.load_hf(model, base.index, world)
        live = distillation.open_teacher(cfg, world)
        live.load()
        assert live.model is not None
        loss = batch_loss(model, live, batch, world)
        loss.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-5)
        wanted = dict(theirs.named_parameters())
        for name, parameter in model.named_parameters():
            grad = distributed.full_tensor(parameter.grad)
            assert (grad - wanted[name].grad).norm() <= 1e-5 * wanted[name].grad.norm(), name
        assert all(parameter.grad is None for parameter in live.model.parameters())
        assert not any(module.training for module in live.model.modules()), "dropout would act"


def test_kinds_gathers_and_ranks_train_alike_and_the_export_loads_in_transformers(
    run_recipe: Run, tmp_path: Path
) -> None:
    common = ("num_steps=4", "optimizer.lr=1e-3")
    int8 = (*common, "precision.kind=int8_rowcol", "precision.all_gather=low", "parallel.tensor=2")
    for name, keys, ranks in (("one", common, 1), ("four", int8, 4)):
        done = run_recipe(*keys, f"output_dir={tmp_path / name}", ranks=ranks, recipe="distill")
        assert name == "one" or "8-bit GEMMs ran in the first step" in done.stdout
        # The teacher: 3 blocks of 7 layers, in each micro-batch, of which a rank has 4 in a step.
        num_gemms = 3 * 7 * 4 // (2 if ranks > 1 else 1)
        assert f"verified: {num_gemms} GEMMs" in done.stdout, done.stdout
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=0.02)
    assert found[0] == pytest.approx(expected[0], rel=2e-3)
    assert found != expected
    export = tmp_path / "four" / "export"
    state = AutoModelForCausalLM.from_pretrained(export).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights(export).items())


def test_a_teacher_that_does_not_fit_is_refused_in_one_line(
    run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path, teacher: Path
) -> None:
    def refused(*keys: str) -> str:
        line = refusal(run_recipe(*keys, "num_steps=2", code=2, recipe="distill"))
        assert not (tmp_path / "run").exists()
        return line

    assert re.search(r"teacher\.path: .*nowhere is not a folder", refused(f"teacher.path={tmp_path}/nowhere"))
    padded = make_teacher(tiny_checkpoint, tmp_path / "padded", vocab_size=640)
    assert "has vocab_size 640 in config.json" in refused(f"teacher.path={padded}")
    other = make_teacher(tiny_checkpoint, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[100:102]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert re.search(
        r"other has another tokenizer than .*: token .* has the id", refused(f"teacher.path={other}")
    )
    assert "distillation.labels: must be at least 0 and below 1" in refused("distillation.labels=1")
    inside = shutil.copytree(teacher, tmp_path / "runs" / "export")
    line = refused(f"output_dir={inside.parent}", f"teacher.path={inside}")
    assert "would overwrite the model in teacher.path" in line


def test_another_teacher_does_not_continue_a_run(
    run_recipe: Run, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    run_recipe("num_steps=2", recipe="distill")
    other = make_teacher(tiny_checkpoint, tmp_path / "other", intermediate_size=128)
    done = run_recipe("num_steps=4", f"teacher.path={other}", code=2, recipe="distill")
    assert "was saved with the teacher's weights" in refusal(done)


def test_a_plan_counts_the_teacher(tiny_config: Path, teacher: Path, tmp_path: Path) -> None:
    def run(*keys: str) -> Finished:
        return warm.lptune(["plan", "distill", "--config", str(tiny_config), *keys], folder=tmp_path)

    def planned(*keys: str) -> float:
        done = run(*keys)
        assert done.returncode == 0, done.stderr
        (line,) = re.findall(r"^teacher +([\d.]+)", done.stdout, flags=re.MULTILINE)
        return float(line) * 2**20

    shapes = [tensor.shape for name, tensor in weights(teacher).items() if name.endswith("_proj.weight")]
    saved = planned("teacher.precision=none") - planned("teacher.precision=int8_weight_only")
    # Of four bytes one is left, and each row has a float32 scale. The table has two digits.
    expected = sum(3 * rows * columns - 4 * rows for rows, columns in shapes)
    assert saved == pytest.approx(expected, abs=0.01 * 2**20)

    nowhere = "teacher.path=nowhere"
    presets = ("--preset", "qwen3/tiny", "--teacher-preset", "qwen3/tiny", "model.path=x")
    assert planned(nowhere, *presets) > 0
    assert (
        "teacher.path: has vocab_size 128256, the model that is trained"
        in run("--teacher-preset", "llama3_1/8b").stderr
    )
    assert "name the model with --teacher-preset FAMILY/SIZE" in run(nowhere).stderr
    assert "--teacher-preset: no such family and size: llama9" in run("--teacher-preset", "llama9").stderr
