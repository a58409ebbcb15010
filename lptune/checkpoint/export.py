"""Export: makes a Hugging Face folder of a checkpoint, with tensor names and files of the base checkpoint.

An export reads files and writes files. The checkpoint has every weight in float32, in boxes. The base
checkpoint gives the name, dtype and file of each weight. So no collective and no GPU is needed, and memory
holds only the few files that are being written. The files are divided over the ranks, and each rank assembles
the tensors of its files. `lptune export` does the same in one process, with the same bytes as result.

Every file is read back and compared with the tensors that were assembled from the checkpoint. The folder is
written beside its final path, and is published by a rename after all ranks have succeeded.

The mean of the last checkpoints may be exported. At a constant learning rate the weights move around a
minimum, and their mean over some thousand steps has a lower loss than the weights of any step: stochastic
weight averaging (arXiv:1803.05407); for checkpoints of a pre-training, LAWA (arXiv:2209.14981). After a decay
of the learning rate there is little to gain. The mean is computed tensor by tensor, in float64, and rounded
to the dtype of the export: it costs no memory in training, and the run can go on from its checkpoints.

A base in bfloat16 is exported in bfloat16, whose step is 2**-8 to 2**-7 of a weight, and AdamW changes a
weight by about the learning rate: a few steps at 1e-5 change most weights by less than half a step. To
nearest these round back to the base. So trained weights round stochastically (numerics/rounding.py), which
keeps every change in the mean over many weights.
"""

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from lptune import models
from lptune.base.cores import in_threads
from lptune.base.errors import UserError
from lptune.base.files import fsync_path, kind_of, open_regular, read_json, write_json, write_text
from lptune.base.model_folder import generation_config, model_file, read_stop_ids, transformers_stop_ids
from lptune.base.step_folders import list_checkpoints, step_folder_name, step_of
from lptune.base.text import size_text
from lptune.checkpoint.adapter import Source, arranged, match_tensors, read_box, region
from lptune.checkpoint.card import model_card, read_parts
from lptune.checkpoint.files import (
    WRITE_ERRORS,
    Scratch,
    free_bytes,
    publish_folder,
    save_tensors,
    set_aside,
    why,
)
from lptune.checkpoint.hf import read_config
from lptune.checkpoint.hosts import rank_here
from lptune.checkpoint.load import StoredFiles
from lptune.checkpoint.manifest import Manifest, read_manifest, verify
from lptune.checkpoint.quantized import Form, Quantizer, how_to_quantize, kind_for, modules_that_stay_high
from lptune.checkpoint.state import check_base, read_state
from lptune.checkpoint.sums import TEMPLATES, is_as_written, lines_of, write_sums
from lptune.config import ExportConfig
from lptune.distributed import Piece, SideGroup, World, side_group
from lptune.linear import INT8_SCALE, KINDS, Plan
from lptune.models.headers import INDEX_NAME, SINGLE_NAME, HFIndex, open_tensors
from lptune.models.quantized import QUANTIZED_KEYS
from lptune.numerics import random_key, stochastic_round_to_bfloat16

# The files of the base checkpoint that describe model and tokenizer. Weights and code are not copied.
_COPIED = (
    "*.json",
    "*.jinja",
    f"{TEMPLATES}/*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
EMA = "ema"
"""Of the tensors `ema/NAME` of a checkpoint: the moving average of the weight NAME (training/adamw.py)."""
_FILES_AT_ONCE = 2  # per rank: one file is assembled while the other is flushed to disk
_ROUNDED_AT_ONCE = 2**22  # elements, of which rounding has some copies
_HEADERS_BYTES = 512  # upper estimate per tensor, in its file's header and in the index


class Target(NamedTuple):
    """A tensor of the export."""

    sources: tuple[Source, ...]
    """The parameters in the checkpoint that it consists of; (): it is copied from the base."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    rounding: str = "nearest"
    """`export.rounding`, which a weight in bfloat16 is subject to."""
    form: Form | None = None
    """The tensors that stand for a quantized one (quantized.py); None: it is not."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in its file."""
        stored = [(self.shape, self.dtype)] if self.form is None else self.form.values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in stored)


