"""convert() on somebody else's model, in somebody else's loop."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lptune import linear, models, training
from lptune.config import OptimizerConfig, PrecisionConfig

ON_A_CPU: dict[str, Any] = {
    "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Arguments of transformers' and TRL's trainers."""


def _tiny() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    preset = copy.deepcopy(models.PRESETS["llama3_1"]["tiny"])
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**preset))


@pytest.mark.parametrize("kind", ["int8_rowcol", "int8_weight_only"])
def test_a_transformers_model_trains_in_int8_in_transformers_trainer(kind: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = _tiny()
    plan = linear.convert(model, PrecisionConfig(kind=kind))
    stored_in_int8 = kind == "int8_weight_only"
    optimizer = training.build_optimizer(model, OptimizerConfig(lr=3e-3)) if stored_in_int8 else None
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (4, 32))]
    num_steps = 15
    keys = {"max_steps": num_steps, "learning_rate": 3e-3, "lr_scheduler_type": "constant", "bf16": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, **keys, **ON_A_CPU)
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
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, 256)}}, unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    losses = {}
    for kind in ("none", "int8_rowcol"):
        model = _tiny()
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
            **ON_A_CPU,
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
    model = _tiny()
    plan = linear.convert(model, "int8_rowcol")
    planted = model.model.layers[0].mlp.up_proj
    planted.forward = lambda x: torch.nn.functional.linear(x, planted.weight)
    return model, plan


def _callback(model: Any, plan: linear.Plan) -> Any:
    """The one of docs/library.md."""
    import transformers

    page = (Path(__file__).parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
    (block,) = [each for each in page.split("```python") if "(TrainerCallback)" in each]
    names = {"TrainerCallback": transformers.TrainerCallback, "linear": linear}
    exec(block[block.index("class VerifyFirstStep") : block.index("\nplan = ")], names)
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
        **ON_A_CPU,
    )
    callbacks = [_callback(model, plan)] if with_callback else []
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    with pytest.raises(
        linear.PrecisionNotAppliedError,
        match=r"layers\.0\.mlp\.up_proj: output was to run (. times )?in low precision, ran 0 times",
    ) as raised:
        trainer.train()
    assert ("before the first optimizer step" in str(raised.value)) != with_callback


MIXTURES = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "jetmoe": {"num_local_experts": 8, "kv_channels": 16, "num_key_value_heads": 2},
}


def _mixture(family: str, **more: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    content = sizes | heads | MIXTURES[family] | {"num_experts_per_tok": 2} | more
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **content))


@pytest.mark.parametrize("family", MIXTURES)
def test_the_plan_lists_the_experts_of_a_mixture_that_stay_high(family: str) -> None:
    model = _mixture(family)
    plan = linear.convert(model, "int8_rowcol")
    listed = {layer.name + ".weight" for layer in plan.layers} | {other.name for other in plan.others}
    multiplied = {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and "embed" not in name and not name.endswith("bias")
    }
    assert listed == multiplied
    experts = [other for other in plan.others if len(other.shape) == 3]
    assert experts
    for other in experts:
        assert other.num_used == math.prod(other.shape) * 2 // 8  # of eight experts a token goes to two
        assert type(model.get_submodule(other.name.rpartition(".")[0])).__name__ in str(other.reason)
    said, table = plan.summary(), plan.table()
    assert "% of the weights are in no linear layer" in said
    assert experts[0].name.replace(".0.", ".0-1.", 1) in said
    assert all(" x ".join(map(str, other.shape)) in table for other in experts)


def test_the_plans_flops_of_a_mixture_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = _mixture("qwen3_moe", attn_implementation="sdpa", experts_implementation="eager")
    plan = linear.convert(model, "none")
    num_tokens = 24
    tokens = torch.randint(0, 128, (1, num_tokens))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    attention = sum(flops for op, flops in counts.items() if "attention" in str(op))
    assert counter.get_total_flops() - attention == plan.flops_per_token * num_tokens
    assert not any(other.reason for other in plan.others)


def test_what_is_only_added_or_looked_up_is_no_weight_of_a_product() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(1, 8, 64))
            self.words = nn.Embedding(32, 64)
            self.conv = nn.Conv1d(64, 64, 3)
            self.mix = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
            self.experts = nn.Parameter(torch.zeros(4, 64, 64))
            self.again = self.experts
            self.linear = nn.Linear(64, 64)

    plan = linear.convert(Model(), "int8_rowcol")
    uses = {other.name: other.flops_per_token for other in plan.others}
    # Without a config, all experts count; a frozen weight has no grad_weight.
    assert uses == {"mix": 4.0 * 64 * 64, "experts": 6.0 * 4 * 64 * 64, "conv.weight": 6.0 * 64 * 64 * 3}
    assert [other["shape"] for other in plan.to_json()["others"]][1] == [4, 64, 64]


def test_the_low_precision_share_of_a_mixture_counts_its_experts() -> None:
    model = _mixture("qwen3_moe", experts_implementation="eager")
    plan = linear.convert(model, "int8_rowcol")
    tokens = torch.randint(0, 128, (1, 24))
    with linear.verify_step(model, plan, num_passes=1) as verified:
        model(input_ids=tokens, labels=tokens).loss.backward()
    low = sum(layer.in_features * layer.out_features for layer in plan.converted)
    fraction = 2.0 * 3 * low / plan.flops_per_token
    assert verified.low_precision_flops_fraction == pytest.approx(fraction)
    assert fraction < 0.5  # of the linear layers alone it is 0.83
