"""Weights in 8 bits: exports have training's own, in folders that others load; a base that is quantized is
read as transformers dequantizes it.
"""

import dataclasses
import json
import re
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
from lptune.checkpoint.adapter import read_piece
from lptune.checkpoint.card import Part, run_parts
from lptune.checkpoint.export import check_form
from lptune.checkpoint.hf import iter_tensors
from lptune.checkpoint.quantized import Quantizer, how_to_quantize, modules_that_stay_high
from lptune.checkpoint.state import About, RunState, base_digests
from lptune.config import CheckpointConfig, ExportConfig, FinetuneConfig
from lptune.distributed import Piece
from lptune.linear.plan import FELL_BACK
from lptune.models.headers import open_tensors
from lptune.numerics import E4M3, quantize_blocks, quantize_rows, quantize_tensor
from tests.helpers import tiny_run, warm
from tests.helpers.ranks import run_ranks

Tensors = dict[str, Tensor]
SERVED = {
    "int8_rowcol": "int8",
    "int8_tensorwise": "int8",
    "int8_weight_only": "int8",
    "float8_rowwise": "float8",
    "float8_tensorwise": "float8",
    "float8_blockwise": "float8_block",
    "int4_weight": "int4",
    "bitnet": "bitnet",
}
IN_BFLOAT16 = {
    "int8_rowcol",
    "float8_tensorwise",
    "float8_blockwise",
    "int4_weight",
    "bitnet",
}  # the others compute in float32


INDEX = "model.safetensors.index.json"


def _base(folder: Path, preset: str = "qwen2_5", layout: str = "") -> Path:
    """A model in bfloat16, in two files, with biases in q, k and v. layout: one of LAYOUTS, of its matrices
    or experts; a scale may be in the other file.
    """
    folder.mkdir(parents=True)
    preset = "gpt_oss" if layout == "mxfp4" else preset
    content: dict[str, Any] = {**models.presets.find_preset(f"{preset}/tiny"), "dtype": "bfloat16"}
    content |= {"quantization_config": LAYOUTS[layout][0]} if layout else {}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    tensors: Tensors = {}
    for name, tensor in models.build_on_meta(models.read_config(folder)).initial_tensors(0):
        found = {"": tensor.bfloat16()}
        if layout and (tensor.dim() == 3 if layout == "mxfp4" else "_proj.weight" in name):
            tensor[3] *= 30  # an outlier: another row's scale would show
            found = LAYOUTS[layout][1](tensor)
        tensors |= {f"{name}{suffix}".replace("weight.", ""): each for suffix, each in found.items()}
    file_of = {name: f"part-{len(name) % 2}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": file_of})
    (folder / INDEX).write_text(index, encoding="utf-8")
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
    loads: bool = False,
) -> Path:
    """The second of two checkpoints, each after a step. loads: from the base, not from random weights."""
    index = checkpoint.read_index(base)
    facts = checkpoint.read_config(index, lambda line: None)
    run = tiny_run.TinyRun(cfg, world, facts, seed=1, freeze=freeze)  # type: ignore[arg-type]
    if loads:
        checkpoint.load_hf(run.model, index, world)
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
            path = writer.save(step, state, run.low.state(), wait=True)
    return path


def _export(path: Path, base: Path, folder: Path, quantized: str, **keys: Any) -> Tensors:
    cfg = ExportConfig(quantized=quantized, **keys)
    checkpoint.export_hf(path, checkpoint.read_index(base), folder, cfg)
    found = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    return {"int4": _unpacked, "bitnet": _ternary}.get(quantized, dict)(found)


