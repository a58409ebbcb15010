"""Exports in 8 bits: training's own values and scales, in folders that others load."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lptune import checkpoint, distributed, linear, models
from lptune.base.errors import UserError
from lptune.base.text import group_name, names_of_group
from lptune.checkpoint.card import run_parts
from lptune.checkpoint.state import About, base_digests
from lptune.config import CheckpointConfig, ExportConfig, FinetuneConfig
from lptune.numerics import FORMATS, quantize_rows
from tests.helpers import tiny_run

SERVED = {
    "int8_rowcol": "int8",
    "int8_tensorwise": "int8",
    "int8_weight_only": "int8",
    "float8_rowwise": "float8",
    "float8_tensorwise": "float8",
    "float8_blockwise": "float8_block",
}
IN_BFLOAT16 = {"int8_rowcol", "float8_tensorwise", "float8_blockwise"}
"""The kinds that compute in bfloat16 here; the others in float32."""


def _base(folder: Path, preset: str = "qwen2_5", **content: Any) -> Path:
    """A model in bfloat16, in two files, with biases in q, k and v."""
    folder.mkdir(parents=True)
    content = {**models.presets.find_preset(f"{preset}/tiny"), "dtype": "bfloat16", **content}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    model = models.build_on_meta(models.read_config(folder))
    tensors = {name: tensor.bfloat16() for name, tensor in model.initial_tensors(0)}
    file_of = {name: f"part-{'layers.1.' in name}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _config(kind: str, **precision: Any) -> FinetuneConfig:
    dtype = "bfloat16" if kind in IN_BFLOAT16 else "float32"
    cfg = tiny_run.config(kind, compute_dtype=dtype, precision=precision)
    return dataclasses.replace(cfg, precision=dataclasses.replace(cfg.precision, skip=("lm_head",)))


def _train(
    base: Path,
    folder: Path,
    cfg: FinetuneConfig,
    world: distributed.World,
    freeze: Callable[[nn.Module], None] | None = None,
    **more: Any,
) -> Path:
    """The second of two checkpoints, each after a step. more: blocks of state.json."""
    facts = checkpoint.read_config(checkpoint.read_index(base), print)
    run = tiny_run.TinyRun(cfg, world, facts, seed=1, freeze=freeze)  # type: ignore[arg-type]
    about = About(str(base), "rows", cfg.precision.kind, None, "original", 0.0, "1", "2")
    state = {
        "fingerprint": base_digests(base),
        "about": dataclasses.asdict(about),
        "parts": run_parts(cfg, run.plan, None),
        "frozen": [name for name, each in run.model.named_parameters() if not each.requires_grad],
        "stop_tokens": {},
    }
    files = checkpoint.CheckpointWriter(folder, run.model, run.optimizer, world, CheckpointConfig())
    with files as writer:
        for step in (1, 2):
            with run.low.step(step, len(run.batches(step))):
                run.forward_backward(step)
            run.update()
            path = writer.save(step, state | more, run.low.state(), wait=True)
    return path


def _export(path: Path, base: Path, folder: Path, quantized: str, **keys: Any) -> dict[str, Tensor]:
    cfg = ExportConfig(quantized=quantized, **keys)
    checkpoint.export_hf(path, checkpoint.read_index(base), folder, cfg)
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def _settings(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return content.get("quantization_config", {})


def _dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the rules of the formats: codes times scales, in float32."""
    found = {name: each for name, each in tensors.items() if "_scale" not in name}
    for name, q in found.items():
        if q.element_size() == 1:
            scale = tensors.get(f"{name}_scale")
            if scale is None:
                blocks = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
                scale = blocks[: q.shape[0], : q.shape[1]]
            found[name] = q.float() * scale
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _base(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each kind that a format serves."""
    folder = tmp_path_factory.mktemp("trained")
    with distributed.session("cpu") as world:
        return {kind: _train(base, folder / kind, _config(kind), world) for kind in SERVED}


@pytest.mark.parametrize("kind", SERVED)
def test_the_exported_weights_are_those_that_training_multiplies_by(
    kind: str, base: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    """A layer of the kind is asked for its weight: x is the largest number of the format times a unit matrix,
    whose scales are 1, so that out = max * q * scale.
    """
    tensors = _export(trained[kind], base, tmp_path / "export", SERVED[kind])
    model = models.build_on_meta(checkpoint.read_config(checkpoint.read_index(base), print))
    linear.convert(model, _config(kind).precision)
    model.to_empty(device="cpu")
    checkpoint.load_weights(checkpoint.verify(trained[kind]), model)
    largest = FORMATS["int8" if SERVED[kind] == "int8" else "e4m3"].max
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    del layers["lm_head"]
    weights = _dequantized(tensors)
    for name, layer in layers.items():
        layer.bias = None
        with torch.no_grad():
            if kind in IN_BFLOAT16:  # training rounds to the compute dtype first; out is to have all bits
                layer.weight.copy_(layer.weight.bfloat16())
            out_KN = layer(torch.eye(layer.in_features) * largest)
        wanted_KN = weights[f"{name}.weight"].t() * largest
        assert tensors[f"{name}.weight"].element_size() == 1
        # Three factors, rounded twice, in either order. A step of a code is at least 2**-7 of the value.
        assert torch.isclose(out_KN, wanted_KN, rtol=2**-22, atol=0).all(), name
    high = {name for name in tensors if tensors[name].element_size() > 1 and "_scale" not in name}
    stored = checkpoint.read_index(base).tensors
    assert {f"{name}.weight" for name in layers} == stored.keys() - high


def _reference(folder: Path, tensors: dict[str, Tensor], tokens: Callable[[Tensor], Tensor]) -> nn.Module:
    """The exported model as transformers builds it in float32, with the weights of the formats' rule. Linear
    layers in 8 bits see `tokens` of their input.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, unexpected = model.load_state_dict(_dequantized(tensors), strict=False)
    assert (set(missing), unexpected) == (tied, [])
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and tensors.get(f"{name}.weight", torch.empty(0)).element_size() == 1
        ):
            module.register_forward_pre_hook(lambda _, inputs: (tokens(inputs[0]), *inputs[1:]))
    return model.eval()


