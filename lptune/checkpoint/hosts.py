"""What must be one on all machines of a run: the config, and the folder output_dir.

lptune's launchers compare the config before a rank starts (lptune/launch/rendezvous.py). Plain torchrun does
not, so ranks that it started compare it here.

Every rank writes its part of a checkpoint into the same folder. Where that is a disk of each machine instead
of a file system that they share, the parts come together only at `checkpoint.copy_to` (parts.py); without the
key the first save would fail, and all steps until then would be lost. So it is tried before the first step:
rank 0 writes a file with a name that nobody can have seen before, and every rank opens it.
"""

import hashlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from lptune.base.errors import UserError
from lptune.base.files import TEMPORARY
from lptune.distributed import World
from lptune.launch.rendezvous import difference, tell

PATIENCE_S = 60.0
"""NFS remembers for that long that a name is missing."""
_POLL_S = 0.2


def check_one_config(cfg: Any, world: World) -> None:
    """Raises UserError if a rank has another config than rank 0; paths that may be local are not compared. A
    collective.
    """
    if world.size == 1:
        return
    mine = tell(cfg)
    # The whole of it would be megabytes from a thousand ranks.
    if len(set(world.gather(hashlib.sha256(ascii(mine).encode()).hexdigest()))) == 1:
        return
    told = world.gather([socket.gethostname(), mine])
    for rank, (host, theirs) in enumerate(told):
        if found := difference(told[0][1], theirs):
            key, first, other = found
            raise UserError(
                f"{key}: {first} on rank 0, {other} on rank {rank} ({host}); start all with one config"
            )


def check_same(what: str, digest: str, world: World) -> None:
    """Raises UserError if ranks have another `what`. digest: of what this rank has. A collective."""
    if world.size == 1:
        return
    found = world.gather([socket.gethostname(), digest])
    if others := sorted({host for host, other in found if other != found[0][1]}):
        raise UserError(
            f"{what}: is not the same on all ranks: {found[0][0]} and {', '.join(others)} differ; give all "
            "machines the same files and the same command"
        )


def check_shared(
    key: str, folder: Path, world: World, patience_s: float = PATIENCE_S, or_else: str = ""
) -> None:
    """Raises UserError if `folder`, which some rank has and `key` names, is not one for all ranks. A
    collective; without another machine it does nothing. patience_s: see `blind_machines`. or_else: a further
    way out, for the message.
    """
    if blind := blind_machines(folder, world, patience_s):
        raise UserError(
            f"{key}: what {world.gather(socket.gethostname())[0]} writes to {folder} does not appear on "
            f"{', '.join(blind)} within {patience_s:.0f} s; choose a folder in a file system that all "
            f"machines share{or_else}"
        )


def blind_machines(folder: Path, world: World, patience_s: float) -> list[str]:
    """The names of the machines that do not see within `patience_s` what rank 0 writes to `folder`, which
    some rank has. A collective; without another machine there are none.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size:
        return []
    file = folder / world.gather(f"{TEMPORARY}shared-{secrets.token_hex(8)}")[0]
    try:
        if world.is_main and folder.is_dir():
            file.touch()
        # Nobody looks before it is there: NFS would remember that it is missing.
        is_written = world.gather(world.is_main and file.exists())[0]
        deadline_s = time.monotonic() + patience_s * is_written
        while not (is_there := _opens(file)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        found = world.gather([socket.gethostname(), is_there])
    finally:
        if world.is_main:
            file.unlink(missing_ok=True)
    blind = {host for host, sees in found if not sees}
    return sorted(blind - {found[0][0]} or blind)  # where rank 0 has no folder, it sees nothing either


def rank_here() -> tuple[int, int]:
    """The number of this rank among those of its machine, and their number."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _opens(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True
