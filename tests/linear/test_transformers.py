"""convert() on somebody else's model, in somebody else's loop."""

import copy
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from lptune import linear, models, training
from lptune.config import OptimizerConfig, PrecisionConfig


@pytest.mark.parametrize("family", ["llama3_1", "qwen3"])
def test_a_transformers_model_trains_in_int8_in_a_plain_loop(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    preset = copy.deepcopy(models.PRESETS[family]["tiny"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**preset), dtype=torch.bfloat16).train()
    names = list(model.state_dict())
    plan = linear.convert(model, PrecisionConfig(kind="int8_rowcol"))
    assert len(plan.converted) == len(plan.layers) - 1  # all but the head
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, preset["vocab_size"], (4, 32))
    first_step = linear.FirstStep(model, plan, enabled=True, report=lambda line: None)
    losses = []
    for _ in range(15):
        with first_step(num_passes=1):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert first_step.verified.num_gemms == 3 * len(plan.converted)
    assert losses[-1] < 0.8 * losses[0]
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama3_1", "int8_rowcol"), ("qwen3", "int8_rowcol"), ("llama3_1", "int8_weight_only")],
)
def test_a_transformers_model_trains_in_int8_in_transformers_trainer(
    family: str, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    preset = copy.deepcopy(models.PRESETS[family]["tiny"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**preset))
    plan = linear.convert(model, PrecisionConfig(kind=kind))
    stored_in_int8 = kind == "int8_weight_only"
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=3e-3)) if stored_in_int8 else None
    tokens = torch.randint(0, preset["vocab_size"], (4, 32))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    num_steps = 15
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=num_steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
    with linear.verify_step(model, plan, num_steps) as verified:
        trainer.train()
    gemms = 2 if stored_in_int8 else 3
    assert verified.num_gemms == gemms * len(plan.converted) * num_steps
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == num_steps
    assert losses[-1] < 0.8 * losses[0]


def _broken_model() -> tuple[Any, linear.Plan]:
    """A converted model of which one layer falls back to compute dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**preset))
    plan = linear.convert(model, "int8_rowcol")
    planted = model.model.layers[0].mlp.up_proj
    planted.forward = lambda x: torch.nn.functional.linear(x, planted.weight)
    return model, plan


def _callback(model: Any, plan: linear.Plan) -> Any:
    """The one of docs/linear.md."""
    import transformers

    page = (Path(__file__).parents[2] / "docs" / "linear.md").read_text(encoding="utf-8")
    (block,) = [each for each in page.split("```python") if "(TrainerCallback)" in each]
    names = {"TrainerCallback": transformers.TrainerCallback, "linear": linear}
    exec(textwrap.dedent(block.partition("```")[0]), names)
    made: Any = names["VerifyFirstStep"]
    return made(model, plan)


@pytest.mark.parametrize("with_callback", [False, True])
def test_a_fall_back_under_transformers_trainer_is_named(with_callback: bool, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, plan = _broken_model()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (8, 16))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=1,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    callbacks = [_callback(model, plan)] if with_callback else []
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    with pytest.raises(
        linear.PrecisionNotAppliedError,
        match=r"layers\.0\.mlp\.up_proj: output was to run (. times )?in low precision, ran 0 times",
    ) as raised:
        trainer.train()
    assert ("before the first optimizer step" in str(raised.value)) != with_callback
