"""The keys of every training run.

A key is a frozen, typed field below, with its meaning under it. A YAML file holds only what differs from
these defaults; `key=value` on the command line overrides both. A check of one section stands in that
dataclass's `__post_init__`; a check of several sections stands in `RunConfig`. The keys of the optimizer and
the learning rate are in optimization.py, those of low precision in precision.py. The config of a recipe
(recipes.py) adds its own keys.

The checks here look at values only. Whether a file exists, a tensor fits or a kernel can run is checked by
the code that opens the file, loads the tensor or runs the kernel.
"""

from dataclasses import dataclass, field, replace

from lptune.base.errors import UserError
from lptune.config.checks import (
    at_least,
    check_address,
    check_average,
    check_batches,
    check_path,
    mesh_axes,
    num_micro_batches,
    one_of,
)
from lptune.config.optimization import OptimizerConfig, ScheduleConfig
from lptune.config.precision import PRECISION_KINDS, PrecisionConfig
from lptune.config.sources import FORMATS, SourceConfig, check_source, entries


@dataclass(frozen=True, kw_only=True)
class UsedModelConfig:
    """A model that is not trained."""

    path: str
    """Folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json."""

    def __post_init__(self) -> None:
        check_path("model.path", self.path)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(UsedModelConfig):
    """The base checkpoint, whose weights are trained."""

    backend: str = "auto"
    """Whose modules compute: auto (lptune's for the families that it has, transformers' for all others) |
    native | transformers. A folder and its checkpoints serve both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.backend", self.backend, ("auto", "native", "transformers"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Rows to train on: where they are, how they are read, how they become fixed-length token rows."""

    source: str | tuple[str | SourceConfig, ...]
    """A .json, .jsonl, .csv, .txt or .parquet file, a folder of such files, a glob, a hub dataset id, or
    `builtin`; or a list of these, in which `{source: …, weight: 2}` gives a source its weight in an epoch and
    keys of its own (split, format, …_column, prompt_template, system_prompt)."""
    split: str = "train"
    """Split of a hub dataset."""
    format: str = "auto"
    """auto | pairs (a prompt and a response column) | chat (messages) | text."""
    prompt_column: str | None = None
    """Column of the prompt. If not given, the usual names are looked for (docs/data.md)."""
    input_column: str | None = None
    """Column of the optional second part of the prompt, found like the others. `none`: do not look."""
    response_column: str | None = None
    """Column of the response."""
    messages_column: str | None = None
    """Column of the chat messages."""
    text_column: str | None = None
    """Column of raw text."""
    chosen_column: str | None = None
    """Preferences (full_dpo): column of the better answer, found like the others."""
    rejected_column: str | None = None
    """Preferences: column of the worse answer."""
    label_column: str | None = None
    """Answers with a label (full_kto): column that says whether the answer is desirable, true or false."""
    system_column: str | None = None
    """Column of the system message of a row, found like the others. `none`: do not look."""
    prompt_template: str | None = None
    """For pairs without a chat template: the prompt with {column} placeholders, "Q: {question}\\nA: "."""
    chat_template: str | None = None
    """chatml | gemma | llama3 | mistral | phi | zephyr, a jinja template or the path of one; the tokenizer's
    own when not given. `none` switches it off."""
    system_prompt: str | None = None
    """System message for rows that have none (rendered by the chat template)."""
    seq_len: int = 2048
    """Tokens per packed row."""
    packing: bool = True
    """Fill each packed row with several documents (best fit). Attention stays within a document."""
    cut_text: bool | None = None
    """Cut raw text at the end of a row where whole texts would leave rows partly empty. Each part begins with
    the last token of the part before; attention stays within a part. null: true in continued_pretrain, else
    false. A run that is resumed keeps what it began with. Held-out text stays whole."""
    train_on_prompt: bool = False
    """Count every token in the loss, not only those of the assistant."""
    on_bad_row: str = "error"
    """What to do with a row that cannot be used: error (stop) | skip (skip and count it)."""
    max_rows: int | None = None
    """Largest number of rows that are read of each source."""
    eval_fraction: float = 0.0
    """Share of the documents to hold out, taken before weights apply. No prompt is in both parts."""
    eval_source: str | tuple[str | SourceConfig, ...] | None = None
    """Data sources to evaluate on, instead of a held-out share; each document counts once."""
    eval_split: str | None = None
    """Split of eval_source if that is a hub dataset; `split` if not given."""
    cache: str = "auto"
    """Folder for tokenized documents; all ranks of a machine and later runs read them from there. auto:
    lptune/data in $XDG_CACHE_HOME (~/.cache). An address (s3://bucket/rows; extra `cloud`): machines tokenize
    a share each, fetch the others' from there, and keep them as auto does. `none`: each rank tokenizes for
    itself, in memory."""

    def __post_init__(self) -> None:
        check_source("data.source", self.source)
        if self.eval_source is not None:
            check_source("data.eval_source", self.eval_source)
        if "://" in self.cache:
            check_address("data.cache", self.cache)
        else:
            check_path("data.cache", self.cache)
        one_of("data.format", self.format, FORMATS)
        one_of("data.on_bad_row", self.on_bad_row, ("error", "skip"))
        at_least("data.seq_len", self.seq_len, 2)
        if self.max_rows is not None:
            at_least("data.max_rows", self.max_rows, 1)
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"data.eval_fraction: must be at least 0 and below 1, found {self.eval_fraction}")
        if self.eval_split is not None and self.eval_source is None:
            raise UserError("data.eval_split: belongs to data.eval_source, which is not set")
        if self.cut_text and not self.packing:
            raise UserError("data.cut_text: fills packed rows; set data.packing=true, or leave it out")
        if self.eval_fraction and self.eval_source:
            raise UserError(
                "data.eval_fraction and data.eval_source exclude each other; set one of them "
                "(data.eval_fraction=0 switches the first off)"
            )

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """`source` as a tuple of entries."""
        return entries(self.source)

    @property
    def eval_sources(self) -> tuple[SourceConfig, ...]:
        """`eval_source` as a tuple of entries, with `eval_split` where they name no split; empty if it is not
        set.
        """
        return tuple(replace(each, split=each.split or self.eval_split) for each in entries(self.eval_source))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread over ranks: a mesh of replicate x fsdp x tensor. The size of `fsdp`, the axis
    over which FSDP2 shards parameters, is the number of ranks / replicate / tensor; ranks that share rows are
    on it.
    """

    replicate: int = 1
    """Copies of the sharded model (HSDP). The ranks of one copy shard the model among themselves; gradients
    are averaged over the copies."""
    tensor: int = 1
    """Ranks that share each matrix (tensor parallelism): attention heads, the MLP and the vocabulary are cut
    over them. Keep them within one machine."""
    sequence: bool = True
    """With `tensor` > 1: also cut the tokens of norms and residuals over these ranks (sequence parallelism).
    This saves activation memory and exchanges the same number of bytes."""
    context: int = 1
    """Ranks that share each row (context parallelism): each has a part of its tokens, and in attention all
    tokens of some heads. For long rows: activations are divided by it. It must divide data.seq_len and the
    number of key heads. Keep these ranks within one machine."""
    expert: int = 1
    """Ranks that have a mixture's experts among them (expert parallelism): tokens travel to their experts,
    which are gathered over fewer ranks. It must divide the number of experts. Keep these ranks within one
    machine."""
    reshard_after_forward: bool | None = None
    """Free a block's gathered weights after forward and gather them again for backward. null: true on
    several ranks, false on one. One rank has nothing to gather: null and false keep a copy of the weights in
    the compute dtype or in 8 bits, made once in a step; true frees it block by block, which saves 1 to 2
    bytes per parameter."""
    reduce_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch, not once a step. This exchanges more bytes, but each rank
    then keeps only its share of the accumulated float32 gradients."""
    reduce_dtype: str = "float32"
    """float32 | bfloat16 | int8: in what ranks exchange gradients. Sums are float32 in any case; int8: 1.03
    bytes a value, with a scale for each 128 values, rounded stochastically (docs/distributed.md). One rank
    exchanges nothing."""
    prefetch_blocks: int = 0
    """How many blocks ahead of the computing block weights are gathered, in forward and backward. 0: FSDP2's
    own order, one block ahead on CUDA. Each block ahead takes memory for its gathered weights."""
    cpu_offload: bool = False
    """CUDA only: keep parameters, gradients and optimizer state in host memory."""

    def data_ranks(self, num_ranks: int) -> int:
        """How many of `num_ranks` ranks, or groups of them, read different rows."""
        return num_ranks // (self.tensor * self.context)

    def reshards(self, num_ranks: int) -> bool:
        """Whether `num_ranks` ranks free a block's weights after forward: what null stands for."""
        if self.reshard_after_forward is None:
            return num_ranks > 1 or self.cpu_offload
        return self.reshard_after_forward

    def __post_init__(self) -> None:
        at_least("parallel.replicate", self.replicate, 1)
        at_least("parallel.tensor", self.tensor, 1)
        at_least("parallel.prefetch_blocks", self.prefetch_blocks, 0)
        one_of("parallel.reduce_dtype", self.reduce_dtype, ("float32", "bfloat16", "int8"))
        at_least("parallel.context", self.context, 1)
        at_least("parallel.expert", self.expert, 1)
        for name, size in (("tensor", self.tensor), ("context", self.context)):
            if self.expert > 1 and size > 1:
                raise UserError(
                    f"parallel.expert: {self.expert} ranks share experts, and with parallel.{name}={size} "
                    "others share tokens; set one of the two to 1"
                )
        if self.context > 1 and self.tensor > 1:
            raise UserError(
                f"parallel.context: {self.context} ranks share rows, and with parallel.tensor={self.tensor} "
                "others share the heads that they exchange; set one of the two to 1"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and which of them are kept."""

    every_steps: int = 0
    """Number of steps between two saves; 0: never by steps."""
    every_minutes: float = 30.0
    """Also save after the first step that ends this many minutes after the last save; 0: never. Without
    effect in a run that leaves no checkpoint (every_steps: 0, at_end: false)."""
    at_end: bool = True
    """Also save after the last step. false: for a trial run that leaves no weights (a run that is stopped by
    a signal saves in any case)."""
    async_save: bool = True
    """Write and hash in the background while training goes on. Takes host memory for a copy of this rank's
    part: with AdamW, 12 bytes per parameter."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep the checkpoints of steps that are a multiple of this; 0: none."""
    keep_best: int = 0
    """Also keep this many checkpoints with the lowest eval_loss, of steps that were evaluated."""
    copy_to: str | None = None
    """Address to which each checkpoint is also copied, s3://bucket/runs/8b, gs://…, abfs://… or file:///…
    (extra `cloud`). A run whose output_dir is empty or older continues from there with resume=auto. With it,
    output_dir may be a disk of each machine."""

    def __post_init__(self) -> None:
        if self.copy_to is not None:
            check_address("checkpoint.copy_to", self.copy_to)
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.every_minutes", self.every_minutes, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)
        at_least("checkpoint.keep_every", self.keep_every, 0)
        at_least("checkpoint.keep_best", self.keep_best, 0)


EXPORT_FORMATS = ("none", "int8", "float8", "float8_block", "int4", "bitnet")
"""The values of `export.quantized`."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The Hugging Face folder written at the end."""

    enabled: bool = True
    """Write the export. false: `lptune export` can make it later, from a checkpoint."""
    dtype: str = "original"
    """original (each tensor's dtype in the imported checkpoint) | float32 | bfloat16 | float16."""
    rounding: str = "stochastic"
    """How trained weights become bfloat16: stochastic | nearest. To nearest, a change of less than half a
    step of bfloat16 is lost, which is most of what a short run or a small learning rate changes
    (docs/export.md). The random bits depend on step and tensor alone."""
    max_shard_gib: float = 0.0
    """Largest size of a weight file; a larger tensor gets a file of its own. 0: the same files as in the
    base checkpoint, with the same names."""
    average_checkpoints: int = 1
    """Export the mean of this many checkpoints, the last ones of the run, instead of the last one alone."""
    ema: bool = True
    """Export the moving averages of the weights where the run keeps them (optimizer.ema_decay)."""
    quantized: str = "none"
    """none | int8 | float8 | float8_block | int4 | bitnet: store the weights that were trained in low
    precision in such a format of servers, with training's own scales where precision.kind has them
    (docs/export.md). `dtype` is that of the others."""

    def __post_init__(self) -> None:
        at_least("export.average_checkpoints", self.average_checkpoints, 1)
        at_least("export.max_shard_gib", self.max_shard_gib, 0)
        one_of("export.dtype", self.dtype, ("original", "float32", "bfloat16", "float16"))
        one_of("export.rounding", self.rounding, ("stochastic", "nearest"))
        one_of("export.quantized", self.quantized, EXPORT_FORMATS)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where metrics are written, besides metrics.jsonl."""

    tensorboard: bool = False
    """Event files under OUTPUT_DIR/tensorboard (extra `tensorboard`)."""
    wandb_project: str | None = None
    """Weights & Biases project (extra `wandb`)."""
    trackio_project: str | None = None
    """Trackio project (extra `trackio`)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of every run, with any loss. The config of a recipe (recipes.py) adds its own keys."""

    PREPARE = "prepare"
    """Not a key: the name of the function of lptune.data that makes the recipe's rows, for `lptune data`."""

    model: ModelConfig
    data: DataConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: names or globs of parameters or modules, "embed_tokens",
    "model.layers.[0-3].*". They get no gradient and no optimizer state, and are exported unchanged."""
    device: str = "auto"
    """auto (cuda where there is one) | cpu | cuda."""
    compute_dtype: str = "bfloat16"
    """bfloat16 | float32: dtype of activations and gathered weights; master weights are float32."""
    compile: str = "block"
    """block (each decoder block) | model | none."""
    deterministic: bool = False
    """On CUDA: use only algorithms that give the same bits each time, so that a resumed run is bitwise equal
    to an uninterrupted one. Costs time. A CPU does not need this switch."""
    activation_checkpointing: str = "selective"
    """none | selective (keep GEMM and attention outputs, recompute the rest) | full (recompute blocks)."""
    global_batch_size: int = 32
    """Packed rows per optimizer step, over all ranks."""
    micro_batch_size: int = 4
    """Packed rows per forward, per rank."""
    num_epochs: int = 1
    """Number of passes over the packed rows; ignored if num_steps is given."""
    num_steps: int | None = None
    """Number of optimizer steps; overrides num_epochs."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0 switches clipping off."""
    diverged_after_steps: int = 3
    """A step whose loss or gradient norm is not finite updates nothing. This many of them in a row end the
    run with exit code 3."""
    resume: str = "auto"
    """auto (continue OUTPUT_DIR's newest checkpoint, if any) | none | the path of a checkpoint."""
    output_dir: str = "runs/finetune"
    """The folder of the run."""
    seed: int = 0
    """Decides the order of the data and every random bit."""

    @property
    def given_num_steps(self) -> int | None:
        """The number of steps, if the config alone decides it. None: num_epochs and the rows decide it."""
        return self.num_steps

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of an optimizer step over all ranks, with padding."""
        return self.global_batch_size * self.data.seq_len

    @property
    def model_paths(self) -> dict[str, str]:
        """The folder of each model that the run reads, by its key."""
        return {"model.path": self.model.path}

    def check_ranks(self, num_ranks: int) -> None:
        """Raises UserError if `num_ranks` ranks cannot share the work, as far as the config alone tells."""
        axes = mesh_axes(self.parallel, num_ranks)
        reduces = self.parallel.reduce_dtype
        if axes["fsdp"] == 1 and axes.get("replicate", 1) > 1 and reduces != "float32":
            raise UserError(
                f"parallel.reduce_dtype: {reduces} is for gradients of weights that are sharded, and with "
                f"parallel.replicate={self.parallel.replicate} each of {num_ranks} ranks has them whole; set "
                "parallel.replicate=1, or reduce_dtype=float32"
            )
        num_data_ranks = self.parallel.data_ranks(num_ranks)
        check_batches(self.global_batch_size, self.micro_batch_size, num_data_ranks)
        share = self.global_batch_size // num_data_ranks
        if self.optimizer.in_backward and share != self.micro_batch_size:
            raise UserError(
                "optimizer.in_backward: updates a weight before another micro-batch can add to its gradient, "
                f"and a rank has {share // self.micro_batch_size} in a step; set global_batch_size="
                f"{self.micro_batch_size * num_data_ranks} or micro_batch_size={share}, or in_backward=false"
            )

    @property
    def tokens_per_forward(self) -> int:
        """Number of tokens of a micro-batch on a rank, with padding."""
        return self.micro_batch_size * self.data.seq_len // self.parallel.context

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("compute_dtype", self.compute_dtype, ("bfloat16", "float32"))
        one_of("compile", self.compile, ("block", "model", "none"))
        one_of("activation_checkpointing", self.activation_checkpointing, ("none", "selective", "full"))
        at_least("global_batch_size", self.global_batch_size, 1)
        at_least("micro_batch_size", self.micro_batch_size, 1)
        num_micro_batches(self.global_batch_size, self.micro_batch_size)
        if self.micro_batch_size * self.data.seq_len >= 2**31:
            raise UserError(
                f"micro_batch_size: {self.micro_batch_size} rows of data.seq_len={self.data.seq_len} are "
                "more tokens than 32 bits count (2^31); lower one of the two"
            )
        if self.parallel.sequence and self.data.seq_len % self.parallel.tensor:
            raise UserError(
                f"data.seq_len: {self.data.seq_len} tokens do not divide among {self.parallel.tensor} ranks "
                "(parallel.tensor); change one of them, or set parallel.sequence=false"
            )
        if self.data.seq_len % self.parallel.context:
            raise UserError(
                f"data.seq_len: {self.data.seq_len} tokens do not divide among {self.parallel.context} ranks "
                "(parallel.context); change one of them"
            )
        at_least("num_epochs", self.num_epochs, 1)
        if self.num_steps is not None:
            at_least("num_steps", self.num_steps, 1)
            self.schedule.check_fits(self.num_steps)
        at_least("max_grad_norm", self.max_grad_norm, 0)
        at_least("diverged_after_steps", self.diverged_after_steps, 1)
        at_least("seed", self.seed, 0)
        check_path("output_dir", self.output_dir)
        check_path("resume", self.resume)
        if self.export.enabled and not self.checkpoint.at_end:
            raise UserError(
                "checkpoint.at_end: false leaves nothing to export; set export.enabled=false as well"
            )
        if self.export.enabled:
            keep = self.checkpoint
            check_average(self.export.average_checkpoints, keep.every_steps, keep.keep_last)
            if self.export.quantized != "none" and self.precision.is_none:
                raise UserError(
                    f"export.quantized: {self.export.quantized} stores what was trained in low "
                    "precision, and precision.kind=none trains nothing in it; choose a kind, or leave "
                    "export.quantized out"
                )
        if self.optimizer.ema_decay and self.export.ema and self.export.average_checkpoints > 1:
            raise UserError(
                "optimizer.ema_decay and export.average_checkpoints are two averages of the weights, and an "
                "export has one; leave out one of them, or set export.ema=false"
            )
        if self.optimizer.ema_decay and PRECISION_KINDS[self.precision.kind].stores_low:
            raise UserError(
                f"optimizer.ema_decay: precision.kind={self.precision.kind} keeps no float32 weights to "
                "average; use export.average_checkpoints, or another precision.kind"
            )
        rounds = self.optimizer.kind not in ("muon", "sgd")
        if not rounds and PRECISION_KINDS[self.precision.kind].stores_low:
            raise UserError(
                f"optimizer.kind: {self.optimizer.kind} does not round stochastically, precision.kind="
                f"{self.precision.kind} needs it; use adamw or adamw_8bit, or another precision.kind"
            )
        if self.optimizer.kind == "muon" and (self.parallel.tensor > 1 or self.parallel.cpu_offload):
            other = "cpu_offload=true" if self.parallel.cpu_offload else f"tensor={self.parallel.tensor}"
            raise UserError(
                f"optimizer.kind: muon multiplies whole matrices, and with parallel.{other} no GPU has the "
                "rows and columns of one; leave that out, or use optimizer.kind=adamw_8bit"
            )
        if self.optimizer.kind == "muon" and self.parallel.expert > 1:
            raise UserError(
                "optimizer.kind: muon shares the matrices of experts among all ranks, and with "
                f"parallel.expert={self.parallel.expert} ranks have different ones; set that to 1, or use "
                "optimizer.kind=adamw_8bit"
            )
        plain = self.optimizer.kind == "sgd" or bool(self.optimizer.ema_decay)
        if self.optimizer.in_backward and self.parallel.cpu_offload and plain:
            other = "ema_decay" if self.optimizer.ema_decay else "kind=sgd"
            raise UserError(
                f"optimizer.in_backward: with parallel.cpu_offload, optimizer.{other} updates weights on the "
                "host, for which backward would wait; leave out one of them"
            )
        if self.optimizer.in_backward and self.parallel.replicate > 1:
            raise UserError(
                f"optimizer.in_backward: FSDP2 keeps the gradients of replicas until backward ends, so "
                f"parallel.replicate={self.parallel.replicate} would save no memory; leave out one of them"
            )
        if self.optimizer.in_backward and self.optimizer.kind == "sgd" and self.max_grad_norm:
            raise UserError(
                f"max_grad_norm: {self.max_grad_norm} with optimizer.in_backward clips by the norm of the "
                "step before, which does not limit a step of sgd with a larger norm; set max_grad_norm=0, or "
                "in_backward=false"
            )
        if self.optimizer.master == "none":
            if self.compute_dtype != "bfloat16":
                raise UserError(
                    f"optimizer.master: none keeps bfloat16 weights alone, found compute_dtype="
                    f"{self.compute_dtype}; set compute_dtype=bfloat16, or optimizer.master=float32"
                )
            if PRECISION_KINDS[self.precision.kind].stores_low:
                raise UserError(
                    f"optimizer.master: precision.kind={self.precision.kind} has no master weights "
                    "anyway; leave optimizer.master out, or choose another precision.kind"
                )
        if self.precision.checks_shadow and self.parallel.tensor > 1:
            raise UserError(
                f"precision.shadow_every: compares whole layers, and parallel.tensor={self.parallel.tensor} "
                "cuts them; set shadow_every=0 or parallel.tensor=1"
            )
        if self.precision.checks_shadow and self.parallel.expert > 1:
            raise UserError(
                f"precision.shadow_every: compares whole layers, and parallel.expert={self.parallel.expert} "
                "ranks have the experts among them; set shadow_every=0 or parallel.expert=1"
            )