def _unpacked(tensors: Tensors) -> Tensors:
    """Packed codes as int8 under the names of their weights, each with a scale."""
    found = dict(tensors)
    for name in [each for each in tensors if each.endswith("_packed")]:
        weight, bytes_NB = name.removesuffix("_packed"), found.pop(name).view(torch.uint8)
        n, k = found.pop(f"{weight}_shape").tolist()
        found[weight] = torch.stack((bytes_NB & 15, bytes_NB >> 4), 2).view(n, -1)[:, :k].to(torch.int8) - 8
        scale_NG = found[f"{weight}_scale"]
        assert scale_NG.dtype == torch.bfloat16
        assert scale_NG.shape == (n, k // 32)
        found[f"{weight}_scale"] = scale_NG.float().repeat_interleave(32, 1)
    return found


def _ternary(tensors: Tensors) -> Tensors:
    """Four rows of each byte as int8, by the layout that transformers documents; 1 / scale as a scale."""
    found = dict(tensors)
    for name in [each for each in tensors if tensors[each].dtype == torch.uint8]:
        packed, scale_1 = tensors[name], tensors[f"{name}_scale"]
        assert (scale_1.shape, scale_1.dtype) == ((1,), torch.bfloat16)
        found[name] = torch.cat([(packed >> shift & 3).to(torch.int8) - 1 for shift in (0, 2, 4, 6)])
        assert set(found[name].unique().tolist()) == {-1, 0, 1}
        found[f"{name}_scale"] = 1 / scale_1.float()
    return found


def _scale(tensors: Tensors, name: str) -> Tensor:
    """The scale of the matrix `name`, of a shape that its codes can be multiplied by."""
    if f"{name}_scale" in tensors:
        return tensors[f"{name}_scale"]
    (n, k), blocks = tensors[name].shape, tensors[f"{name}_scale_inv"]
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]


def _dequantized(tensors: Tensors) -> Tensors:
    """By the rules of the formats: codes times scales, in float32."""
    found = {name: each for name, each in tensors.items() if "_scale" not in name}
    in_8_bits = [name for name, q in found.items() if q.element_size() == 1]
    return found | {name: found[name].float() * _scale(tensors, name) for name in in_8_bits}


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
    largest = {"int8": 127.0, "bitnet": 127.0, "int4": 1.0}.get(SERVED[kind], 448.0)
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    del layers["lm_head"]
    for name, layer in layers.items():
        layer.bias = None
        with torch.no_grad():
            if kind in IN_BFLOAT16:  # training rounds to the compute dtype first; out is to have all bits
                layer.weight.copy_(layer.weight.bfloat16())
            out_KN = layer(torch.eye(layer.in_features) * largest)
        q_NK, scale = tensors[f"{name}.weight"], _scale(tensors, f"{name}.weight")
        assert q_NK.element_size() == 1
        # Three factors, in either order: max * q is exact in float32.
        one, other = q_NK.float() * largest * scale, q_NK.float() * scale * largest
        assert ((out_KN.t() == one) | (out_KN.t() == other)).all(), name
    high = {name for name in tensors if tensors[name].element_size() > 1 and "_scale" not in name}
    stored = checkpoint.read_index(base).tensors
    assert {f"{name}.weight" for name in layers} == stored.keys() - high


def _tokens(x: Tensor, quantized: str) -> Tensor:
    """x by the rule of the servers, one scale per token. transformers dequantizes float8_block on a CPU; int4
    is multiplied in x's dtype.
    """
    if quantized in ("float8_block", "int4"):
        return x
    if quantized == "bitnet":
        inverse = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        return (x * inverse).round().clamp(-128, 127) / inverse
    scale = x.abs().amax(-1, keepdim=True) / (127.5 if quantized == "int8" else 448)
    if quantized == "int8":
        return (x / scale).round().clamp(-128, 127) * scale
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind != "int8_weight_only"])
def test_transformers_loads_it_and_computes_by_the_rule_of_the_format(
    kind: str, base: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    """The reference is transformers' model in float32 with codes times scales; such layers see `_tokens`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quantized, folder = SERVED[kind], tmp_path / "export"
    if quantized != "float8_block":
        pytest.importorskip("accelerate" if quantized == "bitnet" else "compressed_tensors")
    tensors = _export(trained[kind], base, folder, quantized)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if quantized == "float8_block":  # activations are bfloat16 whatever was asked for, weights are not
        nn.Module.float(theirs)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = ours.load_state_dict(_dequantized(tensors), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    for name, tensor in tensors.items():
        if tensor.element_size() == 1:
            layer = ours.get_submodule(name.removesuffix(".weight"))
            layer.register_forward_pre_hook(lambda _, inputs: (_tokens(inputs[0], quantized),))
    ids_BS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # transformers compiles BitLinear's steps
        found, wanted = theirs(ids_BS).logits, ours(ids_BS).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_what_a_model_has_beside_its_text_part_stays_high_under_the_names_of_transformers(
    tmp_path: Path,
) -> None:
    """Tensors of such folders are named otherwise than the modules that read them."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=65, tie_word_embeddings=False),
        vision_config=CLIPVisionConfig(**sizes, image_size=28, patch_size=14),
        tie_word_embeddings=False,
        image_token_index=64,
    )
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    stored = {name: each.shape for name, each in checkpoint.read_index(tmp_path).tensors.items()}
    facts = models.read_config(tmp_path)
    in_8_bits = {
        name for name, shape in stored.items() if "language_model.model.layers" in name and shape[1:]
    }
    assert in_8_bits
    kind = linear.KINDS["int8_rowcol"]
    quantizer = Quantizer("int8", kind, torch.bfloat16, frozenset(), ())
    high = modules_that_stay_high(stored, in_8_bits, facts.word_names)
    ignore = quantizer.config(high, is_part=True)["ignore"]
    matrices = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = [
        name
        for name in matrices
        if any(re.match(e[3:], name) if e.startswith("re:") else e == name for e in ignore)
    ]
    assert found == [name for name in matrices if "language_model.layers" not in name]
    assert len(found) > 3


