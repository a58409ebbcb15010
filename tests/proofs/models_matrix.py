"""Every type of model, through everything that a run does with it: a table in docs/models.md.

    python -m tests.proofs.models_matrix [--only TYPE] [--write docs/models.md]

A type is a small model that transformers makes (tests/helpers/hf_types.py). Its row says

- plan: each weight that takes part in a product or a convolution of forward is a line of the precision plan.
  Which weights do is observed: a dispatch mode looks at the operands of all products. The cell counts lines.
  And a dry run of two ranks, as `lptune plan` makes it, has the same plan;
- packed: the logits of packed rows are those that transformers' eager attention gives for each document;
- loaded: the logits of whole rows are those of `from_pretrained`;
- int8_rowcol, float8_rowwise: two steps of recipes/full_finetune.py, the first verified against the plan. The
  cell counts its GEMMs with 8-bit operands;
- 2 ranks: the first gradients, as AdamW keeps them, are those of one rank; weights are gathered in 8 bits;
- export: transformers reads what the INT8 run exported, and its logits are those of lptune;
- generated: 12 tokens each for two prompts, those of transformers' greedy search.

Numbers with an exponent are differences, relative to the largest logit or to the norm of the gradient. A cell
that does not hold is FAILED, its reason stands below the table.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lptune import distributed, linear, models
from lptune.base.errors import UserError
from lptune.base.text import first_line
from lptune.checkpoint.manifest import read_manifest
from lptune.cli import preflight, recipe
from lptune.config import FinetuneConfig, PrecisionConfig, SamplingConfig, load_config
from lptune.inference import Answer, Sampler, decode, load_model
from lptune.plan.dry_run import dry_run
from tests.helpers import hf_types
from tests.helpers.packed import LENGTHS, SEQ_LEN, alone, bounds, loaded
from tests.helpers.ranks import Ranks
from tests.helpers.tiny_recipe import make_checkpoint, write_config
from tests.recipes.conftest import read_metrics

COLUMNS = (
    "plan", "packed", "loaded", "int8_rowcol", "float8_rowwise", "2 ranks", "export", "generated",
)  # fmt: skip
TITLE = "## What was tried with each type"
LOGITS = 2e-5
"""Of a difference of logits: float32, 4 blocks of at most 128 products in a row, whose order differs."""
GRADIENTS = 1e-5
"""Of a difference of gradients on 1 and 2 ranks: float32 sums in another order."""
_RECIPE = Path(__file__).parents[2] / "recipes" / "full_finetune.py"
_NUM_NEW = 12
_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.convolution, _ATEN._grouped_mm, _ATEN.mv,
}  # fmt: skip


@dataclass
class Outcome:
    """What a row of the table says. No failures: it holds."""

    built_by: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Column -> the reason, a line."""
    refused: list[str] = field(default_factory=list)
    """What a run of this type refuses, in its own words."""
    seconds: float = 0.0

    def fill(self, column: str, make: Callable[[], str]) -> None:
        """Runs `make` for the text of a cell; whatever raises is a failure."""
        try:
            self.cells[column] = make()
        except Exception as error:
            self.failures[column] = f"{type(error).__name__}: {first_line(error)}"


def run(kind: str, base: Path, folder: Path, ranks: Ranks, columns: Sequence[str] = COLUMNS) -> Outcome:
    """The row of the type `kind`. base: a folder with a tokenizer. folder: to write into, not there yet."""
    started, outcome = time.perf_counter(), Outcome()
    model_folder = folder / "base"
    try:
        shutil.copytree(base, model_folder)
        reference = hf_types.causal(kind, vocab_size=hf_types.vocab_size(base))
        hf_types.save_with_tokenizer(reference, model_folder)
        facts = models.read_config(model_folder)
        facts.check()
    except Exception as error:
        outcome.failures["plan"] = f"{type(error).__name__}: {first_line(error)}"
        return outcome
    outcome.built_by = "lptune" if isinstance(facts, models.DecoderConfig) else "transformers"
    cells: dict[str, Callable[[], str]] = {
        "plan": lambda: _plan(model_folder, folder),
        "packed": lambda: _packed(model_folder),
        "loaded": lambda: _loaded(model_folder),
        "int8_rowcol": lambda: _trained(model_folder, folder, "int8_rowcol"),
        "float8_rowwise": lambda: _trained(model_folder, folder, "float8_rowwise"),
        "2 ranks": lambda: _two_ranks(model_folder, folder, ranks),
        "export": lambda: _exported(folder / "int8_rowcol" / "export"),
        "generated": lambda: _generated(folder / "int8_rowcol" / "export"),
    }
    for column in columns:
        outcome.fill(column, cells[column])
    outcome.refused = list(_refused(model_folder, folder))
    outcome.seconds = time.perf_counter() - started
    return outcome