def _int8_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def _float8_tokens(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("int8_rowcol", _int8_tokens),
        ("int8_tensorwise", _int8_tokens),
        ("float8_rowwise", _float8_tokens),
        ("float8_tensorwise", _float8_tokens),
        ("float8_blockwise", lambda x: x),  # transformers dequantizes it on a CPU, and tokens stay high
    ],
)
def test_transformers_loads_it_and_computes_by_the_rule_of_the_format(
    kind: str,
    tokens: Callable[[Tensor], Tensor],
    base: Path,
    trained: dict[str, Path],
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    if SERVED[kind] != "float8_block":
        pytest.importorskip("compressed_tensors")
    tensors = _export(trained[kind], base, tmp_path / "export", SERVED[kind])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    if SERVED[kind] == "float8_block":  # activations are bfloat16 whatever was asked for, weights are not
        nn.Module.float(theirs)
    ours = _reference(tmp_path / "export", tensors, tokens)
    ids_BS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, wanted = theirs(ids_BS).logits, ours(ids_BS).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def _check_rows(found: dict[str, Tensor], high: dict[str, Tensor], num: int) -> None:
    """The matrices in 8 bits, `num` of them, are the rows of those in float32, as int8_rowcol rounds them."""
    in_8_bits = [name for name, tensor in found.items() if tensor.dtype == torch.int8]
    assert len(in_8_bits) == num
    for name in in_8_bits:
        q_NK, scale_N1 = quantize_rows(high[name].bfloat16())
        assert torch.equal(found[name], q_NK), name
        assert torch.equal(found[f"{name}_scale"], scale_N1), name
    assert found.keys() - high.keys() == {f"{name}_scale" for name in in_8_bits}


def _freeze(model: nn.Module) -> None:
    models.freeze(model, ["model.layers.0.self_attn.q_proj.*"])  # type: ignore[arg-type]


def test_averages_and_frozen_layers_are_rounded_like_the_weights_of_the_last_step(
    base: Path, tmp_path: Path
) -> None:
    cfg = _config("int8_rowcol")
    cfg = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, ema_decay=0.5))
    with distributed.session("cpu") as world:
        path = _train(base, tmp_path / "steps", cfg, world, _freeze)
    files = []
    for number, keys in enumerate(({}, {"ema": False}, {"average_checkpoints": 2})):
        high = _export(path, base, tmp_path / f"high-{number}", "none", dtype="float32", **keys)
        found = _export(path, base, tmp_path / f"int8-{number}", "int8", **keys)
        _check_rows(found, high, 14)
        files.append(found["model.layers.0.mlp.up_proj.weight_scale"])
    assert not torch.equal(files[0], files[1])
    assert not torch.equal(files[1], files[2])
    card = (tmp_path / "int8-1" / "README.md").read_text("utf-8")
    assert "| stored in 8 bits | int8, 14 matrices, rounded as by int8_rowcol; the weights in float32" in card


