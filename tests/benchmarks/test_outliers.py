"""benchmarks/outliers.py: the same bits in high precision, and channels that are as many times as large."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lptune import models


@pytest.mark.parametrize("factor", [32.0, 64.0])
def test_the_function_is_the_same_bit_for_bit_and_every_linear_layer_reads_outliers(
    load: Callable[[str], Any], factor: float
) -> None:
    outliers = load("outliers")
    model = models.build_on_meta(models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test"))
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_value(name, seed=0) * (10.0 if parameter.dim() == 2 else 1.0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    after = outliers.with_outliers(before, len(model.model.layers), 2, factor)
    read: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not name.endswith("o_proj"):
            module.register_forward_hook(
                lambda _, x, __, name=name: read.setdefault(name, []).append(x[0].abs().amax((0, 1)))
            )
    tokens_BS = torch.randint(model.config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    logits = []
    for weights in (before, after):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
            logits.append(model(tokens_BS))
    assert torch.equal(logits[0], logits[1])
    assert len(read) == 6 * len(model.model.layers)
    for was, now in read.values():
        assert (now / was).tolist().count(factor) == 2
        assert int((now == was).sum()) == len(was) - 2
