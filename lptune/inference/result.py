"""The result of an evaluation: one JSON file with the numbers and all that decides them, and a table to read.

Two results can be compared if they differ only in what is compared, for example in `precision`. So a file
names the weights by their digest, every key of the config, and the versions.
"""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import torch

import lptune
from lptune.base.errors import UserError
from lptune.base.files import write_errors, write_json
from lptune.config import EvaluateConfig, check_sources, entries, to_dict
from lptune.distributed import World
from lptune.inference.model import LoadedModel


def check_evaluation(cfg: EvaluateConfig) -> None:
    """Raises UserError, before weights are read, for an evaluation that has no part, would overwrite a file,
    or reads what is not there.
    """
    if not cfg.data.source and cfg.prompts.source is None and not cfg.harness.tasks:
        raise UserError(
            "evaluate: nothing to evaluate; set data.source (loss and perplexity), prompts.source (answers "
            "compared with references), harness.tasks (tasks of lm_eval), or several of them"
        )
    if cfg.prompts.source is not None:
        check_sources("prompts.source", entries(cfg.prompts.source))
    outputs = {"output": cfg.output}
    if cfg.answers.output is not None:
        outputs["answers.output"] = cfg.answers.output
        if cfg.prompts.source is None:
            raise UserError("answers.output: needs prompts.source, which is not set")
    if cfg.harness.output is not None:
        outputs["harness.output"] = cfg.harness.output
    for key, name in outputs.items():
        path = Path(name).expanduser()
        if os.path.lexists(path):
            raise UserError(f"{key}: {path} exists; add {key}={_free(path)}, or remove it")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UserError(f"{key}: {path.parent} is not a folder that can be written; make it first")


def _free(path: Path) -> Path:
    """The first free name of `evaluation-2.json`, `evaluation-3.json`, …"""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(name for name in names if not os.path.lexists(name))


def loss_result(sums: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """The mean loss in nats per target token and exp(loss), over all sources and for each of them.

    sums: the summed loss and the number of targets of each source. A value that is not finite becomes None.
    """

    def mean(loss_sum: float, num_targets: int) -> dict[str, Any]:
        loss = loss_sum / max(1, num_targets)
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
        values = {"loss": loss, "perplexity": perplexity}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        return finite | {"num_targets": num_targets}

    whole = mean(sum(each[0] for each in sums.values()), sum(each[1] for each in sums.values()))
    return whole | {"sources": {name: mean(*each) for name, each in sums.items()}}


def result_table(parts: dict[str, Any]) -> str:
    """The numbers of `parts`, which `write_result` writes, as lines of text."""
    lines = []
    if found := parts.get("held_out"):
        names = {"all sources": found} if len(found["sources"]) > 1 else {}
        lines.append(f"{'loss':>10}  {'perplexity':>10}  {'targets':>11}  source")
        lines += [
            f"{_text(each['loss'], '.6f'):>10}  {_text(each['perplexity'], '.4f'):>10}  "
            f"{each['num_targets']:>11,}  {name}"
            for name, each in (names | found["sources"]).items()
        ]
    if found := parts.get("questions"):
        lines.append(
            f"exact match ({found['extract']}): {found['exact_match']:.2%} +- {found['standard_error']:.2%}, "
            f"{found['num_correct']:,} of {found['num_questions']:,}; {found['num_at_max_new_tokens']:,} "
            f"answers end at max_new_tokens, {found['num_without_extract']:,} have nothing to compare"
        )
    for name, metrics in parts.get("harness", {}).get("results", {}).items():
        for key, value in metrics.items():
            metric, _, of_filter = key.partition(",")
            error = metrics.get(f"{metric}_stderr,{of_filter}")
            if isinstance(value, (int, float)) and of_filter and not metric.endswith("_stderr"):
                spread = f" +- {error:.4f}" if isinstance(error, float) else ""
                lines.append(f"{name}: {metric} ({of_filter}) {value:.4f}{spread}")
    return "\n".join(lines)


def write_result(parts: dict[str, Any], cfg: EvaluateConfig, loaded: LoadedModel, world: World) -> None:
    """Writes the file `cfg.output`, on the main rank. Raises UserError if the disk does not take it.

    parts: `held_out` (`loss_result`), `questions` (`ExactMatch.result`) and `harness` (`Tasks.run`), as far
    as they were asked for.
    """
    if not world.is_main:
        return
    result = {
        **parts,
        "model": {"folder": str(loaded.trained.folder), "weights": loaded.trained.digest()},
        "chat_template": loaded.tokenizer.chat_template,
        "plan": loaded.plan.headline(),
        "backend": loaded.plan.backend(world.device.type),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        "num_ranks": world.size,
        "versions": {"lptune": lptune.__version__, "torch": str(torch.__version__)},
        "config": to_dict(cfg),
    }
    path = Path(cfg.output).expanduser()
    with write_errors(f"output: {path}", "choose another"):
        write_json(path, result)
    world.print(f"written: {path}")


def _text(value: float | None, spec: str) -> str:
    return "not finite" if value is None else format(value, spec)
