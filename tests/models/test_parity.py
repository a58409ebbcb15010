"""Our decoder computes what transformers computes, for every family and feature, on random checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lptune.models import build_on_meta, read_config
from tests.helpers.models_oracle import (
    CHECKPOINTS,
    Twins,
    packed,
    random_labels,
    random_tokens,
    summed_loss,
    twins,
)

SEQ_LEN = 48  # longer than every window (16) and every original length (32) of the tiny presets


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest) -> Iterator[Twins]:
    return twins(CHECKPOINTS[request.param])


def test_logits_equal_transformers(pair: Twins) -> None:
    for seq_len in (24, SEQ_LEN):  # both sides of the original length of longrope
        tokens_BS = random_tokens(2, seq_len)
        theirs = pair.theirs(tokens_BS).logits
        assert theirs.std() > 0.05  # else 1e-4 would say nothing
        torch.testing.assert_close(pair.ours(tokens_BS), theirs, rtol=0, atol=1e-4)


def test_every_gradient_equals_transformers(pair: Twins) -> None:
    tokens_BS = random_tokens(2, SEQ_LEN)
    labels_BS = random_labels(tokens_BS)
    ours_loss = pair.ours(tokens_BS, None, labels_BS)
    theirs_loss = summed_loss(pair.theirs(tokens_BS).logits, labels_BS)
    torch.testing.assert_close(ours_loss, theirs_loss, rtol=1e-5, atol=0)

    pair.ours.zero_grad()
    pair.theirs.zero_grad()
    ours_loss.backward()
    theirs_loss.backward()
    theirs = {name: parameter.grad for name, parameter in pair.theirs.named_parameters()}
    total = torch.stack([grad.norm() for grad in theirs.values()]).norm()
    for name, parameter in pair.ours.named_parameters():
        error = (parameter.grad - theirs.pop(name)).norm()
        # The gradient of a key bias without positions is zero, and rounding noise here: hence the floor.
        assert error <= 1e-3 * parameter.grad.norm() + 1e-6 * total, name
    assert not theirs


def test_packed_documents_equal_the_same_documents_alone(pair: Twins) -> None:
    lengths = [[20, 5, 23], [48], [1, 47], [16, 16, 16]]
    tokens_BS = random_tokens(len(lengths), SEQ_LEN)
    logits_BSV = pair.ours(tokens_BS, packed(lengths))
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            document = slice(start, start + length)
            alone = pair.ours(tokens_BS[row : row + 1, document])
            torch.testing.assert_close(logits_BSV[row, document], alone[0], rtol=0, atol=1e-5)
            start += length


def test_state_dict_has_the_names_and_shapes_of_transformers(pair: Twins) -> None:
    ours = {name: value.shape for name, value in pair.ours.state_dict().items()}
    theirs = {name: value.shape for name, value in pair.theirs.state_dict().items()}
    assert ours == theirs
    assert {name for name, _ in pair.ours.named_parameters()} == {
        name for name, _ in pair.theirs.named_parameters()
    }


@pytest.mark.parametrize("name", ["story_llama", "tiny_llama3", "tiny_qwen3"])
def test_real_checkpoints_give_the_logits_of_transformers(assets: Path, name: str) -> None:
    folder = assets / "models" / name
    weights = {key: value.float() for key, value in load_file(folder / "model.safetensors").items()}
    weights.setdefault("model.embed_tokens.weight", weights["lm_head.weight"])
    ours = build_on_meta(read_config(folder))
    ours.to_empty(device="cpu")
    ours.load_state_dict(weights)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), attn_implementation="eager"
    ).float()
    theirs.load_state_dict(weights)
    tokens_BS = random_tokens(2, 64)
    torch.testing.assert_close(ours(tokens_BS), theirs(tokens_BS).logits, rtol=0, atol=1e-4)