Files = dict[str, dict[str, Target]]
"""By file name: the tensors that the file will contain, by stored name."""


def export_hf(
    checkpoint: Path,
    base: HFIndex,
    folder: Path,
    cfg: ExportConfig,
    world: World | None = None,
    *,
    replace: bool = True,
    manifests: Sequence[Manifest] = (),
    publish: Callable[[Path, Sequence[str], SideGroup], None] | None = None,
) -> Path:
    """Writes the weights of a verified checkpoint as a Hugging Face folder; returns `folder`.

    base: the index of the base checkpoint. Tensor names and files stay the same; config.json and tokenizer
    files are copied, and generation_config.json gets the tokens that the training rows end answers with.
    cfg.average_checkpoints: the mean of this and earlier checkpoints in its folder is exported.
    cfg.ema: the moving averages of the weights are exported, where the checkpoint has them.
    world: all of its ranks call this. None: this process alone exports.
    replace: whether this export may replace `folder`, if that exists. An earlier export that was not changed,
    or an empty folder, is deleted. Anything else is renamed, and a line is printed. If False: only an empty
    folder is replaced.
    manifests, publish: where machines have a disk each, those of the checkpoints whose mean is exported,
    newest first, and what gets this machine's `folder` and the names of this rank's files. The folder is then
    no export; on rank 0 it has SHA256SUMS.

    Raises UserError, the same on all ranks: if checkpoint and base do not belong together, if the disk has
    too little room, if writing fails, or if a file does not read back equal. `folder` is then unchanged.
    """
    say = print if world is None else world.print
    made: Scratch | None = None
    with side_group(world) as group:
        try:
            with _together(group, checkpoint, folder):
                manifest = manifests[0] if manifests else read_manifest(checkpoint)
                state = read_state(manifest)
                parts = read_parts(state)
                check_base(state, base.folder)
                quantizer = None
                if cfg.quantized != "none":
                    quantizer = how_to_quantize(cfg.quantized, state, parts[-1])
                files = plan_files(base, cfg, quantizer)
            averaged = manifests or last_checkpoints(manifest, cfg.average_checkpoints, group)
            shares = deal_out(files, group.size)
            with _together(group, checkpoint, folder):
                if publish is not None:
                    if rank_here()[0] == 0:
                        here = shares[group.rank :][: rank_here()[1]]
                        _check_space(folder, {file: files[file] for share in here for file in share}, base)
                        shutil.rmtree(folder, ignore_errors=True)
                elif group.rank == 0:
                    _check_space(folder, files, base)
                    if not replace:  # an export of a run goes into the run's folder, which must exist
                        folder.parent.mkdir(parents=True, exist_ok=True)
                    made = Scratch(folder)
            scratch = Scratch.path_of(folder) if publish is None else folder
            with _together(group, checkpoint, folder):
                if publish is not None:
                    scratch.mkdir(parents=True, exist_ok=True)
                stored = [StoredFiles(each) for each in averaged]
                if cfg.ema and cfg.average_checkpoints == 1:
                    files = of_averages(files, manifest)
                mine = shares[group.rank]
                in_threads(
                    (
                        partial(_write, scratch / file, files[file], stored, base, state.frozen, quantizer)
                        for file in mine
                    ),
                    _FILES_AT_ONCE,
                )
                lines = lines_of(scratch, mine)
            lines = [line for of_rank in group.gather(lines) for line in of_rank]
            with _together(group, checkpoint, folder):
                if group.rank == 0:
                    weights = _which(files, averaged)
                    in_8_bits = None if quantizer is None else _described(quantizer, files, checkpoint)
                    card = model_card(state, parts, weights, in_8_bits)
                    _write_rest(scratch, base, files, cfg, state.about.chat_template, card, quantizer)
                    for note in quantizer.notes if quantizer else ():
                        say(note)
                    _write_stops(scratch, state.stop_tokens, say)
                    mine += write_sums(scratch, lines)
                    if made is not None:
                        for path in scratch.rglob("*"):
                            fsync_path(path)
                        with made.alone():
                            made.unmark()
                            _publish(scratch, folder, replace, say)
            if publish is not None:
                publish(folder, mine, group)
        finally:
            # Remove what a failure leaves. All ranks have stopped writing.
            if made is not None:
                made.remove()
    return folder


