"""Compiled blocks: with recurrent mixers what is around a mixer is compiled, the mixer is not; with keys that
blocks leave for later ones, whole blocks are.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lptune import distributed, linear, models
from lptune.base.errors import UserError
from lptune.distributed import Execution
from tests.helpers import hf_types, packed
from tests.helpers.slow import slow_but

LAYOUTS = (packed.LENGTHS, ((10, 21, 17), (8, 40)), ((20, 28), (7, 41)), ((6,) * 8, (12,) * 4))
"""Lengths of the documents of two rows: other numbers of them, and another longest one."""


def _gradients(
    folder: Path, mode: str, recomputed: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Tensor]], Sequence[int]]:
    """The loss and the gradients of each layout, and how many graphs there were after each."""
    model = packed.loaded(folder)
    linear.convert(model, "int8_rowcol")
    found, num_graphs = [], []
    tokens_BS = torch.randint(3, 256, (2, packed.SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with distributed.session("cpu") as world:
        how = Execution(compile=mode, compute_dtype="float32", activation_checkpointing=recomputed)
        distributed.parallelize(model, world, how)
        for lengths in LAYOUTS:
            monkeypatch.setattr(packed, "LENGTHS", lengths)
            loss = model(tokens_BS, packed.bounds(), tokens_BS)
            loss.backward()
            gradients = {name: each.grad for name, each in model.named_parameters()}
            found.append({"loss": loss.detach(), **gradients})
            num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
            model.zero_grad()
    return found, num_graphs


def test_experts_in_float32_are_refused_where_torch_cannot_compile_them(tmp_path: Path) -> None:
    hf_types.causal("qwen3_moe").save_pretrained(tmp_path)
    how = Execution(compile="block", compute_dtype="float32")
    with distributed.session("cpu") as world:
        distributed.parallelize(_converted(packed.loaded(tmp_path)), world, how)
        with pytest.raises(UserError, match=r"compile: .*compute_dtype=bfloat16"):
            distributed.parallelize(packed.loaded(tmp_path), world, how)


def _converted(model: models.Backbone) -> models.Backbone:
    linear.convert(model, "int8_rowcol")
    return model


_FEW = {"lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}}


@pytest.mark.parametrize(
    ("kind", "recomputed"),
    slow_but(
        lambda *case: case == ("lfm2", "none"), [("lfm2", "none"), ("lfm2", "full"), ("gemma4_text", "full")]
    ),
)
def test_blocks_compile_once_for_documents_of_all_lengths(
    kind: str, recomputed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_types.causal(kind, **_FEW.get(kind, {})).save_pretrained(tmp_path)
    expected, _ = _gradients(tmp_path, "none", recomputed, monkeypatch)
    compiled = torch.compile  # by a backend that writes no C++; what is compiled, and when, is the same
    monkeypatch.setattr(torch, "compile", lambda *args, **keys: compiled(*args, **keys, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, num_graphs = _gradients(tmp_path, "block", recomputed, monkeypatch)
    assert num_graphs[0] >= 3  # before and after the mixer, and the block of attention; four blocks
    assert len(set(num_graphs)) == 1
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:  # float32 in the same order, but for what the compiler decomposes
            assert float((one[name] - other[name]).norm()) <= 1e-6 * float(other[name].norm()), name