def _check_rows(found: Tensors, high: Tensors, num: int) -> None:
    """The matrices in 8 bits, `num` of them, are the rows of those in float32, as int8_rowcol rounds them."""
    in_8_bits = [name for name, tensor in found.items() if tensor.dtype == torch.int8]
    assert len(in_8_bits) == num
    for name in in_8_bits:
        q_NK, scale_N1 = quantize_rows(high[name].bfloat16())
        assert torch.equal(found[name], q_NK), name
        assert torch.equal(found[f"{name}_scale"], scale_N1), name
    assert found.keys() - high.keys() == {f"{name}_scale" for name in in_8_bits}


def test_averages_and_frozen_layers_are_rounded_like_the_weights_of_the_last_step(
    base: Path, tmp_path: Path
) -> None:
    cfg = _config("int8_rowcol")
    cfg = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, ema_decay=0.5))

    def freeze(model: nn.Module) -> None:
        models.freeze(model, ["model.layers.0.self_attn.q_proj.*"])  # type: ignore[arg-type]

    with distributed.session("cpu") as world:
        path = _train(base, tmp_path / "steps", cfg, world, freeze)
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
    content = json.loads((tmp_path / "int8" / "config.json").read_text("utf-8"))
    assert sorted(content["quantization_config"]["ignore"]) == ["lm_head", *routers]


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
    high = _export(rotated, base, tmp_path / "high", "none", dtype="float32")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], quantize_rows(high[name])[0])
    for path, of, line in (
        (none, base, "no layer ran in low precision in its last steps"),
        (stacked, stacked_base, "has no form for model.layers.0.mlp.experts.gate_up_proj"),
    ):
        with pytest.raises(UserError, match=line):
            _export(path, of, tmp_path / "refused", "int8")
        assert not (tmp_path / "refused").exists()
    with pytest.raises(UserError, match=r"three values .* trained with precision\.kind=bitnet survives"):
        _export(rotated, base, tmp_path / "refused", "bitnet")
    # A run asks before it trains.
    model = checkpoint.read_base(str(stacked_base), print).build_on_meta()
    plan = linear.convert(model, "int8_rowcol")
    with pytest.raises(UserError, match=r"has no form for model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        check_form(checkpoint.read_index(stacked_base), ExportConfig(quantized="int8"), plan, "int8_rowcol")
    with pytest.raises(UserError, match=r"export.quantized: .* trains nothing in it"):
        dataclasses.replace(_config("none"), export=ExportConfig(quantized="int8"))


def test_layers_that_fell_back_and_those_of_another_precision_stay_high() -> None:
    low, high = ("int8 row", "int8 folded", "frozen", "int8 rows"), ("high",) * 4
    rows = [("a.0-1.up", "8 x 8", *low, ""), ("a.2.up", "8 x 8", *high[1:], "int8 rows", FELL_BACK)]
    rows.append(("b.down", "8 x 8", *high, "precision.skip: down"))
    part = Part(1, "int8_rowcol", "bfloat16", False, tuple(rows), "1", "2")
    found = how_to_quantize("int8", RunState({}), part)
    assert (found.parameters, found.notes) == ({"a.0.up.weight", "a.1.up.weight"}, ())


@pytest.mark.parametrize("numbers", [[3], [0, 1, 2], [0, 2, 3, 11]])
def test_names_of_a_group_are_those_it_was_made_of(numbers: list[int]) -> None:
    names = [f"model.layers.{number}.mlp.experts.0.up_proj" for number in numbers]
    assert names_of_group(group_name(names)) == names
    assert names_of_group("lm_head") == ["lm_head"]


def _ct(strategy: str, type_: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": type_, "symmetric": True, "strategy": strategy, "dynamic": False}
    tokens = {"num_bits": 8, "type": type_, "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{type_}-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
        },
        "ignore": ["lm_head"],
    }


def _mxfp4(w_EKN: Tensor) -> Tensors:
    (e, k, n), drawn = w_EKN.shape, torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8, generator=drawn)
    exponents = torch.randint(110, 126, (e, n, k // 32), dtype=torch.uint8, generator=drawn)
    return {"_blocks": blocks, "_scales": exponents}


def _codes(found: Any, suffix: str, form: Any) -> Tensors:
    """Codes, and scales in the dtype or the shape `form`."""
    return {
        "": found[0],
        suffix: found[1].to(form) if isinstance(form, torch.dtype) else found[1].reshape(form),
    }


def _int4_groups(w_NK: Tensor) -> Tensors:
    """Codes of -8 to 7, all of which the format may have, with a scale for each 16 columns."""
    (n, k), drawn = w_NK.shape, torch.Generator().manual_seed(6)
    packed = torch.randint(-(2**31), 2**31, (n, k // 8), generator=drawn)
    return {
        "_packed": packed.to(torch.int32),
        "_scale": (w_NK.unflatten(1, (-1, 16)).abs().amax(2) / 7.5).bfloat16(),
        "_shape": torch.tensor([n, k]),
    }


_W4A16 = _ct("group", "int") | {"format": "pack-quantized"}
_W4A16["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "group_size": 16}
del _W4A16["config_groups"]["group_0"]["input_activations"]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 16]}
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensors]]] = {
    "fp8_blocks": (FP8, lambda w: _codes(quantize_blocks(w, (32, 16), E4M3), "_scale_inv", torch.float32)),
    "fp8_tensor": (
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
        lambda w: _codes(quantize_tensor(w, E4M3), "_scale_inv", ()) | {".activation_scale": torch.ones(())},
    ),
    "int8_rows": (_ct("channel", "int"), lambda w: _codes(quantize_rows(w), "_scale", torch.float32)),
    # As published: scales in the dtype of the model.
    "float8_rows": (
        _ct("channel", "float"),
        lambda w: _codes(quantize_rows(w, E4M3), "_scale", torch.bfloat16),
    ),
    "float8_tensor": (_ct("tensor", "float"), lambda w: _codes(quantize_tensor(w, E4M3), "_scale", (1,))),
    "int4_groups": (_W4A16, _int4_groups),
    "mxfp4": ({"quant_method": "mxfp4"}, _mxfp4),
}


