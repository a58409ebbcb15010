"""Tasks of EleutherAI's evaluation harness (lm_eval): what may run, and a run on a model of lptune.

lm_eval reads a task's data, writes requests, and computes metrics; harness.py answers the requests. The tasks
in its package are trusted as the package is, but some load metrics with the package `evaluate`, which runs a
script of the hub, or of a folder with the metric's name: a stand-in refuses to. A folder of tasks is a
program: its files may name functions, classes and templates without a sandbox. Only `harness.run_task_code`
allows either.
"""

import importlib.metadata
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import torch
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from lptune.base import hub_requests
from lptune.base.errors import UserError, closest
from lptune.base.files import write_errors, write_text
from lptune.config import EvaluateConfig, HarnessConfig
from lptune.distributed import World
from lptune.inference.harness import HarnessModel
from lptune.inference.model import LoadedModel

_SEEDS = {"random": 0, "numpy": 1234, "torch": 1234}
"""What lm_eval's command sets. Tasks that shuffle or draw use them."""
_BOOTSTRAP_ROUNDS = 1000
"""Of the standard error of metrics without a formula. lm_eval's 100,000 take minutes."""


class Tasks:
    """The tasks of a config, with their data sets. Raises UserError for what cannot be read or may not
    run.
    """

    def __init__(self, cfg: HarnessConfig) -> None:
        self._cfg = cfg
        folder = None if cfg.task_folder is None else Path(cfg.task_folder).expanduser()
        if folder is not None and not folder.is_dir():
            raise UserError(f"harness.task_folder: {folder} is not a folder")
        if folder is not None and not cfg.run_task_code:
            raise UserError(
                f"harness.task_folder: {folder}: files of tasks can run code; if you trust them like a "
                "program, set harness.run_task_code=true"
            )
        if not cfg.run_task_code:
            sys.modules["evaluate"] = SimpleNamespace(load=_refuse)  # type: ignore[assignment]
        manager = _manager(cfg, folder)
        for name in cfg.tasks:
            if name not in manager.task_index:
                raise UserError(
                    f"harness.tasks: lm_eval has no task {name!r}{closest(name, list(manager.task_index))}"
                )
        _seed()
        self._loaded = _of_task("cannot be read", lambda: manager.load(list(cfg.tasks)))
        for name, task in self._loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"harness.tasks: {name} runs code that the model writes; leave it out")
            if getattr(task, "MULTIMODAL", False):
                raise UserError(f"harness.tasks: {name} needs images or sounds; leave it out")
            own = task.get_config("num_fewshot")
            if own != 0:
                task.set_config(
                    key="num_fewshot", value=(own or 0) if cfg.num_fewshot is None else cfg.num_fewshot
                )
            task.set_fewshot_seed(seed=cfg.fewshot_seed)

    def run(self, loaded: LoadedModel, cfg: EvaluateConfig, world: World) -> dict[str, Any]:
        """The results, as JSON values; writes the file `cfg.harness.output`. A collective."""
        model = HarnessModel(loaded, cfg, world)
        _seed()
        os.environ["DISABLE_MULTIPROC"] = "1"  # lm_eval would fork this process, which has threads and a GPU
        found = _of_task(
            "fails",
            lambda: evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=cfg.harness.max_rows,
                bootstrap_iters=_BOOTSTRAP_ROUNDS,
                log_samples=cfg.harness.output is not None,
                system_instruction=cfg.harness.system_prompt,
                apply_chat_template=cfg.harness.chat,
                fewshot_as_multiturn=cfg.harness.chat,
            ),
            model,
        )
        if cfg.harness.output is not None and world.is_main:
            _write_samples(Path(cfg.harness.output).expanduser(), found["samples"])
        keys = ("results", "groups", "n-shot", "n-samples", "higher_is_better")
        kept = {key: _plain(found[key]) for key in keys if key in found}
        seeds = _SEEDS | {"fewshot": cfg.harness.fewshot_seed, "generation": cfg.seed}
        return kept | {
            "task_versions": _plain(found["versions"]),
            "seeds": seeds,
            "bootstrap_rounds": _BOOTSTRAP_ROUNDS,
            "max_length": model.max_length,
            "versions": {"lm_eval": importlib.metadata.version("lm_eval")},
        }


class _MetricError(BaseException):
    """No Exception: lm_eval goes on after those, without the metric."""


def _refuse(metric: str, *_: Any, **__: Any) -> NoReturn:
    raise _MetricError(
        f"harness.tasks: a task runs the metric {metric!r:.60}, which is code of the hub; leave the task "
        "out, or set harness.run_task_code=true if you trust it"
    )


def _manager(cfg: HarnessConfig, folder: Path | None) -> Any:
    """The index of tasks. lm_eval's own, of 14,000 names, takes ten seconds: without it where task_folder has
    all tasks, and none of them is a group, which may name others.
    """
    if folder is not None:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        entries = [manager.task_index.get(name) for name in cfg.tasks]
        if all(entry is not None and entry.kind.name in ("TASK", "PY_TASK") for entry in entries):
            return manager
    return TaskManager(include_path=None if folder is None else str(folder))


def _seed() -> None:
    random.seed(_SEEDS["random"])
    np.random.seed(_SEEDS["numpy"])
    torch.manual_seed(_SEEDS["torch"])


def _of_task(what: str, call: Callable[[], Any], model: HarnessModel | None = None) -> Any:
    """call(), with any error that is not lptune's as a UserError: data sets, templates and metrics of tasks
    raise every type. `what`: what the task does.
    """
    try:
        return call()
    except UserError:
        raise
    except _MetricError as error:
        raise UserError(str(error)) from None
    except Exception as error:
        if model is not None and model.is_answering:
            raise
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        name, line = type(error).__name__, hub_requests.first_line(error)
        found = name if line == name else f"{name}: {line}"
        raise UserError(
            f"harness.tasks: a task {what}: {found} (raised in {where}); correct it, or leave it out"
        ) from None


def _plain(value: Any) -> Any:
    """`value` as JSON values; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (np.floating, np.integer)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _write_samples(path: Path, samples: dict[str, list[dict[str, Any]]]) -> None:
    lines = [
        f"{json.dumps({'task': task, **_plain(sample)})}\n"
        for task, found in samples.items()
        for sample in found
    ]
    with write_errors(f"harness.output: {path}", "choose another"):
        write_text(path, "".join(lines))
