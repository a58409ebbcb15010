"""The comparison of training steps on a tiny model: who is in its table, and what it refuses to compare."""

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lptune import models
from tests.helpers import cold

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"layers": 1, "hidden": 64, "heads": 4, "kv-heads": 2, "mlp": 176, "vocab": 131}
ROWS = {"batch": 2, "seq-len": 64}
TINY = [f"--{name}={size}" for name, size in {**SIZES, **ROWS}.items()]


@pytest.fixture
def script(load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["step.py", *TINY])
    return load("step")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("step") / "step.json"
    arguments = [str(BENCHMARKS / "step.py"), *TINY, "--rounds=2", "--no-torchtune", f"--json={path}"]
    # Eager: what is asked of the table and of the losses does not depend on the compiler.
    done = cold.run(*arguments, "--profile=none", TORCHDYNAMO_DISABLE="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_variant_is_in_the_table_and_in_the_file_or_told_why_not(
    run: tuple[str, dict[str, Any]], script: ModuleType
) -> None:
    printed, content = run
    rows = {row["variant"]: row for row in content["rows"]}
    names = {name for name in script.all_names() if not name.startswith("torchtune")}
    assert {"none", "int8_rowcol", "int8_tensorwise", "int8_weight_only"} <= names
    assert rows.keys() | content["not_here"].keys() == names
    assert content["complete"]
    # Only another library may be missing.
    assert all(name.startswith(("torchao-", "transformers")) for name in content["not_here"])
    if importlib.util.find_spec("transformers"):
        assert {"transformers", "transformers-compiled"} <= rows.keys()
    table = printed.partition("\nvariant")[2]
    for name, row in rows.items():
        assert f"\n{name} " in table
        numbers = [row["median_s"], row["tokens_per_s"], row["first_loss"], row["first_grad_norm"]]
        numbers += [*row["times_s"], *row["to_none"].values()]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert len(row["times_s"]) == 2
        assert row["tokens_per_s"] == pytest.approx(2 * 64 / row["median_s"])
    for name, reason in content["not_here"].items():
        assert f"{name}: " in printed
        assert reason


def test_the_check_of_the_first_step_notices_a_missing_mask(script: ModuleType, capsys: Any) -> None:
    variants: Any = sys.modules["step_variants"]
    config = script.config_of(script.parse())
    model = models.build_on_meta(models.config_from_dict(config)).to_empty(device="cpu")
    model.init_weights(0)
    model.reset_buffers()
    rows = variants.Packed.random(2, 64, config["vocab_size"], 0)

    def step(bounds: models.DocumentBounds | None) -> Any:
        model.zero_grad()
        loss = model(rows.tokens_BS, bounds, rows.labels_BS) / rows.num_targets
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return variants.Step(1.0, loss.item(), torch.nn.utils.get_total_norm(grads).item())

    masked, unmasked = step(rows.bounds), step(None)
    model.to(torch.bfloat16).reset_buffers()
    in_bf16 = step(rows.bounds)
    assert script.check({"none": masked, "transformers": in_bf16}, config, rows.num_targets)
    assert not script.check({"none": masked, "transformers": unmasked}, config, rows.num_targets)
    assert "NOT THE SAME COMPUTATION" in capsys.readouterr().out


def test_packed_rows_hold_whole_documents_one_after_the_other(script: ModuleType) -> None:
    rows = sys.modules["step_variants"].Packed.random(3, 50, 97, seed=1)
    starts = rows.bounds.offsets[:-1].long()
    positions, index = rows.bounds.positions_BS.flatten(), rows.bounds.index_BS.flatten()
    assert (positions[starts] == 0).all()
    assert int((positions == 0).sum()) == len(starts)
    ends = torch.cat([starts[1:], torch.tensor([150])]) - 1
    assert (rows.labels_BS.flatten()[ends] == -100).all()
    assert rows.num_targets == 150 - len(starts)
    inside = torch.ones(150, dtype=torch.bool)
    inside[ends] = False
    places = inside.nonzero()[:, 0]
    assert torch.equal(rows.labels_BS.flatten()[places], rows.tokens_BS.flatten()[places + 1])
    assert (index[places] == index[places + 1]).all()
    assert all(3 <= int(row.max()) + 1 <= 6 for row in rows.bounds.index_BS)
