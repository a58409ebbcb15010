"""A sweep as the array job of Slurm: one script, one task of the array for each run.

The script follows examples/slurm/full_finetune.sbatch: one launcher on each machine, a signal before the time
limit, and a requeued task that continues its run.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_HEAD = """\
#!/bin/bash
# A sweep of {num_runs} runs, one for each task of the array. Look at the lines below, then submit it:
#
#   sbatch {script}
#
# `#SBATCH --array=0-{last}%4` runs at most four at a time.

#SBATCH --job-name={job}
#SBATCH --array=0-{last}
#SBATCH --nodes={num_machines}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
# Five minutes before the limit each task gets SIGUSR1: its run saves and exits with code 143.
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out

set -u
cd {folder} || exit 2

case $SLURM_ARRAY_TASK_ID in
"""

_ONE_MACHINE = """\
esac

# This shell must outlive srun, so it ignores the signals, which the launcher handles.
trap : USR1 TERM
srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-32}}" --kill-on-bad-exit=0 \\
  lptune run --nproc-per-node {ranks} "${{run[@]}}"
code=$?
"""

_MACHINES = """\
esac

export FIRST_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One port for each task of the array, below the ports of outgoing connections.
export RDZV_PORT=$((20000 + SLURM_JOB_ID % 10000))

# This shell must outlive srun, so it ignores the signals, which the launchers handle.
trap : USR1 TERM
srun --cpus-per-task="${{SLURM_CPUS_PER_TASK:-32}}" --kill-on-bad-exit=0 --wait=120 bash -c '
  exec lptune run --nnodes "$SLURM_NNODES" --nproc-per-node {ranks} \\
    --rdzv-endpoint "$FIRST_HOST:$RDZV_PORT" "$@"' lptune "${{run[@]}}"
code=$?
"""

_TAIL = """
# 143: a signal stopped the run, and it was saved; the same command continues it. Any other code is final.
if [ "$code" -eq 143 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
"""


@dataclass(frozen=True)
class Shape:
    """Machines and ranks of each run, as `--nnodes` and `--nproc-per-node` of `lptune run` have them."""

    num_machines: int = 1
    ranks: str = "gpu"


def script(path: str, job: str, folder: str, runs: Sequence[Sequence[str]], shape: Shape) -> str:
    """The text of the script.

    path: the name of the script, for its comment. folder: where `lptune run` starts. runs: the arguments of
    `lptune run` for each run, without flags of torchrun.
    """
    head = _HEAD.format(
        num_runs=len(runs),
        script=shlex.quote(path),
        last=len(runs) - 1,
        job=job,
        num_machines=shape.num_machines,
        gpus=shape.ranks if shape.ranks.isdigit() else 1,
        folder=shlex.quote(folder),
    )
    cases = [
        f"{number}) run=({' '.join(map(shlex.quote, arguments))}) ;;" for number, arguments in enumerate(runs)
    ]
    body = (_MACHINES if shape.num_machines > 1 else _ONE_MACHINE).format(ranks=shlex.quote(shape.ranks))
    return head + "\n".join(cases) + "\n" + body + _TAIL