def check_form(base: HFIndex, cfg: ExportConfig, plan: Plan, kind: str) -> None:
    """Raises UserError if `export.quantized`, which is not `none`, has no form for a layer that `plan`
    converts. So a run ends before it trains, not after. kind: `precision.kind`.
    """
    low = frozenset(f"{layer.name}.weight" for layer in plan.converted)
    rounds = kind_for(cfg.quantized, KINDS[kind])
    plan_files(base, cfg, Quantizer(cfg.quantized, rounds, torch.float32, low, ()))


def plan_files(base: HFIndex, cfg: ExportConfig, quantizer: Quantizer | None = None) -> Files:
    """The tensors of each file of the export: the files of `base`, or, if export.max_shard_gib is set, new
    files of at most that size. quantizer: of a known checkpoint that is exported in 8 bits.
    """
    model = models.build_on_meta(read_config(base, say=lambda note: None))  # the run has printed the notes
    writes = match_tensors(model, base).writes
    holders: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, sources in writes.items():
        for source in sources:
            holders.setdefault((source.parameter, source.part.start), []).append(name)
    targets: dict[str, Target] = {}
    for name, sources in writes.items():
        # A tied weight gets the widest dtype of its names. Rounded to two dtypes, it would not be tied.
        same = [name, *(each for source in sources for each in holders[source.parameter, source.part.start])]
        widest = reduce(torch.promote_types, (getattr(torch, base.tensors[each].dtype) for each in same))
        dtype = widest if cfg.dtype == "original" or not sources else getattr(torch, cfg.dtype)
        target = Target(sources, base.tensors[name].shape, dtype, cfg.rounding)
        form = None if quantizer is None else quantizer.form_of(name, target.shape, sources)
        targets[name] = target._replace(form=form)
    targets = {name: targets[name] for name in base.tensors if name in targets}
    files: Files = {}
    if not cfg.max_shard_gib:
        for name, target in targets.items():
            files.setdefault(base.tensors[name].file, {})[name] = target
        return files
    shards: list[dict[str, Target]] = [{}]
    for name, target in targets.items():
        if shards[-1] and _num_bytes(shards[-1]) + target.num_bytes > cfg.max_shard_gib * 2**30:
            shards.append({})
        shards[-1][name] = target
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def of_averages(files: Files, checkpoint: Manifest) -> Files:
    """The same files, of the moving averages of the weights that the checkpoint has."""

    def averaged(source: Source) -> Source:
        average = f"{EMA}/{source.parameter}"
        return source._replace(parameter=average) if average in checkpoint.shards else source

    return {
        file: {
            name: target._replace(sources=tuple(map(averaged, target.sources)))
            for name, target in targets.items()
        }
        for file, targets in files.items()
    }


def _which(files: Files, averaged: Sequence[Manifest]) -> str | None:
    """Which weights are exported, for the model card, if not those of the last step."""
    if len(averaged) > 1:
        return f"mean of the checkpoints of steps {', '.join(map(str, sorted(e.step for e in averaged)))}"
    sources = [each for targets in files.values() for target in targets.values() for each in target.sources]
    has_averages = any(source.parameter.startswith(f"{EMA}/") for source in sources)
    return "moving averages of the weights (optimizer.ema_decay)" if has_averages else None


def deal_out(files: Files, num_ranks: int) -> list[list[str]]:
    """The files that each rank writes. Largest file first, each goes to the rank that has fewest bytes."""
    size = {file: _num_bytes(tensors) for file, tensors in files.items()}
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    for file in sorted(files, key=lambda file: -size[file]):
        min(shares, key=lambda share: sum(size[each] for each in share)).append(file)
    return shares


