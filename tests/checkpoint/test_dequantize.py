"""Quantized folders as a base: made small in the published layouts, read as transformers dequantizes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lptune import checkpoint, distributed, models
from lptune.base.errors import UserError
from lptune.checkpoint.adapter import read_piece
from lptune.checkpoint.card import run_parts
from lptune.checkpoint.hf import iter_tensors
from lptune.checkpoint.state import About, base_digests
from lptune.config import CheckpointConfig, ExportConfig
from lptune.distributed import Piece
from lptune.models.headers import open_tensors
from lptune.numerics import E4M3, INT8, quantize_blocks, quantize_rows, quantize_tensor
from tests.helpers import tiny_run, warm
from tests.helpers.ranks import run_ranks

BLOCK = [32, 16]
Codes = Callable[[Tensor], dict[str, Tensor]]


def _ct(strategy: str, type_: str, **more: Any) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": type_, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": strategy, "dynamic": False},
        "input_activations": {**numbers, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{type_}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **more,
    }


def _blocks(w: Tensor) -> dict[str, Tensor]:
    q, scale = quantize_blocks(w, (BLOCK[0], BLOCK[1]), E4M3)
    return {"": q, "_scale_inv": scale}


def _whole(w: Tensor) -> dict[str, Tensor]:
    q, scale = quantize_tensor(w, E4M3)
    return {"": q, "_scale_inv": scale.reshape(()), "|activation_scale": torch.tensor(0.5)}


def _rows(w: Tensor) -> dict[str, Tensor]:
    q, scale = quantize_rows(w, INT8)
    return {"": q, "_scale": scale}


def _rows_float8(w: Tensor) -> dict[str, Tensor]:
    q, scale = quantize_rows(w, E4M3)
    return {"": q, "_scale": scale.bfloat16()}  # as published: in the dtype of the model


def _tensor_float8(w: Tensor) -> dict[str, Tensor]:
    q, scale = quantize_tensor(w, E4M3)
    return {"": q, "_scale": scale.reshape(1)}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK}
LAYOUTS: dict[str, tuple[dict[str, Any], Codes]] = {
    "fp8_blocks": (FP8, _blocks),
    "fp8_tensor": (FP8 | {"activation_scheme": "static", "weight_block_size": None}, _whole),
    "int8_rows": (_ct("channel", "int"), _rows),
    "float8_rows": (_ct("channel", "float"), _rows_float8),
    "float8_tensor": (_ct("tensor", "float"), _tensor_float8),
}


def _make(folder: Path, layout: str) -> Path:
    """A folder of qwen2_5/tiny, or of gpt_oss/tiny for mxfp4, in two files; a scale may be in the other."""
    folder.mkdir(parents=True)
    preset = "gpt_oss" if layout == "mxfp4" else "qwen2_5"
    content: dict[str, Any] = {**models.presets.find_preset(f"{preset}/tiny"), "dtype": "bfloat16"}
    content.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    settings, codes = LAYOUTS.get(layout, ({"quant_method": "mxfp4"}, _rows))
    tensors = dict[str, Tensor]()
    for name, tensor in models.build_on_meta(models.read_config(folder)).initial_tensors(0):
        if layout == "mxfp4" and tensor.dim() == 3:
            e, k, n = tensor.shape
            drawn = torch.Generator().manual_seed(len(tensors))
            blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8, generator=drawn)
            exponents = torch.randint(110, 126, (e, n, k // 32), dtype=torch.uint8, generator=drawn)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        elif layout != "mxfp4" and "_proj.weight" in name:
            tensor[3] *= 30  # an outlier row: a wrong row's scale would show
            found = codes(tensor)
            tensors |= {
                name.replace("weight", k[1:]) if k[:1] == "|" else name + k: t for k, t in found.items()
            }
        else:
            tensors[name] = tensor.bfloat16()
    file_of = {name: f"part-{len(name) % 2}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of}), "utf-8"
    )
    content["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _loaded(folder: Path) -> dict[str, Tensor]:
    index = checkpoint.read_index(folder)
    model = models.build_on_meta(checkpoint.read_config(index, print))
    model.to_empty(device="cpu")
    checkpoint.load_hf(model, index)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _theirs(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

    content = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    kinds = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config, "compressed-tensors": CompressedTensorsConfig}
    how = kinds[content["quant_method"]](**{**content, "dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)
    return dict(model.named_parameters())


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("layout", [*LAYOUTS, "mxfp4"])
def test_weights_are_those_that_transformers_dequantizes(layout: str, tmp_path: Path) -> None:
    """In float32; where the scales are in bfloat16, transformers rounds to that, and so ours are rounded."""
    if LAYOUTS.get(layout, (FP8,))[0]["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    folder = _make(tmp_path / "base", layout)
    ours, theirs = _loaded(folder), _theirs(folder, torch.float32)
    assert len(ours) > 20
    for name, parameter in ours.items():
        wanted = theirs[name.removesuffix(".weight")] if name not in theirs else theirs[name]
        if wanted.dim() == 3:  # our experts are one matrix, theirs turned
            wanted = wanted.transpose(1, 2).reshape(parameter.shape)
        rounds = layout == "float8_rows" and "_proj.weight" in name
        found = parameter.bfloat16().float() if rounds else parameter
        assert torch.equal(found, wanted), name


def _train_on(rank: int, num_ranks: int, folder: str) -> None:
    """Loads every layout, sharded; trains the FP8 one by two steps; exports it high and in FP8."""
    from torch.distributed.fsdp import fully_shard

    with distributed.session("cpu") as world:
        for base in sorted(Path(folder).glob("base-*")):
            index = checkpoint.read_index(base)
            facts = checkpoint.read_config(index, lambda line: None)
            model = models.build_on_meta(facts)
            fully_shard(model, mesh=world.mesh)
            model.to_empty(device="cpu")
            checkpoint.load_hf(model, index, world)
            whole = _loaded(base)
            for name, parameter in model.named_parameters():
                for piece in distributed.local_pieces(parameter):
                    assert torch.equal(piece.values, whole[name][piece.region]), name
        cfg = tiny_run.config("float8_blockwise")
        run = tiny_run.TinyRun(cfg, world, facts)  # type: ignore[arg-type]
        checkpoint.load_hf(run.model, index, world)
        for step in (1, 2):
            with run.low.step(step, len(run.batches(step))):
                run.forward_backward(step)
            run.update()
        about = About(str(base), "rows", "float8_blockwise", None, "original", 0.0, "1", "2")
        state = {"fingerprint": base_digests(base), "about": vars(about), "stop_tokens": {}}
        state["parts"] = run_parts(cfg, run.plan, None)
        to = Path(folder) / f"steps-{num_ranks}"
        files = checkpoint.CheckpointWriter(to, run.model, run.optimizer, world, CheckpointConfig())
        with files as writer:
            path = writer.save(2, state, run.low.state(), wait=True)
        for quantized in ("none", "float8_block"):
            export = Path(folder) / f"{quantized}-{num_ranks}"
            checkpoint.export_hf(path, index, export, ExportConfig(quantized=quantized), world)


def test_it_trains_on_one_and_two_ranks_and_exports_high_precision_or_its_own_format(tmp_path: Path) -> None:
    for number, layout in enumerate(("mxfp4", "int8_rows", "fp8_blocks")):
        _make(tmp_path / f"base-{number}", layout)
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
        checkpoint.export_hf(
            tmp_path / "steps-2" / "step-00000002", base, tmp_path / "one", ExportConfig(quantized=quantized)
        )
        theirs = tmp_path / f"{quantized}-2"
        for path in sorted((tmp_path / "one").iterdir()):
            assert path.read_bytes() == (theirs / path.name).read_bytes(), path.name
        assert len(list(theirs.iterdir())) == len(list((tmp_path / "one").iterdir()))


def test_a_rank_reads_the_codes_of_its_box_and_their_scales(tmp_path: Path) -> None:
    read = list[tuple[str, int]]()

    class Slice:
        def __init__(self, part: Any, name: str) -> None:
            self.part, self.name = part, name

        def __getitem__(self, box: Any) -> Tensor:
            found: Tensor = self.part[box]
            read.append((self.name, found.numel()))
            return found

        def get_shape(self) -> list[int]:
            shape: list[int] = self.part.get_shape()
            return shape

    class File:
        def __init__(self, path: Path) -> None:
            self.opened = open_tensors(path)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.opened.get_slice(name), name)

    folder = _make(tmp_path / "base", "fp8_blocks")
    index = checkpoint.read_index(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    part = models.Part(name, (0, 0), index.tensors[name].shape)
    values = torch.empty(40, 20)  # rows 50 to 90 and columns 30 to 50: blocks 1 and 2, and 1 to 3
    read_piece(lambda file: File(folder / file), index, (part,), Piece(values, (50, 30)))
    assert torch.equal(values, _loaded(folder)[name][50:90, 30:50])
    assert read == [(f"{name}_scale_inv", 6), (name, 800)]


def _edit(folder: Path, change: Callable[[dict[str, Tensor], str], None]) -> None:
    """Changes the tensors of up_proj in layer 0, wherever they are."""
    name = "model.layers.0.mlp.up_proj.weight"
    files = {file: load_file(file) for file in folder.glob("*.safetensors")}
    tensors = {key: tensor for found in files.values() for key, tensor in found.items()}
    change(tensors, name)
    for file in files:
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


FAULTS: dict[str, tuple[str, Callable[[dict[str, Tensor], str], None], str]] = {
    "missing": ("fp8_blocks", lambda t, n: t.__delitem__(f"{n}_scale_inv"), "scale .* is missing"),
    "blocks": (
        "fp8_blocks",
        lambda t, n: t.update({f"{n}_scale_inv": t[f"{n}_scale_inv"][:2]}),
        r"\[2, 4\], \[128, 64\] of .* need a float of \[4, 4\]",
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
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scale_is_one_line(fault: str, tmp_path: Path) -> None:
    layout, change, line = FAULTS[fault]
    folder = _make(tmp_path / "base", layout)
    _edit(folder, change)
    with pytest.raises(UserError, match=line) as error:
        _loaded(folder)
    assert "\n" not in str(error.value)


def test_what_is_not_read_is_one_line_and_the_commands_know_the_rest(
    tmp_path: Path,
) -> None:
    folder = _make(tmp_path / "base", "float8_rows")
    done = warm.lptune(["verify", str(folder)], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "14 in e4m3" in done.stdout
    content = json.loads((folder / "config.json").read_text("utf-8"))
    for change, line in (
        ({"quant_method": "gptq"}, r"quantized \(gptq\)"),
        (_ct("group", "int"), "is not symmetric 8-bit"),
        (FP8 | {"weight_block_size": [0, 128]}, "two sizes of a block"),
        (None, r"stored as F8_E4M3; only .* quantization_config"),
    ):
        edited = {key: value for key, value in content.items() if key != "quantization_config"}
        edited |= {} if change is None else {"quantization_config": change}
        (folder / "config.json").write_text(json.dumps(edited), encoding="utf-8")
        with pytest.raises(UserError, match=line):
            checkpoint.read_index(folder)
