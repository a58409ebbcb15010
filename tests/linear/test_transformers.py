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


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about defaults of TRL
def test_a_model_trains_in_int8_in_trls_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, 256)}}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    losses = {}
    for kind in ("none", "int8_rowcol"):
        torch.manual_seed(0)
        preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"])
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**preset))
        plan = linear.convert(model, kind)
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=5,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        rows = torch.randint(1, 256, (8, 16), generator=torch.Generator().manual_seed(0)).tolist()
        callback = _callback(model, plan)
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        trainer.train()
        assert callback.first_step.verified.num_gemms == 2 * 3 * len(plan.converted)
        losses[kind] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses["none"][-1] < 0.9 * losses["none"][0]
    assert losses["int8_rowcol"] == pytest.approx(losses["none"], rel=0.02)
    assert losses["int8_rowcol"] != losses["none"]


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
