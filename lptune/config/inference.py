"""The configs of `generate` and `evaluate`: recipes that use a model and train nothing, so no RunConfigs."""

from dataclasses import dataclass, field, fields

from lptune.base.errors import UserError
from lptune.config.checks import at_least, check_path, one_of
from lptune.config.precision import PrecisionConfig
from lptune.config.schema import DataConfig, UsedModelConfig
from lptune.config.sources import SourceConfig


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Prompts: where they are, and how they are written. Keys mean what they mean in `data`."""

    source: str | None = None
    """A .jsonl, .json, .csv, .txt or .parquet file, a folder of such files, a glob, or a hub dataset id. Not
    given: prompts are typed, and answers are printed while they are generated."""
    split: str = "train"
    """Split of a hub dataset."""
    max_rows: int | None = None
    """Largest number of rows that are read."""
    messages_column: str | None = None
    """Column of chat messages, up to the answer. If no column is given, the usual names are looked for."""
    prompt_column: str | None = None
    """Column of the prompt."""
    input_column: str | None = None
    """Column of the optional second part of the prompt."""
    text_column: str | None = None
    """Column of raw text, which the model continues."""
    prompt_template: str | None = None
    """Without a chat template: the prompt with {column} placeholders; a typed prompt is {prompt}."""
    system_prompt: str | None = None
    """System message of conversations that have none."""
    chat_template: str | None = None
    """A name as in data.chat_template, a jinja template or the path of one. Not given: that of the model.
    `none`: prompts are written without one, as in training without one."""

    def __post_init__(self) -> None:
        if self.source is not None:
            check_path("prompts.source", self.source)
        if self.max_rows is not None:
            at_least("prompts.max_rows", self.max_rows, 1)
        kinds = [name for name in ("messages_column", "prompt_column", "text_column") if getattr(self, name)]
        if len(kinds) > 1:
            raise UserError(f"prompts.{kinds[0]} and prompts.{kinds[1]} exclude each other; set one of them")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen from its probabilities, and where an answer ends."""

    max_new_tokens: int = 256
    """Largest number of tokens of an answer."""
    temperature: float = 0.0
    """Logits are divided by this before they become probabilities. 0: always the most probable token; top_k,
    top_p and min_p then have no effect."""
    top_k: int = 0
    """Draw from this number of most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most probable tokens whose probabilities sum to at least this."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the largest probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the answer already has are divided by this where they are positive,
    and multiplied elsewhere. Above 1: fewer repetitions, at temperature 0, too."""
    stop: str | tuple[str, ...] = ()
    """Texts that end an answer; they are not part of it. The model's end tokens always end it. A list, or one
    text; in quotes, "\\n" is a line break."""

    def __post_init__(self) -> None:
        at_least("sampling.max_new_tokens", self.max_new_tokens, 1)
        at_least("sampling.temperature", self.temperature, 0)
        at_least("sampling.top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling.top_p: must be above 0 and at most 1, found {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"sampling.min_p: must be within 0 and 1, found {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"sampling.repetition_penalty: must be above 0, found {self.repetition_penalty}")
        object.__setattr__(self, "stop", _texts("sampling.stop", self.stop))


def _texts(key: str, value: str | tuple[str, ...]) -> tuple[str, ...]:
    """The stop texts of `key`: one text is a list of one."""
    texts = (value,) if isinstance(value, str) else value
    if "" in texts:
        raise UserError(f"{key}: has an empty text, which would end every answer; remove it")
    return texts


def _check_common(cfg: "GenerateConfig | EvaluateConfig") -> None:
    """Checks the keys that both recipes have."""
    one_of("device", cfg.device, ("auto", "cpu", "cuda"))
    one_of("compute_dtype", cfg.compute_dtype, ("bfloat16", "float32"))
    at_least("batch_size", cfg.batch_size, 1)
    at_least("seed", cfg.seed, 0)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """All keys of the recipe generate."""

    model: UsedModelConfig
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    output: str | None = None
    """File for the answers to prompts.source, one JSON object per row. If it has answers already, the job
    continues after them."""
    answer_column: str = "generated"
    """Key of the answer in each object of `output`, beside the columns of the row."""
    batch_size: int = 8
    """Number of prompts that are answered at once."""
    device: str = "auto"
    """auto (cuda where there is one) | cpu | cuda."""
    compute_dtype: str = "bfloat16"
    """bfloat16 | float32: dtype of weights, activations and the key-value cache."""
    seed: int = 0
    """Decides, with the number of a row, every random choice in its answer."""

    def __post_init__(self) -> None:
        _check_common(self)
        if not self.answer_column:
            raise UserError("answer_column: is empty; give the answer a key")
        if self.output is not None:
            check_path("output", self.output)
        if (self.output is None) != (self.prompts.source is None):
            given, missing = (
                ("prompts.source", "output") if self.output is None else ("output", "prompts.source")
            )
            raise UserError(
                f"{missing}: is not set, and {given} is; set both for a file of prompts, neither to type them"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationDataConfig(DataConfig):
    """Rows whose loss is measured. Each key means what it means in training."""

    source: str | tuple[str | SourceConfig, ...] = ()
    """As in training. With eval_fraction or eval_source, the rows are those that a run with these keys and
    this seed holds out; otherwise all rows of `source`. Not given: no loss is measured."""

    def __post_init__(self) -> None:
        if self.source != ():
            super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """How answers to `prompts` are generated (greedily) and compared with the reference answers."""

    reference_column: str | None = None
    """Column of the reference answer. Not given: one of the usual names; for chats, the messages of the
    assistant at the end."""
    extract: str = "exact"
    """What is compared: exact (the whole text, without white space around it) | gsm8k (the number after the
    last ####, without $ and commas)."""
    max_new_tokens: int = 256
    """Largest number of tokens of an answer."""
    stop: str | tuple[str, ...] = ()
    """Texts that end an answer; they are not part of it. The model's end tokens always end it. A list, or one
    text; in quotes, "\\n" is a line break."""
    output: str | None = None
    """New file for all rows with their answers, one JSON object per row."""

    def __post_init__(self) -> None:
        one_of("answers.extract", self.extract, ("exact", "gsm8k"))
        at_least("answers.max_new_tokens", self.max_new_tokens, 1)
        object.__setattr__(self, "stop", _texts("answers.stop", self.stop))
        if self.output is not None:
            check_path("answers.output", self.output)


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """Tasks of EleutherAI's evaluation harness, the package lm_eval."""

    tasks: tuple[str, ...] = ()
    """Names of tasks, groups or tags (`hellaswag`, `mmlu`). Not given: no task is run."""
    task_folder: str | None = None
    """Folder of further tasks: YAML files, also in its folders. They can run code, see run_task_code."""
    run_task_code: bool = False
    """Lets tasks run code that is not part of lm_eval: metrics of the hub, and functions and classes that the
    files of task_folder name. Trust such a folder like a program."""
    num_fewshot: int | None = None
    """Number of examples before each question. Not given: that of the task, else 0. A task that sets 0 keeps
    it."""
    fewshot_seed: int = 1234
    """Decides which examples they are."""
    max_rows: int | None = None
    """Largest number of documents of each task."""
    max_length: int | None = None
    """Most tokens of a forward; the beginning of longer contexts is dropped. Not given:
    max_position_embeddings of the model."""
    max_new_tokens: int | None = None
    """Largest number of tokens of a generated answer. Not given: that of the task, else 256."""
    chat: bool = False
    """Whether contexts are messages of a user, written by the chat template."""
    system_prompt: str | None = None
    """System message of these chats; without a chat, text before each context."""
    output: str | None = None
    """New file for all documents with their requests and answers, one JSON object per line."""

    def __post_init__(self) -> None:
        for name, least in (("num_fewshot", 0), ("fewshot_seed", 0), ("max_rows", 1), ("max_length", 2)):
            if getattr(self, name) is not None:
                at_least(f"harness.{name}", getattr(self, name), least)
        if self.max_new_tokens is not None:
            at_least("harness.max_new_tokens", self.max_new_tokens, 1)
        for name in ("task_folder", "output"):
            if getattr(self, name) is not None:
                check_path(f"harness.{name}", getattr(self, name))
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if changed and not self.tasks:
            raise UserError(f"harness.{changed[0]}: needs harness.tasks, which is not set")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """All keys of the recipe evaluate."""

    model: UsedModelConfig
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    output: str = "evaluation.json"
    """New file for the result."""
    batch_size: int = 8
    """Packed rows of a forward, and prompts or requests that are answered at once, per rank."""
    device: str = "auto"
    """auto (cuda where there is one) | cpu | cuda."""
    compute_dtype: str = "bfloat16"
    """bfloat16 | float32: dtype of weights, activations and the key-value cache."""
    seed: int = 0
    """Decides which documents data.eval_fraction holds out, and how rows are packed."""

    @property
    def chat_template(self) -> str | None:
        """The chat template of both parts; None: that of the model."""
        return self.data.chat_template if self.data.chat_template is not None else self.prompts.chat_template

    @property
    def chat_template_key(self) -> str:
        """The key that has `chat_template`, or could have it."""
        if self.data.chat_template is not None:
            return "data.chat_template"
        is_of_data = self.prompts.chat_template is None and self.data.source
        return "data.chat_template" if is_of_data else "prompts.chat_template"

    @property
    def tokens_per_forward(self) -> int:
        """Number of tokens of the largest forwards but for prompts, for `precision.skip_small`."""
        return self.batch_size * (self.data.seq_len if self.data.source else 1)

    def __post_init__(self) -> None:
        _check_common(self)
        check_path("output", self.output)
        files = {self.output: "output"}
        for key, name in (("answers.output", self.answers.output), ("harness.output", self.harness.output)):
            if name in files:
                raise UserError(f"{key}: is the same file as {files[name]}; choose another")
            if name is not None:
                files[name] = key
        templates = {self.data.chat_template, self.prompts.chat_template} - {None}
        if len(templates) > 1:
            raise UserError(
                "data.chat_template and prompts.chat_template differ, and a model has one; set one of them"
            )