class Multiplied(TorchDispatchMode):
    """Within it, `names` gets the names of the parameters that are operands of a product or a convolution."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = set[str]()
        self._names = {each.untyped_storage().data_ptr(): name for name, each in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS:
            operands = [each for each in args if isinstance(each, Tensor)]
            if func.overloadpacket in (_ATEN.addmm, _ATEN.baddbmm):
                operands = operands[1:]  # the first is added
            if func.overloadpacket is _ATEN.convolution:
                operands = operands[:2]
            found = (self._names.get(each.untyped_storage().data_ptr()) for each in operands)
            self.names.update(name for name in found if name)
        return func(*args, **(kwargs or {}))


def _plan(folder: Path, within: Path) -> str:
    model = loaded(folder)
    config = write_config(within / "plan.yaml", folder, within / "planned")
    cfg = load_config(FinetuneConfig, config, ["data.seq_len=32", "precision.kind=int8_rowcol"])
    planned = dry_run(cfg, models.read_config(folder), world_size=2)
    assert planned.num_parameters == models.num_parameters(model)
    with torch.no_grad(), Multiplied(model) as seen:
        model(_tokens(SEQ_LEN), bounds())
    plan = linear.convert(model, "int8_rowcol")
    listed = {f"{layer.name}.weight" for layer in plan.layers} | {other.name for other in plan.others}
    assert [layer.name for layer in planned.plan.converted] == [layer.name for layer in plan.converted]
    assert seen.names, "no product was seen"
    assert seen.names <= listed, f"not in the plan: {', '.join(sorted(seen.names - listed))}"
    high = [*plan.others, *(layer for layer in plan.layers if layer.spec is None)]
    assert all(each.reason for each in high), "a weight stays high without a reason"
    return f"{len(plan.converted)} of {len(plan.layers) + len(plan.others)}"


def _packed(folder: Path) -> str:
    reference, tokens_BS = _reference(folder), _tokens(SEQ_LEN)
    with torch.no_grad():
        return _compared(loaded(folder)(tokens_BS, bounds()), alone(reference, tokens_BS))


def _loaded(folder: Path) -> str:
    tokens_BS = _tokens(SEQ_LEN)
    with torch.no_grad():
        expected = _reference(folder)(input_ids=tokens_BS, use_cache=False).logits
        return _compared(loaded(folder)(tokens_BS), expected)


def _compared(found: Tensor, expected: Tensor) -> str:
    difference = float((found - expected).abs().max() / expected.abs().max())
    assert difference < LOGITS, f"logits differ by {difference:.1e} of the largest"
    return f"{difference:.0e}"


def _reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()


def _tokens(seq_len: int, num_words: int = 256) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(4, num_words, (len(LENGTHS), seq_len), generator=draw)


def train(base: Path, folder: Path, kind: str, *more: str, rank: int = 0) -> Path:
    """Two steps of the recipe in folder/NAME; the run's folder."""
    config = write_config(folder / f"{kind}-{rank}.yaml", base, folder / kind)
    precision = [f"precision.kind={kind.partition('-')[0]}", "precision.emulate=true"]
    precision = precision[: 2 if "float8" in kind else 1]
    steps = ["num_steps=2", "eval_every_steps=0", "checkpoint.every_steps=1", "optimizer.lr=1e-4"]
    recipe.load_main(_RECIPE)(load_config(FinetuneConfig, config, [*precision, *steps, *more]))
    return folder / kind


