"""`lptune verify`: compares a folder with its manifest, index or digests. Reads every byte, writes none.

a checkpoint             size and sha256 of each file against its manifest
a Hugging Face folder    its index against the files, each tensor's name and shape against config.json, each
                         value for being finite; an export's files against its SHA256SUMS; where `lptune
                         download` fetched it, each file that the hub knows by its sha256 against that
a run's folder           all its checkpoints and its export
an address (s3://…)      the same of a run's copy, of a checkpoint or of an export there
"""

from collections import Counter
from pathlib import Path
from typing import Any

import click

from lptune.base.errors import UserError
from lptune.base.text import printable
from lptune.cli.download import verify_digests
from lptune.cli.places import PathArgument
from lptune.config import check_address


class _Place(PathArgument):
    """A path, or an address in object storage, which stays a text."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The argument as a checked `Path`, or as a checked address."""
        if "://" not in str(value):
            return super().convert(value, param, ctx)
        check_address("PATH", value)
        return value


@click.command()
@click.argument("path", type=_Place())
def verify(path: Path | str) -> None:
    """Check PATH: a checkpoint, a Hugging Face folder, or a run folder with all its checkpoints and export.
    Or an address of checkpoint.copy_to, of a checkpoint or of an export there.

    Reads every byte. Compares digests, which checkpoints, exports and downloads have; in a Hugging Face
    folder it also checks names, shapes and that values are finite. Exits with 2 and names the first fault, if
    any.
    """
    if isinstance(path, str):
        _verify_address(path)
        return
    if not path.is_dir():
        raise UserError(f"{path}: {'is a file; give its folder' if path.exists() else 'no such folder'}")
    if not (path / "checkpoints").is_dir():
        click.echo(f"ok: {path}: {_verify(path)}")
        return
    from lptune.base.step_folders import list_checkpoints

    parts = [*reversed(list_checkpoints(path / "checkpoints"))]
    parts += [path / "export"] if (path / "export").is_dir() else []
    num_bad = 0
    for part in parts:
        found = _identity(part)
        try:
            click.echo(f"ok: {part}: {_verify(part)}")
        except (UserError, OSError) as error:
            # Compared by identity: a run that is training removes old checkpoints and replaces an export.
            # One that went before its turn has none either time.
            if found is None or found != _identity(part):
                click.echo(f"gone: {part}: the run removed or replaced it meanwhile")
                continue
            if not isinstance(error, UserError):
                raise
            num_bad += 1
            click.echo(f"bad: {error}")
    if not parts:
        there = "here: they are at its checkpoint.copy_to" if (path / "parts").is_dir() else "yet"
        raise UserError(f"{path}: the run has neither a checkpoint nor an export {there}")
    if num_bad:
        raise UserError(f"{path}: {num_bad} of {len(parts)} are bad; see above")


def _verify_address(address: str) -> None:
    from lptune.checkpoint.at_address import verify_address

    num_bad, num = 0, 0
    for place, about, faults in verify_address(address):
        num, num_bad = num + 1, num_bad + bool(faults)
        for line in [f"bad: {fault}" for fault in faults] or [f"ok: {place}: {about}"]:
            click.echo(printable(line))
    if num_bad:
        raise UserError(f"{address}: {num_bad} of {num} are bad; see above")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:  # a disk that fails is no removal
        return None
    return found.st_dev, found.st_ino


def _verify(path: Path) -> str:
    from lptune.checkpoint import manifest

    is_checkpoint = any((path / name).exists() for name in (manifest.NAME, "state.json"))
    if not is_checkpoint and not path.name.startswith("step-"):
        if not (path / "config.json").exists() and not any(path.glob("*.safetensors")):
            raise UserError(f"{path}: is not a checkpoint, a Hugging Face folder or a run's folder")
        return _verify_hf(path)
    found = manifest.verify(path)
    return f"step {found.step}, {len(found.shards)} tensors of {found.world_size} rank(s), all bytes as saved"


def _verify_hf(folder: Path) -> str:
    from lptune import models
    from lptune.checkpoint import adapter, hf
    from lptune.checkpoint.sums import verify_sums

    index = models.read_index(folder)
    model = models.build_on_meta(hf.read_config(index, click.echo))
    adapter.match_tensors(model, index)
    num_exported, num_hashed = verify_sums(folder), verify_digests(folder)
    for name, tensor in hf.iter_tensors(index):
        num_bad = tensor.numel() - int(tensor.isfinite().sum())
        if num_bad:
            file = folder / index.tensors[name].file
            raise UserError(
                f"{file}: tensor {name!r} has {num_bad} values that are not finite; get the checkpoint again"
            )
    stored = index.tensors.values()
    dtypes = Counter(each.quantized.format if each.quantized else each.dtype for each in stored)
    summary = ", ".join(f"{count} in {dtype}" for dtype, count in dtypes.items())
    size = models.num_parameters(model) / 1e6
    as_sent = f", {num_hashed} file(s) with the hub's sha256" if num_hashed else ""
    as_exported = f", {num_exported} files as they were exported" if num_exported else ""
    return (
        f"{size:.1f} M parameters, tensors: {summary}, all finite, as config.json says{as_exported}{as_sent}"
    )
