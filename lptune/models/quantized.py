"""Folders whose weights are stored quantized: which tensors of their files are one weight, and how.

`quantization_config` of config.json names the format. Of these, lptune reads

    fp8                  X.weight e4m3 (N, K), X.weight_scale_inv (or X.weight_scale) per tensor or block of W
    compressed-tensors   X.weight int8 or e4m3 (N, K), X.weight_scale per tensor, row or block of W;
                         X.weight_packed int32 (N, K / 8), X.weight_scale per G columns of a row: 4 bits
    mxfp4                X_blocks uint8 (E, N, K / 32, 16), X_scales uint8 (E, N, K / 32): X is (E, K, N)

`resolve` turns the headers of such files into those of the weights, as if they were stored in the dtype that
config.json names: the names map, the loader, plan and verify see these alone. Values are read by
checkpoint/adapter.py, box by box. Faults of names, shapes and dtypes are found here, from the headers.
This file imports no torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.models.headers import DTYPES, StoredTensor
from lptune.models.keys import Keys

QUANTIZED_KEYS = ("quantization_config", "compression_config")
"""The keys of config.json that name a format; the second in older files."""
MX_GROUP = 32
"""Elements of a row that share a scale in mxfp4; 16 bytes."""
PACKED = 8
"""Codes of 4 bits in an int32, each plus 8, the first in the lowest bits."""
_PACKED_NAME = ".weight_packed"

_ONLY_SERVED = re.compile(r"\.(input_scale|activation_scale|k_scale|v_scale)$")  # of tokens and caches
_CODES = {"I8": "int8", "F8_E4M3": "e4m3"}
_READS = "lptune reads fp8, compressed-tensors in 8 or packed 4 bits, and mxfp4; start from its original"


@dataclass(frozen=True)
class Quantized:
    """How a weight is stored: as codes, and scales that dequantize them, w ≈ code * scale."""

    format: str
    """`int8`, `e4m3`, `int4` (packed), `mxfp4`."""
    codes: str
    """Name of the tensor with the codes, in the file of the weight."""
    scale: str
    scale_file: str
    block: tuple[int, int]
    """Rows and columns of the matrix that share a scale; of mxfp4 (1, MX_GROUP) of a transposed matrix."""


@dataclass(frozen=True)
class _Scheme:
    """What config.json says of a format."""

    method: str
    block: tuple[int, int] | None = None
    """Of the weights; None: whole rows or tensors, as the scales' shapes say."""


def read_scheme(keys: Keys) -> _Scheme | None:
    """The format of a folder, from its config.json; None: its weights are not quantized. Raises UserError for
    a format that lptune does not read.
    """
    key = next((key for key in QUANTIZED_KEYS if keys.get(key) is not None), "")
    found = keys.get(key)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise keys.error(key, f"expected settings, found {found!r:.40}; download the file again")
    for runtime in ("transform_config", "sparsity_config"):
        value = found.get(runtime) or {}
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise keys.error(key, f"{runtime} changes what the weights compute, which is not read; {_READS}")
    method = found.get("quant_method")
    if method == "fp8":
        size = found.get("weight_block_size")
        return _Scheme("fp8", None if size is None else _block(keys, key, size))
    if method == "mxfp4":
        return _Scheme("mxfp4")
    if method != "compressed-tensors":
        raise keys.error(key, f"the checkpoint is quantized ({str(method)[:40]}); {_READS}")
    groups, blocks = found.get("config_groups"), set[tuple[int, int] | None]()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        weights = weights if isinstance(weights, dict) else {}
        strategy, is_symmetric = weights.get("strategy"), weights.get("symmetric", True)
        bits, size = weights.get("num_bits"), weights.get("group_size")
        is_packed = found.get("format") == "pack-quantized" and strategy == "group" and bits == 4
        if is_packed and is_symmetric and type(size) is int and size > 0 and not weights.get("actorder"):
            blocks.add((1, size))
            continue
        if not is_symmetric or bits != 8 or strategy not in ("tensor", "channel", "block"):
            of = str(found.get("format"))[:40]
            raise keys.error(key, f"compressed-tensors ({of}) is not symmetric 8-bit; {_READS}")
        blocks.add(_block(keys, key, weights.get("block_structure")) if strategy == "block" else None)
    if len(blocks) != 1:
        raise keys.error(key, "needs config_groups with weights of one block size; download the file again")
    return _Scheme(method, blocks.pop())


def _block(keys: Keys, key: str, found: Any) -> tuple[int, int]:
    if not (isinstance(found, list) and len(found) == 2 and all(type(s) is int and s > 0 for s in found)):
        raise keys.error(key, f"expected the two sizes of a block, found {found!r:.40}")
    return found[0], found[1]