def _trained(base: Path, folder: Path, kind: str) -> str:
    said = folder / f"{kind}.txt"
    with said.open("w", encoding="utf-8") as file, redirect_stdout(file):
        path = train(base, folder, kind)
    verified = re.findall(r"^verified: (\d+) 8-bit GEMMs ran", said.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(verified) == 1, "the first step was not verified"
    rows = read_metrics(path)
    assert [row["num_skipped"] for row in rows] == [0, 0], "a step was skipped"
    return str(verified[0])


def on_rank(rank: int, num_ranks: int, base: str, folder: str) -> None:
    """A job for Ranks: the same steps on two of them, with 8-bit gathers."""
    with _quietly():
        train(Path(base), Path(folder), "int8_rowcol-2", "precision.all_gather=low", rank=rank)


def _two_ranks(base: Path, folder: Path, ranks: Ranks) -> str:
    ranks.run(on_rank, 2, str(base), str(folder))
    return compared_gradients(folder)


def compared_gradients(folder: Path) -> str:
    """The largest difference of a gradient of two ranks to one rank's; raises AssertionError if it is not one
    of rounding.
    """
    expected, found = (_first_gradients(folder / name) for name in ("int8_rowcol", "int8_rowcol-2"))
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        difference = float((found[name] - value).norm() / value.norm()) if value.any() else 0.0
        assert difference < GRADIENTS, f"the gradient of {name} differs by {difference:.1e} of its norm"
        worst = max(worst, difference)
    losses = [read_metrics(folder / name)[0]["loss"] for name in ("int8_rowcol", "int8_rowcol-2")]
    assert abs(losses[0] / losses[1] - 1) < GRADIENTS, f"losses are {losses}"
    return f"{worst:.0e}"


def _first_gradients(run_folder: Path) -> dict[str, Tensor]:
    """By parameter, a tenth of the clipped gradient of the first step: AdamW's first moment."""
    manifest = read_manifest(run_folder / "checkpoints" / "step-00000001")
    found = {}
    for name, shards in manifest.shards.items():
        if name.startswith("exp_avg/"):
            parts = []
            for shard in sorted(shards, key=lambda each: each.box):
                with safe_open(str(manifest.folder / shard.file), framework="pt") as file:
                    parts.append(file.get_tensor(name)[shard.at : shard.at + shard.num_rows])
            found[name] = torch.cat(parts)
    assert found
    return found


def _exported(export: Path) -> str:
    tokens_BS = _tokens(SEQ_LEN)
    with torch.no_grad(), distributed.session("cpu") as world:
        loaded_ = load_model(str(export), PrecisionConfig(kind="none"), "float32", world, num_tokens=SEQ_LEN)
        return _compared(
            loaded_.model(tokens_BS), _reference(export)(input_ids=tokens_BS, use_cache=False).logits
        )


def _generated(export: Path) -> str:
    prompts_BS = _tokens(20)
    with torch.no_grad(), distributed.session("cpu") as world:
        from_ = load_model(str(export), PrecisionConfig(kind="none"), "float32", world, num_tokens=SEQ_LEN)
        answers = [Answer(from_.tokenizer, (), (), _NUM_NEW) for _ in prompts_BS]
        sample = Sampler(SamplingConfig(temperature=0.0), 0, range(len(answers)))
        list(decode(from_.model, prompts_BS.tolist(), answers, sample))
        cache = from_.model.make_cache(1, 1)
        greedy = _reference(export).generate(
            prompts_BS, max_new_tokens=_NUM_NEW, min_new_tokens=_NUM_NEW, do_sample=False, eos_token_id=None
        )
    found = [answer.ids for answer in answers]
    expected = greedy[:, prompts_BS.shape[1] :].tolist()
    assert found == expected, f"{found} where transformers has {expected}"
    return "cache" if cache is not None else "whole rows"


def _refused(base: Path, folder: Path) -> Iterator[str]:
    """What a run of this type refuses before it starts, of what a config can ask for."""
    config = write_config(folder / "refused.yaml", base, folder / "refused")
    try:
        preflight.check_models(load_config(FinetuneConfig, config, ["parallel.tensor=2"]))
    except UserError as error:
        yield str(error)


@contextmanager
def _quietly() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as file, redirect_stdout(file):
        yield


def section(outcomes: dict[str, Outcome], command: str) -> str:
    """The part of docs/models.md below TITLE."""
    import transformers

    num_failed = sum(bool(outcome.failures) for outcome in outcomes.values())
    lines = [
        TITLE,
        "",
        f"Written by `{command}` (transformers {transformers.__version__}, torch {torch.__version__}, CPU;",
        "float8 emulated), from small models with random weights. `plan`: converted layers of all weights",
        "that multiply. GEMMs: those with 8-bit operands of the first of two steps, as planned, in",
        "`int8_rowcol` and `float8_rowwise`. Difference: the largest, relative to the largest logit or to",
        "the norm of the gradient, of packed rows to each document alone in transformers, of whole rows to",
        "`from_pretrained`, of two ranks' gradients to one's, of the export in transformers to lptune.",
        "Greedy answers are those of transformers; `answers`: by a cache or by whole rows.",
        f"{len(outcomes) - num_failed} of {len(outcomes)} rows hold.",
        "",
        "| Type | built by | plan | GEMMs | difference | answers |",
        "|---|---|---|---|---|---|",
    ]
    for kind, outcome in outcomes.items():
        lines.append(f"| `{kind}` | {outcome.built_by} | " + " | ".join(_shown(outcome)) + " |")
    for kind, outcome in outcomes.items():
        lines += [f"- **{kind}**, {column}: {why}" for column, why in outcome.failures.items()]
    refused: dict[str, list[str]] = {}
    for kind, outcome in outcomes.items():
        for line in outcome.refused:
            refused.setdefault(line.replace(f"'{kind}'", "TYPE"), []).append(kind)
    if refused:
        lines += ["", "Refused in one line:", ""]
        foreign = [kind for kind, outcome in outcomes.items() if outcome.built_by == "transformers"]
        for line, kinds in refused.items():
            lines.append(f"- `{line}`: {'all of transformers' if kinds == foreign else ', '.join(kinds)}")
    return "\n".join(lines) + "\n"


def _shown(outcome: Outcome) -> Iterator[str]:
    """The cells of a row: what columns have in common is said once, and of differences the largest."""
    differences = ("packed", "loaded", "2 ranks", "export")
    for columns in (("plan",), ("int8_rowcol", "float8_rowwise"), differences, ("generated",)):
        if any(column in outcome.failures for column in columns):
            yield "**FAILED**"
        elif not all(column in outcome.cells for column in columns):
            yield "not run"
        elif columns == differences:
            yield max((outcome.cells[column] for column in columns), key=float)
        else:
            yield ", ".join(dict.fromkeys(outcome.cells[column] for column in columns))


def put(page: str, text: str) -> str:
    """`page` with `text` in place of the section below TITLE."""
    before, _, after = page.partition(f"{TITLE}\n")
    assert after, f"the page has no {TITLE!r}"
    rest = re.search(r"^## ", after, re.MULTILINE)
    return before + text + "\n" + (after[rest.start() :] if rest else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run every type of model through everything.")
    parser.add_argument("--only", default="", help="types whose name contains this")
    parser.add_argument("--write", type=Path, help="the page whose section is written")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")  # those of transformers; the suite turns warnings into errors
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # before anything imports huggingface_hub
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="lptune-models-") as within, Ranks(2) as ranks:
        base = make_checkpoint(Path(within, "tokenizer"))
        for kind in sorted(hf_types.ALL):
            if options.only in kind:
                folder = Path(within, kind)
                with _quietly():
                    outcome = outcomes[kind] = run(kind, base, folder, ranks)
                shutil.rmtree(folder)
                print(f"{outcome.seconds:5.1f} s  {kind}: {outcome.failures or 'holds'}", flush=True)
    text = section(outcomes, "make test-models" if not options.only else f"--only {options.only}")
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(put(page, text), encoding="utf-8")
    else:
        print(text)
    return int(any(outcome.failures for outcome in outcomes.values()))


if __name__ == "__main__":
    # Under the module's own name: what is run here goes to other processes by name.
    from tests.proofs import models_matrix

    sys.exit(models_matrix.main())