def _loaded(folder: Path) -> Tensors:
    index = checkpoint.read_index(folder)
    model = models.build_on_meta(checkpoint.read_config(index, print))
    model.to_empty(device="cpu")
    checkpoint.load_hf(model, index)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _theirs(folder: Path) -> Tensors:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

    content = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    kinds = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig}
    how = kinds[content["quant_method"]](**{**content, "dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=how)
    return dict(model.named_parameters())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_transformers_dequantizes(layout: str, tmp_path: Path) -> None:
    """In float32; where the scales are in bfloat16, transformers rounds to that, and so ours are rounded."""
    if LAYOUTS[layout][0]["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    folder = _base(tmp_path / "base", layout=layout)
    ours, theirs = _loaded(folder), _theirs(folder)
    assert len(ours) > 20
    for name, parameter in ours.items():
        wanted = theirs[name.removesuffix(".weight")] if name not in theirs else theirs[name]
        if wanted.dim() == 3:  # our experts are one matrix, theirs transposed
            wanted = wanted.transpose(1, 2).reshape(parameter.shape)
        rounds = layout in ("float8_rows", "int4_groups") and "_proj.weight" in name
        found = parameter.bfloat16().float() if rounds else parameter
        assert torch.equal(found, wanted), name


def _train_on(rank: int, num_ranks: int, folder: str) -> None:
    """Loads every layout, sharded; trains the FP8 one by two steps; exports it high and in FP8."""
    from torch.distributed.fsdp import fully_shard

    with distributed.session("cpu") as world:
        for base in sorted(Path(folder).glob("base-*")):
            index = checkpoint.read_index(base)
            model = models.build_on_meta(checkpoint.read_config(index, lambda line: None))
            fully_shard(model, mesh=world.mesh)
            model.to_empty(device="cpu")
            checkpoint.load_hf(model, index, world)
            whole = _loaded(base)
            for name, parameter in model.named_parameters():
                for piece in distributed.local_pieces(parameter):
                    assert torch.equal(piece.values, whole[name][piece.region]), name
        cfg = _config("float8_blockwise")
        path = _train(base, Path(folder) / f"steps-{num_ranks}", cfg, world, loads=True)
        for quantized in ("none", "float8_block"):
            export = Path(folder) / f"{quantized}-{num_ranks}"
            how = ExportConfig(quantized=quantized, rounding="nearest")
            checkpoint.export_hf(path, index, export, how, world)


def test_it_trains_on_one_and_two_ranks_and_exports_high_precision_or_its_own_format(tmp_path: Path) -> None:
    for number, layout in enumerate(("mxfp4", "int8_rows", "fp8_blocks")):
        _base(tmp_path / f"base-{number}", layout=layout)
    _train_on(0, 1, str(tmp_path))
    run_ranks(2, _train_on, str(tmp_path))
    base = checkpoint.read_index(tmp_path / "base-2")
    before = dict(iter_tensors(base))
    for num_ranks in (1, 2):
        folder = tmp_path / f"none-{num_ranks}"
        assert "quantization_config" not in json.loads((folder / "config.json").read_text("utf-8"))
        found = checkpoint.read_index(folder)
        assert list(found.tensors) == list(base.tensors)
        assert {each.dtype for each in found.tensors.values()} == {"bfloat16"}
        for name, tensor in iter_tensors(found):
            # Two steps of AdamW at 1e-3, with decay of 0.1, and a rounding to bfloat16.
            moved = (tensor.float() - before[name].float()).abs()
            assert (moved <= 2.2e-3 + (2e-4 + 2**-8) * before[name].float().abs()).all(), name
        quantized = checkpoint.read_index(tmp_path / f"float8_block-{num_ranks}")
        found_high = dict(iter_tensors(found))
        for name, tensor in iter_tensors(quantized):
            how, was = quantized.tensors[name].quantized, base.tensors[name].quantized
            assert (how is None) == (was is None), name
            # e4m3: half a step of the amax's binade, as long as no value is subnormal
            largest = found_high[name].float().abs().max()
            assert (tensor.float() - found_high[name].float()).abs().max() <= 2**-4 * largest, name
    for quantized in ("none", "float8_block"):  # one process writes the bytes of two ranks
        cfg = ExportConfig(quantized=quantized, rounding="nearest")
        checkpoint.export_hf(tmp_path / "steps-2" / "step-00000002", base, tmp_path / "one", cfg)
        theirs = tmp_path / f"{quantized}-2"
        for path in sorted((tmp_path / "one").iterdir()):
            assert path.read_bytes() == (theirs / path.name).read_bytes(), path.name
        assert len(list(theirs.iterdir())) == len(list((tmp_path / "one").iterdir()))


def test_a_rank_reads_the_codes_of_its_box_and_their_scales(tmp_path: Path) -> None:
    read = list[tuple[str, int]]()

    class Recorded:
        """An opened file, or a tensor in it, that notes how many elements are read."""

        def __init__(self, opened: Any, name: str = "") -> None:
            self.opened, self.name, self.get_shape = opened, name, getattr(opened, "get_shape", None)

        def get_slice(self, name: str) -> "Recorded":
            return Recorded(self.opened.get_slice(name), name)

        def __getitem__(self, box: Any) -> Tensor:
            found: Tensor = self.opened[box]
            read.append((self.name, found.numel()))
            return found

    folder = _base(tmp_path / "base", layout="fp8_blocks")
    index = checkpoint.read_index(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    part = models.Part(name, (0, 0), index.tensors[name].shape)
    values = torch.empty(40, 20)  # rows 50 to 90 and columns 30 to 50: blocks 1 and 2, and 1 to 3
    read_piece(lambda file: Recorded(open_tensors(folder / file)), index, (part,), Piece(values, (50, 30)))
    assert torch.equal(values, _loaded(folder)[name][50:90, 30:50])
    assert read == [(f"{name}_scale_inv", 6), (name, 800)]


FAULTS: dict[str, tuple[str, Callable[[Tensors, str], None], str]] = {
    "missing": ("fp8_blocks", lambda t, n: t.__delitem__(f"{n}_scale_inv"), "scale .* is missing"),
    "blocks": (
        "fp8_blocks",
        lambda t, n: t.update({f"{n}_scale_inv": t[f"{n}_scale_inv"][:2]}),
        r"\[2, 4\], \[128, 64\] of .* need a float of \[4, 4\]",
    ),
    "groups": (
        "int4_groups",
        lambda t, n: t.update({f"{n}_scale": t[f"{n}_scale"][:, :3]}),
        r"\[128, 3\], of 16 columns each, and does not belong to \[128, 8\]",
    ),
    "one for all": (
        "int4_groups",
        lambda t, n: t.update({f"{n}_scale": torch.ones((), dtype=torch.bfloat16)}),
        r"\[\], of 16 columns each",
    ),
    "transposed": (
        "int8_rows",
        lambda t, n: t.update({f"{n}_scale": t[f"{n}_scale"].t()}),
        r"\[1, 128\], .*\[128, 1\]",
    ),
    "not finite": (
        "int8_rows",
        lambda t, n: t[f"{n}_scale"][7].fill_(torch.nan),
        "scale .* holds values that are not finite",
    ),
    "below 0": ("int8_rows", lambda t, n: t[f"{n}_scale"].neg_(), "scale .* below 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_is_one_line(fault: str, tmp_path: Path) -> None:
    layout, change, line = FAULTS[fault]
    folder = _base(tmp_path / "base", layout=layout)
    files = {file: load_file(file) for file in folder.glob("*.safetensors")}
    tensors = {name: tensor for found in files.values() for name, tensor in found.items()}
    change(tensors, "model.layers.0.mlp.up_proj.weight")
    for file in (*files, folder / INDEX):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=line) as error:
        _loaded(folder)
    assert "\n" not in str(error.value)


def test_what_is_not_read_is_one_line_and_the_commands_know_the_rest(tmp_path: Path) -> None:
    folder = _base(tmp_path / "base", layout="float8_rows")
    done = warm.lptune(["verify", str(folder)], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "14 in e4m3" in done.stdout
    content = json.loads((folder / "config.json").read_text("utf-8"))
    for change, line in (
        ({"quant_method": "gptq"}, r"quantized \(gptq\)"),
        ("fp8", "expected settings, found 'fp8'"),
        (_ct("channel", "int") | {"transform_config": {"config_groups": {"R3": {}}}}, "transform_config"),
        (_ct("group", "int"), "is not symmetric 8-bit"),
        (FP8 | {"weight_block_size": [0, 128]}, "two sizes of a block"),
        (None, r"stored as F8_E4M3; only .* quantization_config"),
    ):
        edited = {key: value for key, value in content.items() if key != "quantization_config"}
        edited |= {} if change is None else {"quantization_config": change}
        (folder / "config.json").write_text(json.dumps(edited), encoding="utf-8")
        with pytest.raises(UserError, match=line):
            checkpoint.read_index(folder)
