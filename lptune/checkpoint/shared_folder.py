"""Whether all machines see one output_dir.

Every rank writes its part of a checkpoint into the same folder. Where that is a disk of each machine instead
of a file system that they share, the first save would fail, and all steps until then would be lost. So it is
tried before the first step: rank 0 writes a file with a name that nobody can have seen before, and every rank
opens it.
"""

import os
import secrets
import socket
import time
from pathlib import Path

from lptune.config import TEMPORARY, UserError
from lptune.distributed import World

_PATIENCE_S = 60.0  # NFS remembers for that long that a name is missing
_POLL_S = 0.5


def check_shared(folder: Path, world: World) -> None:
    """Raises UserError if `folder`, which some rank has, is not one for all ranks: if one does not see
    what rank 0 writes there. A collective; without another machine it does nothing.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world.size:
        return
    file = folder / world.gather(f"{TEMPORARY}shared-{secrets.token_hex(8)}")[0]
    try:
        if world.is_main and folder.is_dir():
            file.touch()
        is_written = world.gather(file.exists())[0]
        deadline_s = time.monotonic() + _PATIENCE_S * is_written
        while not (is_there := _opens(file)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        found = world.gather([socket.gethostname(), is_there])
    finally:
        if world.is_main:
            file.unlink(missing_ok=True)
    if blind := sorted({host for host, sees in found if not sees}):
        raise UserError(
            f"output_dir: what {found[0][0]} writes to {folder} does not appear on {', '.join(blind)} within "
            f"{_PATIENCE_S:.0f} s; choose a folder in a file system that all machines share"
        )


def _opens(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True
