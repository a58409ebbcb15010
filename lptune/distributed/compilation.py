"""Compilation by torch.compile: what is compiled, how long it takes, and which parts later runs reuse.

torch compiles a block at its first forward, and the code of backward at the first backward. That takes half a
minute for a model, once: what is compiled is kept on disk (TORCHINDUCTOR_CACHE_DIR, by default
torchinductor_USER in the folder for temporary files), and the next run of the same model, precision and batch
takes seconds. torch has two caches there. It looks into the second one if the first one has no entry:

    AOTAutograd's   from the graph that Dynamo makes to compiled forward and backward
    Inductor's      from a graph of forward or of backward to its compiled code

A cache is right if its key holds all that decides the code. A graph of lptune has three things that torch
cannot see, so lptune adds them to the key (`set_options`, and `cache_hash` of the last item):

- Ops of lptune. A graph holds their names alone. The code depends on the shapes and strides that their
  fakes return. A digest of lptune's source is a part of every key, so another version compiles anew.
- Autograd functions. torch does not cache graphs that have one, unless it is told to. Dynamo writes both
  of their methods into the graph, op by op, so nothing is missing there. Not under tensor parallelism: the
  key of a DTensor does not say what kind of tensor it holds.
- Which outputs activation checkpointing keeps (parallelize.py: `cache_hash`).
"""

import functools
import hashlib
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lptune.base import progress
from lptune.base.errors import UserError
from lptune.base.text import duration_text

_MAX_CHUNK_GRAPHS = 64
_PARTS_WITH_OPS = ("kernels", "linear", "models", "numerics")


def compile_forward(modules: Iterable[nn.Module], mode: str, *, fullgraph: bool) -> None:
    """Compiles the forward of each of `modules`, in place, unless mode (the config's `compile`) is `none`.

    fullgraph: raise if the graph of a module breaks. It may around modules inside that have an attribute
    `runs_eagerly`, whose shapes depend on data: they are left out. Raises UserError if there is no compiler.
    """
    if mode == "none":
        return
    check_compiler(mode)
    for module in modules:
        eager: list[Any] = list(filter(runs_eagerly, module.modules()))
        for each in eager:
            each.forward = torch.compiler.disable(each.forward)
        # Static shapes: all rows have one length, and a dynamic graph would be slower.
        whole = fullgraph and not eager
        module.forward = torch.compile(module.forward, fullgraph=whole, dynamic=False)


def runs_eagerly(module: nn.Module) -> bool:
    """Whether `compile_forward` leaves it out, and compiles what is around it."""
    return getattr(module, "runs_eagerly", False)


def compile_chunk_loss(module: nn.Module) -> None:
    """Compiles the head and the objective of a chunk, in place.

    There is a graph for each objective and number of tokens (the last chunk has fewer), for training and for
    evaluation: more than torch's limit of 8 graphs for a function, at which it would raise.
    """
    forward = torch.compile(module.forward, fullgraph=True, dynamic=False)

    def with_room_for_graphs(*args: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=_MAX_CHUNK_GRAPHS):
            return forward(*args)

    module.forward = with_room_for_graphs


def check_compiler(mode: str) -> None:
    """Raises UserError if `mode` (the config's `compile`) needs a C++ compiler and Python's headers, and one
    of them is not there.
    """
    if mode == "none":
        return
    # The same choice as torch._inductor.config.cpp.cxx.
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if not shutil.which(name):
        raise UserError(
            f"compile: needs a C++ compiler, and {name} is not on the PATH; install it (Debian, Ubuntu: apt "
            "install g++; Fedora: dnf install gcc-c++), set CXX to another, or set compile=none"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise UserError(
            f"compile: needs Python's headers, and {header} is not there; install them (Debian, Ubuntu: apt "
            "install python3-dev; Fedora: dnf install python3-devel), or set compile=none"
        )


def set_options(*, has_dtensors: bool, has_side_effects: bool) -> None:
    """Sets options of torch for this process. It finds in its caches what an earlier process of this version
    of lptune compiled. has_dtensors: whether weights in the graphs are DTensors. has_side_effects: whether a
    block leaves keys for later blocks in a mapping, and recomputing it need not do so again.
    """
    import torch._functorch.config as functorch
    import torch.compiler.config as compiler

    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = has_side_effects
    functorch.autograd_cache_allow_custom_autograd_functions = not has_dtensors
    tag = f"lptune {_digest_of_ops()}"
    if not compiler.cache_key_tag.endswith(tag):  # the user may have a tag, too
        compiler.cache_key_tag = f"{compiler.cache_key_tag} {tag}".strip()


@functools.cache
def _digest_of_ops() -> str:
    """A hash of the source of all parts of lptune that define ops or their fakes."""
    package = Path(__file__).parents[1]
    files = [file for part in _PARTS_WITH_OPS for file in (package / part).rglob("*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


class Compiled(NamedTuple):
    """What torch.compile has done since the last report."""

    duration_s: float
    num_graphs: int
    """Graphs of forwards and of backwards."""
    num_cached: int
    """Those whose code was in a cache."""

    def __str__(self) -> str:
        graphs = f"{self.num_cached} of {self.num_graphs} graphs from the cache"
        return f"compiling: {duration_text(self.duration_s)}, {graphs}"


class CompileWatch:
    """Measures how long torch.compile takes, and shows on a terminal that it is at work.

    torch calls back when it begins and when it ends, also for the code of backward, which it compiles in the
    first backward, on a GPU in another thread.
    """

    def __init__(self) -> None:
        self.duration_s = 0.0
        """Time since `start` that was spent in torch.compile."""
        self._is_main = self._is_announced = False
        self._started_s, self._shown = 0.0, ExitStack()
        self._reported = Compiled(0.0, 0, 0)

    def start(self, is_main: bool) -> None:
        """Begins to watch, if it has not begun. is_main: whether to show anything."""
        from torch._dynamo.callback import callback_handler as torch_calls

        self._is_main = is_main
        self._reported = self._now()
        if self._begin not in torch_calls.start_callbacks:
            torch_calls.register_start_callback(self._begin)
            torch_calls.register_end_callback(self._end)

    def close(self) -> None:
        """Ends watching. `torch._dynamo.reset` does so, too."""
        if "torch._dynamo.callback" not in sys.modules:
            return
        from torch._dynamo.callback import callback_handler as torch_calls

        if self._begin in torch_calls.start_callbacks:
            torch_calls.remove_start_callback(self._begin)
            torch_calls.remove_end_callback(self._end)

    def news(self) -> Compiled | None:
        """What has been compiled since the last call; None if next to nothing."""
        before = self._reported
        if self.duration_s - before.duration_s < progress.WORTH_A_LINE_S:
            return None  # and Dynamo, which takes a second to import, stays out of a run without it
        self._reported = now = self._now()
        return Compiled(
            now.duration_s - before.duration_s,
            now.num_graphs - before.num_graphs,
            now.num_cached - before.num_cached,
        )

    def _now(self) -> Compiled:
        counts = torch._dynamo.utils.counters["inductor"]
        num_cached: int = counts["fxgraph_cache_hit"]
        return Compiled(self.duration_s, num_cached + counts["fxgraph_cache_miss"], num_cached)

    def _begin(self, _: Any) -> None:
        self._started_s = time.perf_counter()
        if not self._is_main:
            return
        if not self._is_announced:
            self._is_announced = True
            progress.print_line("compiling: slow in the first run, later runs take it from a cache ...")
        self._shown.enter_context(progress.in_place("compiling ..."))

    def _end(self, _: Any) -> None:
        self._shown.close()
        self.duration_s += time.perf_counter() - self._started_s
