"""The mean of the last checkpoints of a run, for an export.

At a constant learning rate the weights move around a minimum, and their mean over some thousand steps has a
lower loss than the weights of any step: stochastic weight averaging (arXiv:1803.05407); for checkpoints of a
pre-training, LAWA (arXiv:2209.14981). After a decay of the learning rate there is little to gain.

The mean is computed when the weights are exported, tensor by tensor: it costs no memory in training, and the
run can go on from its checkpoints. Each tensor is summed in float64 and rounded once, to the dtype of the
export.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lptune.base.errors import UserError
from lptune.checkpoint.files import why
from lptune.checkpoint.load import StoredFiles
from lptune.checkpoint.manifest import Manifest, list_checkpoints, step_folder_name, step_of, verify
from lptune.checkpoint.state import read_state
from lptune.distributed import Piece, SideGroup


def last_checkpoints(newest: Manifest, count: int, group: SideGroup) -> list[Manifest]:
    """`newest`, a verified checkpoint, and the `count - 1` checkpoints before it in its folder, newest first.
    Verifies them. All ranks of `group` call this.

    Raises UserError, the same on all ranks, if there are fewer, if one of them is damaged, or if one is of
    another run.
    """
    folder = newest.folder.parent
    steps = [step_of(path) for path in list_checkpoints(folder)] if group.rank == 0 and count > 1 else []
    steps = [step for step in steps if step < newest.step]
    # The main rank's list counts. Other ranks may see an older state of a network folder.
    num_found = 1 + group.of_main(len(steps))
    if num_found < count:
        raise UserError(
            f"{folder}: has {num_found} checkpoint{'s' * (num_found > 1)} up to step {newest.step}, and the "
            f"export is to average {count}; average fewer (export.average_checkpoints, or `lptune export "
            f"--average {num_found}`)"
        )
    found = [newest]
    for number in range(count - 1):
        step = group.of_main(steps[number] if group.rank == 0 else 0)
        found.append(verify(folder / step_folder_name(step), group))
    with group.together((UserError, OSError), why):
        run = read_state(newest).fingerprint
        for manifest in found[1:]:
            if read_state(manifest).fingerprint != run:
                raise UserError(
                    f"{manifest.folder}: is of another run than {newest.folder.name}, with other data or "
                    "another model; move it away, or average fewer checkpoints"
                )
    return found


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