def resolve(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The weights of a folder, by name, from the tensors of its files, whose dtypes have safetensors' names.

    Raises UserError for a quantized tensor that config.json does not explain, for a scale that is missing, of
    another shape or dtype than config.json asks for, and as `read_scheme` does.
    """
    config = folder / "config.json"
    keys = Keys.from_file(config) if config.is_file() else Keys({}, {}, str(config))
    scheme = read_scheme(keys)
    text = keys.get("text_config")
    named = [
        each.get(key)
        for each in (keys.given, text)
        if isinstance(each, dict)
        for key in ("dtype", "torch_dtype")
    ]
    dtype = next((str(name) for name in named if name in DTYPES.values()), "bfloat16")
    found = dict[str, StoredTensor]()
    used = set[str]()
    for name, tensor in tensors.items():
        if scheme is None or tensor.dtype in DTYPES.values():
            found[name] = tensor
        elif scheme.method == "mxfp4" and name.endswith("_blocks"):
            found[name.removesuffix("_blocks")] = _of_blocks(folder, name, tensors, dtype, used)
        elif tensor.dtype == "I32" and name.endswith(_PACKED_NAME) and scheme.block is not None:
            weight = name.removesuffix("_packed")
            found[weight] = _of_packed(folder, weight, tensors, scheme.block[1], dtype, used)
        elif tensor.dtype in _CODES and name.endswith(".weight") and scheme.method != "mxfp4":
            found[name] = _of_codes(folder, name, tensors, scheme, dtype, used)
        else:
            found[name] = tensor
    found = {name: each for name, each in found.items() if name not in used}
    if scheme is not None:
        found = {name: each for name, each in found.items() if not _ONLY_SERVED.search(name)}
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES.values():
            hint = "" if scheme else ", or in a format that quantization_config of config.json names"
            raise UserError(
                f"{folder / tensor.file}: tensor {name!r} is stored as {tensor.dtype}; only "
                f"{', '.join(DTYPES)} can be trained (a quantized checkpoint cannot){hint}"
            )
    return found


def _of_codes(
    folder: Path,
    name: str,
    tensors: Mapping[str, StoredTensor],
    scheme: _Scheme,
    dtype: str,
    used: set[str],
) -> StoredTensor:
    codes = tensors[name]
    suffixes = ("_scale_inv", "_scale") if scheme.method == "fp8" else ("_scale",)
    scale = next((f"{name}{each}" for each in suffixes if f"{name}{each}" in tensors), None)
    if scale is None:
        raise _missing(folder / codes.file, name, codes.dtype, f"{name}{suffixes[0]}")
    (n, k), shape = codes.shape if len(codes.shape) == 2 else (0, 0), tensors[scale].shape
    # A scale of one element may have any number of dimensions, one per row may lack the second.
    is_one = math.prod(shape) == 1
    block = scheme.block
    legal = {(1, 1): (n, k), (n, 1): (1, k)}
    if block is not None:
        legal = {(-(-n // block[0]), -(-k // block[1])): block}
    grid = (1, 1) if is_one else (*shape, 1)[:2]
    if not n or grid not in legal or len(shape) > 2 or tensors[scale].dtype not in DTYPES.values():
        wanted = " or ".join(str(list(each)) for each in legal)
        raise UserError(
            f"{folder / tensors[scale].file}: scale {scale!r} is {tensors[scale].dtype} {list(shape)}, "
            f"{list(codes.shape)} of {name!r} need a float of {wanted} by config.json; they do not belong "
            "together"
        )
    used.add(scale)
    how = Quantized(_CODES[codes.dtype], name, scale, tensors[scale].file, legal[grid])
    return replace(codes, dtype=dtype, quantized=how)


def _of_packed(
    folder: Path, name: str, tensors: Mapping[str, StoredTensor], group: int, dtype: str, used: set[str]
) -> StoredTensor:
    codes, scale = tensors[f"{name}_packed"], f"{name}_scale"
    if scale not in tensors:
        raise _missing(folder / codes.file, f"{name}_packed", codes.dtype, scale)
    rows, found = codes.shape[0] if len(codes.shape) == 2 else 0, tensors[scale]
    num_columns = group * found.shape[1] if len(found.shape) == 2 else 0
    is_float = found.dtype in DTYPES.values()
    if not is_float or found.shape[:1] != (rows,) or codes.shape[1:] != (-(-num_columns // PACKED),):
        raise UserError(
            f"{folder / found.file}: scale {scale!r} is {found.dtype} {list(found.shape)}, of {group} "
            f"columns each, and does not belong to {list(codes.shape)} of {name + '_packed'!r}"
        )
    used.update((scale, f"{name}_shape"))
    how = Quantized("int4", f"{name}_packed", scale, found.file, (1, group))
    return StoredTensor(codes.file, (rows, num_columns), dtype, how)


def _of_blocks(
    folder: Path, name: str, tensors: Mapping[str, StoredTensor], dtype: str, used: set[str]
) -> StoredTensor:
    blocks, scale = tensors[name], f"{name.removesuffix('_blocks')}_scales"
    if scale not in tensors:
        raise _missing(folder / blocks.file, name, blocks.dtype, scale)
    found = tensors[scale]
    dtypes = (blocks.dtype, found.dtype)
    if len(blocks.shape) != 4 or blocks.shape[3] != MX_GROUP // 2 or dtypes != ("U8", "U8"):
        raise UserError(
            f"{folder / blocks.file}: {name!r} is {blocks.dtype} {list(blocks.shape)}, mxfp4 has U8 "
            f"[experts, rows, groups, {MX_GROUP // 2}]; download the checkpoint again"
        )
    if found.shape != blocks.shape[:3]:
        raise UserError(
            f"{folder / found.file}: scale {scale!r} has shape {list(found.shape)}, {name!r} needs "
            f"{list(blocks.shape[:3])}; they do not belong together"
        )
    used.add(scale)
    experts, rows, groups, _ = blocks.shape
    how = Quantized("mxfp4", name, scale, found.file, (1, MX_GROUP))
    return StoredTensor(blocks.file, (experts, groups * MX_GROUP, rows), dtype, how)


def _missing(path: Path, name: str, dtype: str, scale: str) -> UserError:
    return UserError(
        f"{path}: {name!r} is stored as {dtype}, and its scale {scale!r} is missing; download the checkpoint "
        "again"
    )
