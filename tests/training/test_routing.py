"""Routing agreement counts the tokens that go to other experts, in the mixture where they do."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from lptune.data.documents import Documents, offsets_of
from lptune.data.packing import one_document_per_row
from lptune.data.rows import EMPTY_ROW, Rows
from lptune.training.routing import Routing
from tests.helpers import hf_types
from tests.helpers.packed import SEQ_LEN, bounds, loaded

NAMES = [f"model.layers.{number}.mlp.experts" for number in range(4)]


@torch.no_grad()
def test_a_router_that_errs_is_named_and_its_tokens_are_counted(tmp_path: Path) -> None:
    """The third router swaps two experts in one pass: the tokens that go to just one of them change."""
    hf_types.causal("qwen3_moe").save_pretrained(tmp_path)
    model = loaded(tmp_path)
    routing = Routing(model)
    tokens_BS = torch.randint(3, 256, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    chosen: list[torch.Tensor] = []
    with routing.of("high"):
        see = lambda _, args: chosen.append(args[1])  # noqa: E731
        hook = model.get_submodule(NAMES[2]).register_forward_pre_hook(see)
        model(tokens_BS, bounds())
        hook.remove()
    gate = model.get_parameter("model.layers.2.mlp.gate.weight")
    gate[[5, 6]] = gate[[6, 5]]
    with routing.of("low"):
        model(tokens_BS, bounds())
    counts = {name: each.tolist() for name, each in routing.counts().items()}
    assert list(counts) == NAMES
    assert counts[NAMES[0]] == counts[NAMES[1]] == [2 * SEQ_LEN, 2 * SEQ_LEN]
    of_both = ((chosen[0] == 5) | (chosen[0] == 6)).sum(-1)
    assert 0 < int((of_both == 1).sum()) == 2 * SEQ_LEN - counts[NAMES[2]][0]


def test_the_order_of_experts_and_a_recomputed_forward_do_not_count(tmp_path: Path) -> None:
    hf_types.causal("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    routing, mixture = Routing(model), model.get_submodule(NAMES[0])
    x_TH, factors_Tk = torch.randn(3, 64), torch.ones(3, 2)
    first = torch.tensor([[0, 1], [2, 3], [4, 5]])
    with torch.no_grad():
        with routing.of("low"):
            mixture(x_TH, first, factors_Tk)
            mixture(x_TH, first + 1, factors_Tk)  # recomputed
        with routing.of("high"):
            mixture(x_TH, torch.tensor([[1, 0], [2, 3], [4, 6]]), factors_Tk)
        mixture(x_TH, first, factors_Tk)  # outside
    assert routing.counts()[NAMES[0]].tolist() == [2, 3]


def test_padding_does_not_count(tmp_path: Path) -> None:
    """Two rows of 4 tokens, of which the second has two of padding, and one of nothing else."""
    lengths = [4, 2]
    documents = Documents(
        tokens_T=np.arange(6, dtype=np.int32) + 5,
        is_target_T=np.ones(6, dtype=bool),
        offsets_N1=offsets_of(lengths),
        answers_N2=np.array([[0, 4], [0, 2]], dtype=np.int32),
        prompt_keys_N=np.array([1, 2], dtype=np.uint64),
    )
    batch = Rows(documents, one_document_per_row(2), seq_len=4, pad_id=0).batch([0, 1, EMPTY_ROW])
    assert batch.is_padding.tolist() == [[False] * 4, [False, False, True, True], [True] * 4]
    hf_types.causal("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    routing, mixture = Routing(model, batch.is_padding), model.get_submodule(NAMES[0])
    x_TH, factors_Tk, chosen_Tk = torch.randn(12, 64), torch.ones(12, 2), torch.tensor([[0, 1]] * 12)
    others_Tk = chosen_Tk.clone()
    others_Tk[[3, 6, 7, 9]] = torch.tensor([2, 3])
    with torch.no_grad():
        for name, experts_Tk in (("low", chosen_Tk), ("high", others_Tk)):
            with routing.of(name):
                mixture(x_TH, experts_Tk, factors_Tk)
    assert routing.counts()[NAMES[0]].tolist() == [5, 6]


def test_a_model_without_mixtures_has_no_counts() -> None:
    routing = Routing(nn.Linear(2, 2))
    for name in ("low", "high"):
        with routing.of(name):
            pass
    assert routing.counts() == {}
