"""The launcher of ranks, and what a rank does for it: outcomes, logs, stop signals. Imports no torch."""

from lptune.launch.log import LOGS, keep_log, move_logs, redirect_output
from lptune.launch.outcome import (
    LAUNCHER,
    LEAVING,
    OUTCOMES,
    Outcome,
    Rank,
    announce,
    hold,
    outcome_of,
    read_outcomes,
    read_ranks,
    write_outcome,
)

__all__ = [
    "LAUNCHER",
    "LEAVING",
    "LOGS",
    "OUTCOMES",
    "Outcome",
    "Rank",
    "announce",
    "hold",
    "keep_log",
    "move_logs",
    "outcome_of",
    "read_outcomes",
    "read_ranks",
    "redirect_output",
    "write_outcome",
]
