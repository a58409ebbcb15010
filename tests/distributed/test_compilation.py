"""torch.compile in a run: how long it takes is measured, and a later process finds what was compiled."""

import json
from pathlib import Path

import pytest
import torch

from lptune import distributed
from lptune.distributed import CompileWatch
from lptune.distributed.compilation import set_options
from lptune.linear import GatheredWeight
from lptune.linear.weights.row_tensor import RowTensor
from tests.helpers import cold
from tests.helpers.tiny_recipe import make_checkpoint, write_config

FORCED = "TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD"

# `lptune`, and then what torch has counted.
COUNTS = """
import atexit, json, sys

@atexit.register
def show():
    from torch._dynamo.utils import counters
    print(json.dumps(counters["aot_autograd"] | counters["inductor"]), file=sys.stderr)

from lptune.cli.main import main
main()
"""


@pytest.mark.slow
def test_a_second_run_finds_all_that_the_first_compiled_and_gets_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (FORCED, "TORCH_COMPILE_CACHE_KEY_TAG"):  # set for the suite, not for users
        monkeypatch.delenv(name, raising=False)
    model = make_checkpoint(tmp_path / "tiny")
    found, counts, records = [], [], []
    # Selective checkpointing and a low-precision kind: torch by itself keeps graphs of neither.
    job = ["compile=block", "precision.kind=int8_rowcol", "activation_checkpointing=selective"]
    job += ["num_steps=2", "num_samples=0", "data.eval_fraction=0", "export.enabled=false"]
    for name, hash_seed in (("first", "1"), ("second", "2")):
        config = write_config(tmp_path / f"{name}.yaml", model, tmp_path / name)
        done = cold.run(
            "-c", COUNTS, "run", "full_finetune", "--config", str(config), *job, folder=tmp_path,
            TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"), PYTHONHASHSEED=hash_seed,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said, *others = done.stderr.splitlines()[::-1]
        assert not others, "nothing else is printed, no warning of torch"
        counts.append(json.loads(said))
        (line,) = (line for line in done.stdout.splitlines() if "graphs from the cache" in line)
        found.append(line.partition(" s, ")[2])
        rows = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records.append([json.loads(row) for row in rows])
    # A block and the head with the loss, forward and backward of each.
    assert found == ["0 of 4 graphs from the cache", "4 of 4 graphs from the cache"]
    for what, numbers in {
        "autograd_cache_miss": (2, 0),
        "autograd_cache_hit": (0, 2),
        "autograd_cache_bypass": (0, 0),
        "fxgraph_cache_bypass": (0, 0),
    }.items():
        assert tuple(each.get(what, 0) for each in counts) == numbers, what
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in records[0]] == [row[key] for row in records[1]]
    for rows in records:
        assert rows[0]["compile_time_s"] > 10 * rows[1]["step_time_s"]
        assert rows[1]["compile_time_s"] == 0.0
        for row in rows:
            assert row["tokens_per_s"] == pytest.approx(8 * 128 / row["step_time_s"])


def test_the_time_of_compilation_is_measured_until_the_watch_is_closed() -> None:
    torch._dynamo.reset()
    watch = CompileWatch()
    watch.start(is_main=False)
    watch.start(is_main=False)  # a second model: registered once all the same
    try:
        x = torch.ones(3, requires_grad=True)
        y = torch.compile(lambda x: (x * 2).sin(), dynamic=False)(x)
        forward_s = watch.duration_s
        assert forward_s > 0.0
        y.sum().backward()  # the backward is compiled here, if it was not with the forward
        backward_s = watch.duration_s
        assert backward_s >= forward_s
        y.detach().sum()
        assert watch.duration_s == backward_s
        assert watch.news() is None or watch.news() is None, "told once"
    finally:
        watch.close()
    torch.compile(lambda x: x.cos(), dynamic=False)(torch.ones(3))
    assert watch.duration_s == backward_s


def test_a_session_closes_its_watch() -> None:
    from torch._dynamo.callback import callback_handler

    before = list(callback_handler.start_callbacks)
    with distributed.session("cpu") as world:
        world.compile_watch.start(is_main=False)
        assert len(callback_handler.start_callbacks) == len(before) + 1
    assert callback_handler.start_callbacks == before


def test_the_tag_of_the_caches_keeps_the_users_and_names_our_ops_once() -> None:
    with torch.compiler.config.patch(cache_key_tag="mine"):
        set_options(has_dtensors=False, has_side_effects=False)
        tag = torch.compiler.config.cache_key_tag
        assert tag.startswith("mine lptune ")
        set_options(has_dtensors=False, has_side_effects=False)
        assert torch.compiler.config.cache_key_tag == tag


class _Other(GatheredWeight):
    """Of another class, with the same parts."""


def test_the_key_of_a_weight_is_its_kind_and_layout_and_not_its_values() -> None:
    def weight(
        cls: type[RowTensor] = GatheredWeight,
        dtype: torch.dtype = torch.bfloat16,
        q_dtype: torch.dtype = torch.int8,
        scale: tuple[int, int] = (4, 1),
        pitch: int = 8,
        block: int | None = None,
        rotated: bool = False,
        fill: int = 1,
    ) -> str:
        q_NK = torch.full((4, pitch), fill).to(q_dtype)[:, :8]
        made = cls(q_NK, torch.full(scale, 0.5), dtype=dtype, full_rows=4, block=block, rotated=rotated)
        return made._stable_hash_for_caching()

    assert weight() == weight(fill=2)
    others = [
        weight(_Other),
        weight(dtype=torch.float32),
        weight(q_dtype=torch.float8_e4m3fn),
        weight(scale=(1, 1)),
        weight(pitch=16),
        weight(block=128),
        weight(rotated=True),
    ]
    assert len({weight(), *others}) == 1 + len(others)
