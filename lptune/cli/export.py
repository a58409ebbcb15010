"""`lptune export`: make a Hugging Face folder of a checkpoint, at any time and place, without the run.

It calls the function that writes the run's own export/ and gives bitwise the same files. It needs no GPU and
no data. The files of the checkpoint are verified first; the checkpoint names its base checkpoint.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lptune.base.errors import UserError
from lptune.cli import interrupts
from lptune.cli.places import PathArgument, check_new_folder
from lptune.config import EXPORT_FORMATS, ExportConfig

if TYPE_CHECKING:
    from lptune.checkpoint import Manifest


@click.command(short_help="Make a Hugging Face folder of a training checkpoint.")
@click.argument("checkpoint", type=PathArgument())
@click.argument("dest", type=PathArgument())
@click.option("--base", type=PathArgument(), help="Folder of the model that was trained, if it has moved.")
@click.option(
    "--dtype", type=click.Choice(["original", "float32", "bfloat16", "float16"]), help="[default: the run's]"
)
@click.option(
    "--rounding",
    type=click.Choice(["stochastic", "nearest"]),
    help="Of weights that become bfloat16.  [default: the run's]",
)
@click.option(
    "--max-shard-gib", type=float, help="Size of a weight file; 0: as imported.  [default: the run's]"
)
@click.option(
    "--average",
    type=click.IntRange(min=1),
    metavar="N",
    help="Export the mean of CHECKPOINT and the N - 1 checkpoints before it.  [default: the run's]",
)
@click.option(
    "--ema/--no-ema",
    default=None,
    help="Export the moving averages of the weights, or the weights of the last step.  [default: the run's]",
)
@click.option(
    "--quantized",
    type=click.Choice(EXPORT_FORMATS),
    help="Store what was trained in low precision in this format of servers.  [default: the run's]",
)
def export(
    checkpoint: Path,
    dest: Path,
    base: Path | None,
    dtype: str | None,
    rounding: str | None,
    max_shard_gib: float | None,
    average: int | None,
    ema: bool | None,
    quantized: str | None,
) -> None:
    """Write CHECKPOINT (checkpoints/step-… of a run, or the folder of a run, for its newest intact
    checkpoint) as the Hugging Face folder DEST. `hf upload OWNER/NAME DEST` sends it to the hub.
    """
    check_new_folder(dest)
    if ema and (average or 1) > 1:
        raise click.UsageError("--ema and --average are two averages of the weights; give one of them")
    from lptune.checkpoint import EMA, export_hf, read_index, read_state

    manifest = _verified(checkpoint)
    about = read_state(manifest).about
    folder = base or Path(about.model)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: the model that {manifest.folder} was trained from is not there; name its folder with "
            "--base"
        )
    has_averages = any(name.startswith(f"{EMA}/") for name in manifest.shards)
    if ema and not has_averages:
        raise UserError(f"{manifest.folder}: has no moving averages of the weights (optimizer.ema_decay)")
    if ema and average is None:
        average = 1
    cfg = ExportConfig(
        dtype=about.dtype if dtype is None else dtype,
        rounding=about.rounding if rounding is None else rounding,
        max_shard_gib=about.max_shard_gib if max_shard_gib is None else max_shard_gib,
        average_checkpoints=about.average_checkpoints if average is None else average,
        ema=about.ema if ema is None else ema,
        quantized=about.quantized if quantized is None else quantized,
    )
    try:
        with interrupts.Undoing():
            export_hf(manifest.folder, read_index(folder), dest, cfg, replace=False)
    except UserError as error:
        if quantized is None:
            raise
        raise UserError(str(error).replace("export.quantized", "--quantized")) from None
    count = cfg.average_checkpoints
    what = f"the mean of {count} checkpoints up to {manifest.folder}"
    if count == 1:
        what = f"{'the moving averages in ' * (cfg.ema and has_averages)}{manifest.folder}"
    high = ""
    if cfg.quantized != "none":
        high = f"; in {cfg.quantized}, {manifest.folder} has the weights in float32"
    click.echo(f"export: {dest} (step {manifest.step}, read back and compared with {what}{high})")


def _verified(path: Path) -> "Manifest":
    from lptune.checkpoint import newest_of_run, verify

    if not (path / "checkpoints").is_dir():
        return verify(path)
    found = newest_of_run(path, lambda line: click.echo(line, err=True))
    if found is None:
        raise UserError(f"{path}: the run has no checkpoint yet")
    return found
