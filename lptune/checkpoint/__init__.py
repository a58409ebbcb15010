"""Files of a run: reads and writes Hugging Face folders, checkpoints and the run folder. Never unpickles."""

from lptune.checkpoint.adapter import match_tensors
from lptune.checkpoint.export import EMA, export_hf
from lptune.checkpoint.hf import Base, load_hf, num_elements_here, read_base, read_config, weights_digest
from lptune.checkpoint.hosts import check_same, check_shared
from lptune.checkpoint.load import load_state, load_weights
from lptune.checkpoint.manifest import Manifest, verify
from lptune.checkpoint.resume import (
    causes_of_change,
    check_fingerprint,
    check_unchanged,
    decides_rows,
    find_checkpoint,
    newest_of_run,
)
from lptune.checkpoint.run import Run, open_run
from lptune.checkpoint.run_folder import RunFolder
from lptune.checkpoint.save import CheckpointWriter, wait_for_copy
from lptune.checkpoint.state import RunState, read_state
from lptune.checkpoint.trained import Trained, read_trained
from lptune.models import read_index

__all__ = [
    "EMA",
    "Base",
    "CheckpointWriter",
    "Manifest",
    "Run",
    "RunFolder",
    "RunState",
    "Trained",
    "causes_of_change",
    "check_fingerprint",
    "check_same",
    "check_shared",
    "check_unchanged",
    "decides_rows",
    "export_hf",
    "find_checkpoint",
    "load_hf",
    "load_state",
    "load_weights",
    "match_tensors",
    "num_elements_here",
    "newest_of_run",
    "open_run",
    "read_base",
    "read_config",
    "read_index",
    "read_state",
    "read_trained",
    "verify",
    "wait_for_copy",
    "weights_digest",
]
