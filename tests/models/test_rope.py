"""Rotary positions: frequencies equal transformers', and longrope chooses its factors per document."""

import copy

import pytest
import torch
import transformers

from lptune.models import DocumentBounds, config_from_dict
from lptune.models.rope import RopeTable, apply_rope, inverse_frequencies
from tests.helpers.models_oracle import CHECKPOINTS, packed, random_tokens, twins

FLAT = [name for name in CHECKPOINTS if not name.startswith(("gemma3", "olmo3"))]


@pytest.mark.parametrize("name", FLAT)
def test_frequencies_and_attention_factor_equal_transformers(name: str) -> None:
    content = copy.deepcopy(CHECKPOINTS[name])
    config = transformers.AutoConfig.for_model(**content)
    theirs = getattr(transformers.AutoModelForCausalLM.from_config(config), "model").rotary_emb  # noqa: B009
    (rope,) = config_from_dict(CHECKPOINTS[name]).rope_kinds
    # One rounding apart at most: transformers and we may divide in a different order.
    torch.testing.assert_close(inverse_frequencies(rope), theirs.inv_freq, rtol=2**-22, atol=0)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_published_llama_3_2_frequencies_equal_transformers() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    content = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling}
    content |= {"max_position_embeddings": 131072}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](transformers.AutoConfig.for_model(**copy.deepcopy(content)))
    (rope,) = config_from_dict(content).rope_kinds
    torch.testing.assert_close(inverse_frequencies(rope), theirs, rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", ["phi4-tiny", "llama-longrope"])
def test_longrope_in_a_packed_row_chooses_factors_for_each_document(name: str) -> None:
    ours, theirs = twins(CHECKPOINTS[name])
    tokens_BS = random_tokens(2, 60)
    lengths = [[40, 20], [32, 28]]  # the original length is 32: 40 is long, 32 is not yet
    logits_BSV = ours(tokens_BS, packed(lengths))
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            document = slice(start, start + length)
            alone = theirs(tokens_BS[row : row + 1, document]).logits[0]
            torch.testing.assert_close(logits_BSV[row, document], alone, rtol=0, atol=1e-4)
            start += length


@pytest.mark.parametrize("seq_len", [31, 32, 33])
def test_longrope_switches_where_transformers_does(seq_len: int) -> None:
    ours, theirs = twins(CHECKPOINTS["phi4-tiny"])
    tokens_BS = random_tokens(1, seq_len)
    expected = theirs(tokens_BS).logits
    torch.testing.assert_close(ours(tokens_BS), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        ours(tokens_BS, DocumentBounds.single(1, seq_len)), expected, rtol=0, atol=1e-4
    )


def test_tables_are_float32_and_survive_casts_and_moves() -> None:
    (rope,) = config_from_dict(CHECKPOINTS["phi4-tiny"]).rope_kinds
    expected, expected_long = inverse_frequencies(rope), inverse_frequencies(rope, long=True)
    with torch.device("meta"):
        table = RopeTable(rope)
    assert table.inv_freq_F.is_meta
    table.to_empty(device="cpu")
    for moved in (table, table.to(torch.bfloat16), table.half()):
        assert torch.equal(moved.inv_freq_F, expected)
        assert torch.equal(moved.long_inv_freq_F, expected_long)
    assert not table.state_dict()


def test_rotation_happens_in_float32_and_keeps_the_dtype() -> None:
    (rope,) = config_from_dict(CHECKPOINTS["llama3_2-tiny"]).rope_kinds
    rotation = RopeTable(rope)(None, 512)
    x_BSND = torch.randn(1, 512, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out_BSND = apply_rope(x_BSND, rotation)
    assert out_BSND.dtype is torch.bfloat16
    # one rounding to bf16, none before it
    exact_BSND = apply_rope(x_BSND.double(), rotation)
    assert ((out_BSND - exact_BSND).abs() <= exact_BSND.abs() * 2**-8 + 1e-6).all()
