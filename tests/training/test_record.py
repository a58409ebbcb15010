"""The record of a step: rates leave out compilation; utilization is by the peaks of the exact device."""

import dataclasses
import re
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lptune import distributed, linear, models, training
from lptune.config import PrecisionConfig
from lptune.distributed import World
from lptune.distributed.compilation import Compiled
from lptune.hardware.devices import DEVICES, known_device

TOKENS_PER_STEP = 640


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, as the only element."""
    now = [100.0]
    monkeypatch.setattr("lptune.training.record.time.perf_counter", lambda: now[0])
    return now


def _meter() -> tuple[Any, distributed.World]:
    world = distributed.World(0, 1, torch.device("cpu"), mesh=None)  # type: ignore[arg-type]
    cfg: Any = SimpleNamespace(tokens_per_step=TOKENS_PER_STEP, compute_dtype="bfloat16")
    plan: Any = None  # a CPU has no peak, so nothing is read of the plan
    return training.StepMeter(cfg, plan, plan, world), world


def _record(meter: Any) -> dict[str, Any]:
    low: Any = SimpleNamespace(
        verified=SimpleNamespace(low_precision_flops_fraction=None), metrics=lambda: {"num_saturated": 4}
    )
    update: Any = SimpleNamespace(num_skipped=0)
    record: dict[str, Any] = meter.record(
        3, training.Updated(1.0, 2.0), 600, 0.1, np.array([TOKENS_PER_STEP]), update, low
    )
    return record


def test_rates_leave_out_the_time_of_compilation(clock: list[float]) -> None:
    meter, world = _meter()
    world.compile_watch.duration_s = 7.0  # of an evaluation before the first step
    meter.start()
    clock[0] += 32.0
    world.compile_watch.duration_s += 30.0
    with meter.left_out():
        clock[0] += 5.0  # of a shadow check
    meter.stop()
    first = _record(meter)
    assert (first["step_time_s"], first["compile_time_s"]) == (2.0, 30.0)
    assert first["tokens_per_s"] == TOKENS_PER_STEP / 2.0
    meter.start()
    clock[0] += 1.6
    meter.stop()
    later = _record(meter)
    assert later["step_time_s"] == pytest.approx(1.6)
    assert later["compile_time_s"] == 0.0
    assert later["tokens_per_s"] == pytest.approx(400.0)


def test_what_was_compiled_is_told_once_after_the_step(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meter, world = _meter()
    news = iter([Compiled(75.2, 6, 2), None])
    monkeypatch.setattr(world.compile_watch, "news", lambda: next(news))
    meter.start()
    assert capsys.readouterr().out == ""
    meter.stop()
    assert capsys.readouterr().out == "compiling: 1 min 15 s, 2 of 6 graphs from the cache\n"
    meter.start()
    meter.stop()
    assert capsys.readouterr().out == ""


def test_a_record_says_when_it_was_made() -> None:
    meter, _ = _meter()
    meter.start()
    meter.stop()
    before = datetime.now(UTC)
    made = datetime.fromisoformat(_record(meter)["time"])
    # To the millisecond, rounded down.
    assert -0.001 <= (made - before).total_seconds() <= (datetime.now(UTC) - before).total_seconds()
    assert made.tzinfo == UTC


LENGTHS = np.array([5, 11, 16, 1, 15, 32])  # two rows of 16 and one of 32, say
GEMMA = models.config_from_dict(models.PRESETS["gemma3"]["tiny"], "test")
LLAMA = models.config_from_dict(models.PRESETS["llama3_2"]["tiny"], "test")


def _documents(row: list[int]) -> models.DocumentBounds:
    """One row of documents of these lengths."""
    lengths = torch.tensor(row)
    return models.DocumentBounds(
        positions_BS=torch.cat([torch.arange(n) for n in row])[None],
        index_BS=torch.repeat_interleave(torch.arange(len(row)), lengths)[None],
        offsets=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
    )


@pytest.mark.parametrize("config", [LLAMA, GEMMA], ids=["llama", "gemma3 with windows"])
@pytest.mark.parametrize("row", [[16], [5, 11], [1, 1, 7, 2, 5], [9, 40]], ids=str)
def test_attention_flops_are_those_of_the_pairs_that_the_mask_lets_see_each_other(
    config: models.DecoderConfig, row: list[int]
) -> None:
    from lptune.models.documents import visibility_mask

    documents = _documents(row)
    num_pairs = sum(
        int(visibility_mask(documents, sum(row), layer.window, torch.device("cpu")).sum())
        for layer in config.layers
    )
    assert config.attention_flops(row) == 12 * config.num_heads * config.head_dim * num_pairs


def test_with_linear_layers_they_are_what_torch_counts_of_a_step() -> None:
    """torch counts the whole square of an attention, which all pairs of tokens would be."""
    config = dataclasses.replace(LLAMA, attention_softcap=50.0)  # the formula as written: plain GEMMs
    batch, seq_len = 2, 24
    model = models.build_on_meta(config)
    plan = linear.convert(model, PrecisionConfig(kind="none"))
    tokens_BS = torch.zeros(batch, seq_len, dtype=torch.int64, device="meta")
    documents = models.DocumentBounds.single(batch, seq_len, "meta")
    with FlopCounterMode(display=False) as counter:
        model(tokens_BS, documents, tokens_BS).backward()
    pairs = seq_len * (seq_len + 1) // 2
    attention = config.attention_flops([seq_len] * batch) * seq_len**2 / pairs
    assert counter.get_total_flops() == plan.flops_per_token * batch * seq_len + attention


def _utilization(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, num_devices: int = 1, dtype: str = "bfloat16"
) -> tuple[training.UtilizationMeter, linear.Plan, list[str]]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    model = models.build_on_meta(LLAMA)
    precision = PrecisionConfig(kind=kind, emulate=kind != "none")
    plan = linear.convert(model, precision)
    said: list[str] = []
    world = World(rank=0, size=num_devices, device=torch.device("cuda"), mesh=None)  # type: ignore[arg-type]
    meter = training.UtilizationMeter(plan, LLAMA, world, getattr(torch, dtype), say=said.append)
    return meter, plan, said


@pytest.mark.parametrize(
    ("name", "kind", "bf16", "low"),
    [
        ("NVIDIA H100 80GB HBM3", "int8_rowcol", 989.5e12, 1979e12),
        ("NVIDIA H100 PCIe", "int8_rowcol", 756.5e12, 1513e12),
        ("NVIDIA H100 NVL", "float8_rowwise", 835.5e12, 1670.5e12),
        ("NVIDIA GeForce RTX 4090", "int8_rowcol", 165.2e12, 660.6e12),
        # Float8 that is summed in float32, at half the rate of INT8.
        ("NVIDIA GeForce RTX 4090", "float8_tensorwise", 165.2e12, 330.3e12),
        ("NVIDIA H100 80GB HBM3", "int4_weight", 989.5e12, 989.5e12),  # it multiplies in bfloat16
    ],
)
def test_mfu_is_the_time_at_the_peaks_of_that_very_device(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, bf16: float, low: float
) -> None:
    meter, plan, said = _utilization(monkeypatch, name, kind, num_devices=4)
    attention = LLAMA.attention_flops(LENGTHS)
    linear_flops = plan.flops_per_token * 80
    used = meter(0.5, LENGTHS, 0.75)
    best_s = (0.75 * linear_flops / low + (0.25 * linear_flops + attention) / bf16) / 4
    assert used.mfu == pytest.approx(best_s / 0.5, rel=1e-12)
    assert used.bf16_mfu == pytest.approx((linear_flops + attention) / bf16 / 4 / 0.5, rel=1e-12)
    assert meter(0.5, LENGTHS, None) == (None, used.bf16_mfu)  # verification was off
    assert said == []


@pytest.mark.parametrize(
    "name", ["NVIDIA H100", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100X"]
)
def test_a_device_that_is_not_in_the_table_has_no_mfu_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    meter, _, said = _utilization(monkeypatch, name, "int8_rowcol")
    assert [meter(0.5, LENGTHS, 0.75), meter(0.5, LENGTHS, 0.75)] == [(None, None)] * 2
    (line,) = said
    assert name in line


def test_a_dtype_without_a_peak_has_no_mfu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind, dtype, word in (
        ("NVIDIA A100-SXM4-80GB", "float8_rowwise", "bfloat16", "float8"),
        ("NVIDIA H200", "int8_rowcol", "float32", "float32"),
        ("NVIDIA H200", "nvfp4", "bfloat16", "4 bits"),
    ):
        meter, _, said = _utilization(monkeypatch, name, kind, dtype=dtype)
        used = meter(0.5, LENGTHS, 0.75)
        assert used.mfu is None
        assert used.bf16_mfu is not None
        (line,) = said
        assert word in line


def test_a_cpu_has_no_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    plan = linear.convert(models.build_on_meta(LLAMA), PrecisionConfig(kind="int8_rowcol"))
    world = World(rank=0, size=1, device=torch.device("cpu"), mesh=None)  # type: ignore[arg-type]
    meter = training.UtilizationMeter(plan, LLAMA, world, torch.bfloat16)
    assert meter(0.5, LENGTHS, 0.75) == (None, None)
    assert capsys.readouterr().out == ""


def test_a_format_without_a_peak_of_its_own_gets_no_other_peak() -> None:
    device = DEVICES[0]
    assert device.peak("e5m2") == device.float8
    with pytest.raises(KeyError, match="int4"):
        device.peak("int4")


def test_the_table_names_each_device_once_with_dense_peaks_and_their_source() -> None:
    assert len({device.name for device in DEVICES}) == len({device.key for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert known_device(f"NVIDIA {device.name}") is known_device(device.name) is device
        # Of dense figures INT8 is twice bfloat16, on GeForce four times, since that halves float32 sums. A
        # figure with sparsity beside one without would be off by another factor of 2.
        is_geforce = device.name.startswith("GeForce")
        assert device.int8 / device.bf16 == pytest.approx(4 if is_geforce else 2, rel=0.02)
        if device.float8 is None:
            assert device.capability < (8, 9)
        else:
            assert device.float8 == pytest.approx(device.int8 / (2 if is_geforce else 1), rel=0.02)
        printed = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", device.source.replace(",", ""))]
        times = 2 if "with sparsity" in device.source else 1
        for peak in {device.bf16, device.int8, device.float8 or device.int8}:
            assert times * peak / 1e12 in printed, device