def _together(group: SideGroup, checkpoint: Path, folder: Path) -> AbstractContextManager[None]:
    def line_of(error: Exception) -> str:
        if isinstance(error, UserError):
            return str(error)
        return (
            f"{folder}: the export cannot be written: {why(error)}; {checkpoint} is intact; `lptune export` "
            "writes it elsewhere, or here once the cause is gone"
        )

    return group.together((*WRITE_ERRORS, UserError), line_of)


def _check_space(folder: Path, files: Files, base: HFIndex) -> None:
    needed = sum(_num_bytes(tensors) + _HEADERS_BYTES * len(tensors) for tensors in files.values())
    needed += sum(path.stat().st_size for path in _copied(base.folder))
    nearest = next(part for part in folder.absolute().parents if part.exists())
    free = free_bytes(nearest)
    if free < needed:
        raise UserError(
            f"{folder}: the export takes {size_text(needed)}, {size_text(free)} are free there; "
            "free some, or write it elsewhere with `lptune export`"
        )


def _copied(folder: Path) -> list[Path]:
    """The files of the base checkpoint that are copied. No link leads out of the folder."""
    found = [path for pattern in _COPIED for path in folder.glob(pattern) if path.name != INDEX_NAME]
    return [path for path in found if model_file(folder, path).is_file()]


def _num_bytes(tensors: dict[str, Target]) -> int:
    return sum(target.num_bytes for target in tensors.values())


def _described(quantizer: Quantizer, files: Files, checkpoint: Path) -> str:
    """What the model card says of an export in 8 bits."""
    count = sum(target.form is not None for targets in files.values() for target in targets.values())
    return (
        f"{quantizer.format}, {count} matrices, rounded as by {quantizer.kind.name}; the weights in float32 "
        f"are in {checkpoint.name} of the run"
    )


def _write(
    path: Path,
    targets: dict[str, Target],
    stored: Sequence[StoredFiles],
    base: HFIndex,
    frozen: frozenset[str],
    quantizer: Quantizer | None,
) -> None:
    """Writes a file and reads it back."""
    tensors = dict[str, Tensor]()
    for name, target in targets.items():
        if target.form is None:
            tensors[name] = _assemble(name, target, stored, base, frozen)
            continue
        assert quantizer is not None
        w_NK = _assemble(name, target._replace(dtype=torch.float32), stored, base, frozen)
        beside = _beside(target, stored, frozen)
        tensors |= quantizer.quantize(name, w_NK, target.form, beside)
    save_tensors(path, tensors)
    with safe_open(str(path), framework="pt", device="cpu") as written:
        for name, tensor in tensors.items():
            if not _same_bits(written.get_tensor(name), tensor):
                raise UserError(
                    f"{path}: tensor {name!r} does not read back as written; disk or memory is at fault"
                )


def _assemble(
    name: str, target: Target, stored: Sequence[StoredFiles], base: HFIndex, frozen: frozenset[str]
) -> Tensor:
    """The tensor `name` of the export, box by box: the mean of the checkpoints, or the values of `base`."""
    is_trained = any(source.parameter not in frozen for source in target.sources)
    stochastic = is_trained and target.dtype == torch.bfloat16 and target.rounding == "stochastic"
    tensor = torch.empty(target.shape, dtype=torch.float32 if stochastic else target.dtype)
    # A frozen weight comes from the base: a run may hold it in 8 bits, of which checkpoints have the values.
    if not target.sources or any(source.parameter in frozen for source in target.sources):
        tensor.copy_(read_box(lambda file: open_tensors(base.folder / file), base, name))
    for parameter, shape, part in target.sources:
        if parameter in frozen:
            continue
        box = arranged(part, tensor[region(part)])
        if len(stored) > 1:
            box.copy_(mean(stored, parameter, shape, part.start, part.sizes))
        else:
            stored[0].read(parameter, [Piece(box, part.start)], shape, None)
    if stochastic:  # tied weights have the same sources, and so the same bits
        source = target.sources[0]
        key = random_key(0, stored[0].manifest.step, f"{source.parameter} {source.part.start}")
        return _round_stochastically(tensor, key)
    if target.dtype == torch.float16 and not tensor.isfinite().all():
        raise UserError(
            f"{stored[0].manifest.folder}: {name!r} has values beyond float16's 65504; export it "
            "as bfloat16 or float32"
        )
    return tensor


