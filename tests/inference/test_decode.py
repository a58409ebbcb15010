"""Greedy answers equal those of transformers' generate, alone and in batches."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from lptune import data, linear, training
from lptune.config import PRECISION_KINDS, PrecisionConfig, SamplingConfig
from lptune.distributed import World
from lptune.inference import Answer, Sampler, decode, load_model
from lptune.kernels import record_gemms
from lptune.models import PRESETS, Decoder
from tests.helpers.models_oracle import CHECKPOINTS, Twins, random_tokens, twins
from tests.helpers.slow import slow_but

NEW_TOKENS = 30


# Of every family a forward has the logits of transformers (models/test_parity.py), and the cache those of a
# forward (models/test_cache.py). Here stand one whose rows outgrow a cache, and one for each kind of layers.
KEPT = ("llama-longrope", "llama3_2-tiny", "gemma3-tiny", "exaone4-tiny", "phi4-tiny")


@pytest.fixture(
    scope="module",
    params=slow_but(lambda name: name in KEPT, [f"{family}-tiny" for family in PRESETS] + ["llama-longrope"]),
)
def pair(request: pytest.FixtureRequest) -> Twins:
    return twins(CHECKPOINTS[request.param])


class NoText:
    """A tokenizer for answers of which only the ids count."""

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


def greedy_ids(
    model: Decoder, prompts: Sequence[Sequence[int]], num: int = NEW_TOKENS, penalty: float = 1.0
) -> list[list[int]]:
    answers = [Answer(NoText(), (), (), num) for _ in prompts]  # type: ignore[arg-type]
    cfg = SamplingConfig(repetition_penalty=penalty)
    list(decode(model, prompts, answers, Sampler(cfg, 0, range(len(prompts)))))
    return [answer.ids for answer in answers]


def their_ids(
    model: nn.Module, prompt: Sequence[int], num: int = NEW_TOKENS, penalty: float = 1.0
) -> list[int]:
    # With longrope, transformers' Llama goes on with keys of the old rotation; its Phi-3 does not.
    uses_cache = model.config.model_type != "llama" or "longrope" not in str(model.config)
    config = transformers.GenerationConfig(
        max_new_tokens=num, do_sample=False, pad_token_id=0, use_cache=uses_cache, repetition_penalty=penalty
    )
    model.generation_config = config
    tokens = torch.tensor([list(prompt)])
    found = model.eval().generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    return list(found[0, len(prompt) :].tolist())


def test_greedy_answers_equal_transformers_in_batches_and_one_by_one(pair: Twins) -> None:
    """Rows of 50, 35 and 39 tokens pass the windows (16), and longrope's original length (32) in turn."""
    tokens_BS = random_tokens(3, 20).tolist()
    prompts = [tokens_BS[0], tokens_BS[1][:5], tokens_BS[2][:9]]
    together = greedy_ids(pair.ours, prompts)
    assert together == [greedy_ids(pair.ours, [prompt])[0] for prompt in prompts]
    assert together == [their_ids(pair.theirs, prompt) for prompt in prompts]
    assert len({token for ids in together for token in ids}) > 2, "one token again and again shows little"


def test_a_trained_model_writes_the_text_of_transformers(assets: Path, world: World) -> None:
    folder = assets / "models" / "story_llama"
    loaded = load_model(str(folder), PrecisionConfig(), "float32", world, num_tokens=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = ["Once upon a time", "The little dog was", "Tom and Lily went to the park"]
    ids = [loaded.tokenizer.encode(prompt) for prompt in prompts]
    answers = [Answer(loaded.tokenizer, data.end_ids(loaded.tokenizer), (), 100) for _ in ids]
    list(decode(loaded.model, ids, answers, Sampler(SamplingConfig(), 0, range(3))))
    for prompt, answer in zip(prompts, answers, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        found = theirs.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=100,
                                do_sample=False)[0, inputs.input_ids.shape[1] :]  # fmt: skip
        assert answer.text == tokenizer.decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("kind", [kind for kind in PRECISION_KINDS if kind != "none"])
def test_every_kind_decodes_in_8_bits_what_it_writes_without_a_cache(world: World, kind: str) -> None:
    model = twins(CHECKPOINTS["llama3_2-tiny"]).ours.requires_grad_(False)
    precision = PrecisionConfig(kind=kind, emulate=not kind.startswith("int8"))
    plan = linear.convert(model, precision, device=world.device)
    low = linear.LowPrecision(model, plan, world=world, verify=False)
    prompts = [row[:n] for row, n in zip(random_tokens(2, 12).tolist(), (12, 12), strict=True)]
    with record_gemms() as record:
        found = greedy_ids(model, prompts, 8)
    assert {len(ids) for ids in found} == {8}
    assert record, low
    # With a scale for all tokens of a forward, as nvfp4 has beside those of blocks, others would be written.
    if plan.converted[0].spec and not plan.converted[0].spec.kind.one_scale and kind != "nvfp4":
        assert found == training.greedy(model, prompts, max_new_tokens=8, stop_ids=(), pad_id=0)
