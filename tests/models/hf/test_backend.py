"""model.backend: a family of lptune's own by its modules and by transformers', from the same folder."""

from pathlib import Path

import pytest
import torch

from lptune import checkpoint, distributed, models
from lptune.base.errors import UserError
from lptune.cli import preflight
from lptune.config import FinetuneConfig, load_config
from lptune.distributed import Execution
from tests.helpers import hf_types, packed
from tests.helpers.tiny_recipe import write_config

NUM_STEPS = 5


def _losses(folder: Path, backend: str) -> tuple[type[models.Backbone], torch.Tensor]:
    """Of steps of plain gradient descent on the same packed rows, in float32, for each target."""
    base = checkpoint.read_base(str(folder), print, backend=backend)
    how = Execution(compile="none", compute_dtype="float32")
    found = []
    tokens_BS = torch.randint(3, 256, (2, packed.SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with distributed.session("cpu") as world:
        model = base.build_on_meta()
        distributed.parallelize(model, world, how)
        distributed.materialize(model, world, how)
        checkpoint.load_hf(model, base.index)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(NUM_STEPS):
            loss = model(tokens_BS, packed.bounds(), tokens_BS) / tokens_BS.numel()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    return type(model), torch.stack(found)


def test_both_backends_train_with_the_same_losses(tmp_path: Path) -> None:
    hf_types.causal("llama").save_pretrained(tmp_path)
    native, expected = _losses(tmp_path, "auto")
    other, found = _losses(tmp_path, "transformers")
    assert native is models.Decoder
    assert not issubclass(other, models.Decoder)
    assert expected[-1] < expected[0]
    # A logit is 64 products of values that 4 blocks of up to 128 products made, in float32 (2^-24 each), and
    # errors of products in another order add up as a random walk: sqrt(4 * 128 + 64) * 2^-24 = 1.4e-6. A step
    # of gradient descent adds its own, at most as large again here.
    assert float(((found - expected) / expected).abs().max()) < NUM_STEPS * 1.4e-6


def test_a_backend_that_has_no_such_model_is_refused_in_one_line(tmp_path: Path) -> None:
    hf_types.causal("qwen3_moe").save_pretrained(tmp_path)
    config = write_config(tmp_path / "c.yaml", tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match="'qwen3_moe'"):
        preflight.check_models(load_config(FinetuneConfig, config, ["model.backend=native"]))
    preflight.check_models(load_config(FinetuneConfig, config, ["model.backend=transformers"]))
    with pytest.raises(UserError, match=r"compile: .*compile=block"):
        preflight.check_models(load_config(FinetuneConfig, config, ["compile=model"]))
    with pytest.raises(UserError, match=r"model\.backend"):
        load_config(FinetuneConfig, config, ["model.backend=torch"])