def test_experts_that_are_stored_one_by_one_get_scales_and_routers_stay_high(tmp_path: Path) -> None:
    base = _base(tmp_path / "base", "qwen3_moe")
    with distributed.session("cpu") as world:
        path = _train(base, tmp_path / "steps", _config("int8_rowcol"), world)
    high = _export(path, base, tmp_path / "high", "none", dtype="float32")
    found = _export(path, base, tmp_path / "int8", "int8", max_shard_gib=1e-4)
    experts = [name for name in high if ".experts." in name]
    _check_rows(found, high, 2 * 4 + len(experts))
    index = json.loads((tmp_path / "int8" / "model.safetensors.index.json").read_text("utf-8"))
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    routers = [f"model.layers.{number}.mlp.gate" for number in (0, 1)]
    assert sorted(_settings(tmp_path / "int8")["ignore"]) == ["lm_head", *routers]


def test_what_no_format_has_is_one_line_and_other_rounding_a_note(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with distributed.session("cpu") as world:
        rotated = _train(base, tmp_path / "rotated", _config("int8_rotated"), world)
        none = _train(base, tmp_path / "none", _config("none"), world)
        stacked_base = _base(tmp_path / "gpt_oss", "gpt_oss")
        stacked = _train(stacked_base, tmp_path / "stacked", _config("int8_rowcol"), world)
    capsys.readouterr()
    found = _export(rotated, base, tmp_path / "plain", "int8")
    out = capsys.readouterr().out
    assert "note: export.quantized=int8 has other values and scales than training with int8_rotated" in out
    q_NK = quantize_rows(_export(rotated, base, tmp_path / "high", "none", dtype="float32")[
        "model.layers.0.mlp.up_proj.weight"
    ])[0]  # fmt: skip
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], q_NK)
    for path, of, line in (
        (none, base, "no layer ran in 8 bits in its last steps"),
        (stacked, stacked_base, "has no form for model.layers.0.mlp.experts.gate_up_proj"),
    ):
        with pytest.raises(UserError, match=line):
            _export(path, of, tmp_path / "refused", "int8")
        assert not (tmp_path / "refused").exists()
    with pytest.raises(UserError, match=r"export.quantized: .* trains nothing in them"):
        dataclasses.replace(_config("none"), export=ExportConfig(quantized="int8"))


@pytest.mark.parametrize("numbers", [[3], [0, 1, 2], [0, 2, 3, 11]])
def test_names_of_a_group_are_those_it_was_made_of(numbers: list[int]) -> None:
    names = [f"model.layers.{number}.mlp.experts.0.up_proj" for number in numbers]
    assert names_of_group(group_name(names)) == names
    assert names_of_group("lm_head") == ["lm_head"]