def _round_stochastically(x: Tensor, key: int) -> Tensor:
    """`x`, float32, in bfloat16, with the random bits that `key` decides."""
    generator = torch.Generator().manual_seed(key)
    rounded = torch.empty_like(x, dtype=torch.bfloat16)
    for part, to in zip(
        x.view(-1).split(_ROUNDED_AT_ONCE), rounded.view(-1).split(_ROUNDED_AT_ONCE), strict=True
    ):
        to.copy_(stochastic_round_to_bfloat16(part, torch.rand(len(part), generator=generator)))
    return rounded


def _beside(target: Target, stored: Sequence[StoredFiles], frozen: frozenset[str]) -> dict[str, Tensor]:
    """The scales of a weight that the run itself stores in INT8, if it is exported as it is."""
    prefix, scale_N1 = INT8_SCALE, torch.empty(target.shape[0], 1)
    for parameter, shape, part in target.sources:
        name = f"{prefix}/{parameter}"
        if len(stored) > 1 or parameter in frozen or name not in stored[0].manifest.shards:
            return {}
        rows = scale_N1[region(part)[0]]
        stored[0].read(name, [Piece(rows, (part.start[0], 0))], (shape[0], 1), torch.float32)
    return {prefix: scale_N1}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Compares bytes, so that NaN equals itself and -0.0 differs from 0.0.
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def _write_rest(
    scratch: Path,
    base: HFIndex,
    files: Files,
    cfg: ExportConfig,
    chat_template: str | None,
    card: str,
    quantizer: Quantizer | None,
) -> None:
    for path in _copied(base.folder):
        to = scratch / path.relative_to(base.folder)
        if to.parent != scratch:
            if chat_template is not None:
                continue  # the run used one template, data.chat_template, for rows with and without tools
            to.parent.mkdir(exist_ok=True)
        with (
            open(open_regular(model_file(base.folder, path), os.O_RDONLY), "rb") as read,
            to.open("xb") as written,
        ):
            shutil.copyfileobj(read, written)
    content = read_json(scratch / "config.json")
    corrections: dict[str, Any] = {}
    if cfg.dtype != "original":
        # transformers 5 writes `dtype`, older versions `torch_dtype`. The key that is there is corrected.
        corrections["dtype" if "dtype" in content else "torch_dtype"] = cfg.dtype
    facts = models.read_config(base.folder)
    words = [targets[name] for targets in files.values() for name in facts.word_names if name in targets]
    parameters = {source.parameter for target in words for source in target.sources}
    if len(parameters) > 1 and facts.tied:  # other readers would drop the head
        corrections["tie_word_embeddings"] = False
    if quantizer is not None:
        stored = {name: target for targets in files.values() for name, target in targets.items()}
        quantized = {name for name, target in stored.items() if target.form}
        shapes = {name: stored[name].shape for name in base.tensors if name in stored}
        high = modules_that_stay_high(shapes, quantized, facts.word_names)
        is_part = isinstance(content.get("text_config"), dict)
        corrections["quantization_config"] = quantizer.config(high, is_part=is_part)
    kept = {key: value for key, value in content.items() if key not in QUANTIZED_KEYS}
    if corrections or len(kept) < len(content):
        write_json(scratch / "config.json", kept | corrections)
    if chat_template is not None:
        write_text(scratch / "chat_template.jinja", chat_template)
    if len(files) > 1 or (base.has_index_file and not cfg.max_shard_gib):
        file_of = {name: (file, target) for file, each in files.items() for name, target in each.items()}
        weight_map = {
            each: file_of[name][0]
            for name in base.tensors
            if name in file_of
            for each in file_of[name][1].form or (name,)
        }
        total_size = sum(_num_bytes(tensors) for tensors in files.values())
        write_json(scratch / INDEX_NAME, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    write_text(scratch / "README.md", card)


def _write_stops(scratch: Path, learned: Mapping[str, int] | None, say: Callable[[str], None]) -> None:
    """Adds the tokens that the answers of the training rows end with to the stop ids of the export. Without
    them, a base model that has learned chats runs on after its answer in every other program.
    """
    if learned is None:
        say(
            "note: the checkpoint does not say which tokens end an answer (an older version made it, or a "
            "recipe that passes no `stops`); generation_config.json stays that of the base"
        )
        return
    stop_ids = transformers_stop_ids(scratch)
    added = {text: each for text, each in learned.items() if each not in stop_ids}
    if added:
        content = generation_config(scratch, [*dict.fromkeys([*read_stop_ids(scratch), *added.values()])])
        write_json(scratch / "generation_config.json", content)
        names = ", ".join(f"{text} ({each})" for text, each in added.items())
        say(f"generation_config.json: generation ends at {names}, too, as the answers of the data do")


def _publish(scratch: Path, folder: Path, replace: bool, say: Callable[[str], None]) -> None:
    old, goes = None, False
    if folder.exists() or folder.is_symlink():
        # The old export is deleted after the new one was published. A symbolic link is renamed, not followed.
        if replace:
            goes = is_as_written(folder) or (kind_of(folder) == "a folder" and not any(folder.iterdir()))
            old = set_aside(folder)
        else:
            try:
                folder.rmdir()
            except OSError as error:
                raise UserError(
                    f"{folder}: something else was written there meanwhile ({error.strerror}); choose "
                    "another folder"
                ) from None
    try:
        publish_folder(scratch, folder)
    except OSError:
        if old is not None and not folder.exists():
            old.rename(folder)
        raise
    if old is not None and goes:
        shutil.rmtree(old, ignore_errors=True)
    if old is not None and os.path.lexists(old):
        why_left = "could not be removed" if goes else "is not an unchanged export of lptune"
        say(f"set aside: {folder}, which {why_left} -> {old.name}")


def last_checkpoints(newest: Manifest, count: int, group: SideGroup) -> list[Manifest]:
    """`newest`, a verified checkpoint, and the `count - 1` checkpoints before it in its folder, newest first.
    Verifies them. All ranks of `group` call this.

    Raises UserError, the same on all ranks, if there are fewer, if one of them is damaged, or if one is of
    another run.
    """
    folder = newest.folder.parent
    found = [step for path in list_checkpoints(folder) if (step := step_of(path)) < newest.step]
    steps = group.all_of_main(found[: count - 1])
    num_found = 1 + len(steps)
    if num_found < count:
        raise UserError(
            f"{folder}: has {num_found} checkpoint{'s' * (num_found > 1)} up to step {newest.step}, and the "
            f"export is to average {count}; average fewer (export.average_checkpoints, or `lptune export "
            f"--average {num_found}`)"
        )
    earlier = [verify(folder / step_folder_name(step), group) for step in steps]
    with group.together((UserError, OSError), why):
        run = read_state(newest).fingerprint
        for manifest in earlier:
            if read_state(manifest).fingerprint != run:
                raise UserError(
                    f"{manifest.folder}: is of another run than {newest.folder.name}, with other data or "
                    "another model; move it away, or average fewer checkpoints"
                )
    return [newest, *earlier]


def mean(
    checkpoints: Sequence[StoredFiles],
    name: str,
    shape: Sequence[int],
    start: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Tensor:
    """The mean of a box of the tensor `name`, of `shape`, over `checkpoints`: float64, of `sizes`. Takes 12
    bytes per element of the box.

    Raises UserError as `StoredFiles.read` does.
    """
    total, values = torch.zeros(sizes, dtype=torch.float64), torch.empty(sizes, dtype=torch.float32)
    for files in checkpoints:
        files.read(name, [Piece(values, start)], shape, None)
        total += values
    return total / len(checkpoints)
