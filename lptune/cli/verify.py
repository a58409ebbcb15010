"""`lptune verify`: does a folder hold what it promises? Reads every byte, changes none.

A checkpoint of a run is checked against its manifest (size and sha256 of each file). A Hugging Face folder
has no manifest: there, the index is checked against the files, every tensor's name and shape against
config.json, every value for being finite.
"""

from collections import Counter
from pathlib import Path

import click

from lptune.config import UserError


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def verify(path: Path) -> None:
    """Check the checkpoint or Hugging Face folder PATH."""
    from lptune.checkpoint import manifest

    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if (path / manifest.NAME).exists() or path.name.startswith("step-"):
        found = manifest.verify(path)
        click.echo(
            f"ok: {path}: step {found.step}, {len(found.shards)} tensors "
            f"of {found.world_size} rank(s), all bytes as saved"
        )
    elif (path / "checkpoints").is_dir():
        raise UserError(f"{path}: is a run's folder; verify its checkpoints/step-… or its export")
    else:
        click.echo(f"ok: {path}: {_verify_hf(path)}")


def _verify_hf(folder: Path) -> str:
    from lptune import models
    from lptune.checkpoint import hf

    model = models.build_on_meta(models.read_config(folder))
    index = hf.read_index(folder)
    hf.match_tensors(model, index)
    for name, tensor in hf.iter_tensors(index):
        num_bad = tensor.numel() - int(tensor.isfinite().sum())
        if num_bad:
            file = folder / index.tensors[name].file
            raise UserError(
                f"{file}: tensor {name!r} has {num_bad} values that are not finite; get the checkpoint again"
            )
    dtypes = Counter(str(stored.dtype).removeprefix("torch.") for stored in index.tensors.values())
    summary = ", ".join(f"{count} in {dtype}" for dtype, count in dtypes.items())
    size = models.num_parameters(model) / 1e6
    return f"{size:.1f} M parameters, tensors: {summary}, all finite, as config.json says"
