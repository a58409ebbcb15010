"""EleutherAI's evaluation harness (lm_eval) on lptune's models: the adapter, and what tasks may run.

lm_eval reads tasks and data, writes requests as text, and computes metrics. `HarnessModel` answers the
requests, in any precision that lptune loads a model in. In float32 it gives the numbers of lm_eval's own
model `hf` (tests/inference/test_harness.py). It keeps the rules of `hf` that decide a number:

    a text is encoded with the tokenizer's special tokens, unless it begins with bos
    an empty context, and each document of a perplexity, is preceded by bos, or without one by eos
    the beginning of what is too long is dropped: a row keeps its last `max_length` tokens, a prompt leaves
    room for the tokens of its answer

Every rank gets all requests, answers its share of the batches, and gets the answers of the others
(rounds.py). So lm_eval sees one process, and every rank computes the metrics.

The tasks in lm_eval's package are trusted as the package is, but some load metrics with the package
`evaluate`, which runs a script of the hub, or of a folder with the metric's name: a stand-in refuses to. A
folder of tasks is a program: its files may name functions, classes and templates without a sandbox. Only
`harness.run_task_code` allows either.

Only this module imports lm_eval; tasks.py imports it when a config names tasks.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import lm_eval.utils
import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from lptune.base import hub_requests
from lptune.base.errors import UserError, closest
from lptune.base.files import write_errors, write_text
from lptune.config import EvaluateConfig, HarnessConfig, SamplingConfig
from lptune.data import end_ids
from lptune.data.errors import RowError
from lptune.distributed import World
from lptune.inference.decode import Answer, decode
from lptune.inference.model import LoadedModel
from lptune.inference.rounds import in_batches, rounds
from lptune.inference.sampling import Sampler
from lptune.inference.score import Pair, score

_NEUTRAL = {"num_beams": 1, "length_penalty": 1, "num_return_sequences": 1}
"""Options of a generation that lptune does not have, and the value with which they do nothing."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A model of lptune as lm_eval sees one. Its methods are collectives: call them on every rank."""

    def __init__(self, loaded: LoadedModel, cfg: EvaluateConfig, world: World) -> None:
        super().__init__()
        self._device = world.device
        self._loaded, self._cfg, self._world = loaded, cfg, world
        self._tokenizer = loaded.tokenizer
        self.max_length = cfg.harness.max_length or loaded.model.facts.max_position_embeddings
        """Most tokens of a forward."""
        self.is_answering = False
        """Whether one of the methods for requests is running; an error is then lptune's, not the task's."""

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token. Raises UserError if there is none."""
        if self._tokenizer.eos_id is None:
            raise UserError(
                f"{self._tokenizer.folder}: lm_eval needs an end token, and config.json names none"
            )
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before an empty context: bos, or without one the end token."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's folder, which lm_eval asks for with a chat template."""
        return str(self._tokenizer.folder)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the chat template, empty without one."""
        return self._tokenizer.chat_template or ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The messages as text. Without `add_generation_prompt` it ends with the text of the last message,
        which the model continues.
        """
        render = self._tokenizer.render_chat
        try:
            text = render(chat_history, add_generation_prompt=add_generation_prompt)
        except RowError:  # as `hf` does: templates that know no system message
            chat_history = [message for message in chat_history if message["role"] != "system"]
            text = render(chat_history, add_generation_prompt=add_generation_prompt)
        if not add_generation_prompt:
            last = chat_history[-1]["content"]
            first = text.rindex(last.strip())
            kept = last.lstrip() if text[first:].startswith(last.lstrip()) else last.strip()
            text = text[: first + len(kept)]
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids. add_special_tokens: None: unless the text begins with the prefix token."""
        if add_special_tokens is None:
            prefix = self._tokenizer.decode([self.prefix_token_id], skip_special=False)
            add_special_tokens = not string.startswith(prefix)
        return self._tokenizer.encode(string, add_special=add_special_tokens)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability in nats, whether greedy decoding gives it) of each (context, continuation)."""
        with self._answering(requests):
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [tuple(each) for each in self._scores([Pair(*pair) for _, *pair in requests])]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability in nats of each text. A text of more than `max_length` tokens is scored in
        windows; each token is scored once.
        """
        with self._answering(requests):
            pairs, counts = list[Pair](), list[int]()
            for (text,) in (request.args for request in requests):
                windows = lm_eval.utils.get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
                )
                found = [Pair(*lm_eval.utils.make_disjoint_window(window)) for window in windows]
                pairs += found
                counts.append(len(found))
            scores = iter(self._scores(pairs))
            return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each (context, options), without the text that ended it."""
        groups: dict[str, list[tuple[int, str]]] = {}
        for number, (context, options) in enumerate(request.args for request in requests):
            groups.setdefault(json.dumps(options, sort_keys=True), []).append((number, context))
        texts: dict[int, str] = {}
        with self._answering(requests):
            for options_text, numbered in groups.items():
                texts |= self._generated(numbered, json.loads(options_text))
        return [texts[number] for number in range(len(requests))]

    def _scores(self, pairs: Sequence[Pair]) -> list[Any]:
        if not all(pair.continuation for pair in pairs):
            raise UserError(
                "harness: a continuation has no token of its own: the tokenizer joins it with the end of "
                "its context; leave the task out"
            )
        longest = max((len(pair.continuation) for pair in pairs), default=0)
        if longest > self.max_length:
            raise UserError(
                f"harness: a continuation has {longest:,} tokens, and a forward at most {self.max_length:,}; "
                "set harness.max_length, or leave the task out"
            )
        size = self._cfg.batch_size
        return score(self._loaded.model, pairs, self._world, batch_size=size, max_length=self.max_length)

    def _generated(self, numbered: Sequence[tuple[int, str]], options: dict[str, Any]) -> dict[int, str]:
        """The answers to contexts with the same options, by their numbers."""
        stop, max_new_tokens, sampling = self._options(options)
        room = self.max_length - max_new_tokens
        if room < 1:
            raise UserError(
                f"harness: an answer may have {max_new_tokens:,} tokens, and a forward at most "
                f"{self.max_length:,}; set harness.max_new_tokens"
            )
        prompts = [(number, self.tok_encode(context)[-room:]) for number, context in numbered]
        prompts.sort(key=lambda each: -len(each[1]))
        ends, found = self._end_ids(), dict[int, str]()
        bar = tqdm(total=len(prompts), desc="answered", disable=None if self._world.is_main else True)
        for batches in rounds(in_batches(prompts, self._cfg.batch_size), self._world, "harness.tasks"):
            mine = batches[self._world.data_rank]
            answers = [Answer(self._tokenizer, ends, stop, max_new_tokens) for _ in mine]
            sampler = Sampler(sampling, self._cfg.seed, [number for number, _ in mine])
            for _ in decode(self._loaded.model, [ids for _, ids in mine], answers, sampler):
                pass
            texts = [_before(stop, self._tokenizer.decode(answer.ids)) for answer in answers]
            for of_rank in self._world.gather([(n, text) for (n, _), text in zip(mine, texts, strict=True)]):
                found |= dict(of_rank)
            bar.update(len(found) - bar.n)
        bar.close()
        return found

    def _options(self, options: dict[str, Any]) -> tuple[list[str], int, SamplingConfig]:
        """The stop texts, the largest number of new tokens and the sampling of a request."""
        known = normalize_gen_kwargs(options)
        eos = self._tokenizer.decode([self.eot_token_id], skip_special=False)
        stop = [text for text in handle_stop_sequences(known.pop("until"), eos) if text]
        max_new_tokens = known.pop("max_gen_toks")
        is_sampled = known.pop("do_sample", False)
        sampling = SamplingConfig(
            temperature=float(known.pop("temperature", 0.0)) if is_sampled else 0.0,
            top_k=int(known.pop("top_k", 0) or 0) if is_sampled else 0,
            top_p=float(known.pop("top_p", 1.0) or 1.0) if is_sampled else 1.0,
            min_p=float(known.pop("min_p", 0.0) or 0.0) if is_sampled else 0.0,
            repetition_penalty=float(known.pop("repetition_penalty", 1.0) or 1.0),
        )
        unknown = [
            key
            for key, value in known.items()
            if key not in ("top_k", "top_p", "min_p") and value is not None and value != _NEUTRAL.get(key)
        ]
        if unknown:
            raise UserError(
                f"harness: a task sets {unknown[0]!r} for its answers, which lptune does not have"
            )
        return stop, self._cfg.harness.max_new_tokens or max_new_tokens, sampling

    def _end_ids(self) -> list[int]:
        """As transformers' `generate`; in a chat also the token that closes the assistant's turn."""
        is_chat = self._cfg.harness.chat
        return end_ids(self._tokenizer if is_chat else self._tokenizer.with_chat_template("none"))

    @contextmanager
    def _answering(self, requests: Sequence[Any]) -> Iterator[None]:
        self.is_answering = True
        # A task may order its documents by a set, whose order differs between processes.
        texts = json.dumps([request.args for request in requests], default=str).encode()
        if len(set(self._world.gather(hashlib.sha256(texts).hexdigest()))) > 1:
            raise UserError(
                "harness.tasks: a task makes other requests on each rank; set PYTHONHASHSEED=0 for all ranks"
            )
        yield
        self.is_answering = False  # not after an error, whose cause it tells


def _before(stop: Sequence[str], text: str) -> str:
    """`text` up to the first of the stop texts."""
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


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
