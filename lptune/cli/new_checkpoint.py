"""`lptune new-checkpoint`: a complete Hugging Face folder with random weights, so that every recipe runs with
nothing downloaded.

The tokenizer is a byte-level BPE, trained on the built-in instruction set: it encodes any text, and frequent
words of that set in few tokens. Its chat template marks the assistant's turns with `{% generation %}`, so
that the loss counts exactly those tokens. Weights are a function of (seed, parameter name).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lptune.base import progress
from lptune.base.errors import UserError, closest
from lptune.base.files import write_json
from lptune.cli import interrupts
from lptune.cli.places import PathArgument, check_new_folder

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

BOS, EOS, PAD, START = "<|begin|>", "<|im_end|>", "<|pad|>", "<|im_start|>"
SPECIAL_TOKENS = (PAD, BOS, START, EOS)
_SMALL_VOCAB_SIZE = 1024  # for presets whose vocabulary has room for bytes only
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)  # every byte is a token
MAX_VOCAB_SIZE = 1_000_000  # far above any in use; `tokenizers` aborts without memory

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_SHARD_BYTES = 4 << 30


@click.command(name="new-checkpoint")
@click.argument("preset", metavar="FAMILY/SIZE")
@click.argument("dest", type=PathArgument())
@click.option(
    "--vocab-size",
    type=click.IntRange(min=MIN_VOCAB_SIZE, max=MAX_VOCAB_SIZE),
    help="Size of the vocabulary of tokenizer and model.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@progress.in_place("making the checkpoint ...")
def new_checkpoint(preset: str, dest: Path, vocab_size: int | None, seed: int, dtype: str) -> None:
    """Write a checkpoint of FAMILY/SIZE (e.g. llama3_2/tiny) with random weights to the new folder DEST."""
    from lptune.checkpoint.files import WRITE_ERRORS, Scratch, publish_folder, why

    config = _preset(preset)
    check_new_folder(dest)
    config["vocab_size"] = vocab_size or max(config["vocab_size"], _SMALL_VOCAB_SIZE)
    tokenizer = train_tokenizer(_lines(), config["vocab_size"])
    ids = {name: tokenizer.token_to_id(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))}
    token_ids = {f"{name}_token_id": number for name, number in ids.items()}
    config.pop("torch_dtype", None)
    with interrupts.Undoing():
        try:
            dest.parent.mkdir(parents=True, exist_ok=True)
            scratch = Scratch(dest)
        except OSError as error:
            raise UserError(f"{dest}: cannot be made ({error.strerror}); choose another DEST") from None
        partial = scratch.path
        try:
            write_json(partial / "config.json", config | token_ids | {"dtype": dtype})
            write_json(partial / "generation_config.json", {"do_sample": False, **token_ids})
            tokenizer.save(str(partial / "tokenizer.json"))
            write_json(partial / "tokenizer_config.json", _tokenizer_config(config))
            num_parameters = _write_weights(partial, seed, dtype)
            with scratch.alone():
                if dest.exists():
                    dest.rmdir()
                scratch.unmark()
                publish_folder(partial, dest)
        except WRITE_ERRORS as error:  # a full disk, or DEST is no longer empty
            raise UserError(f"{dest}: cannot be written: {why(error)}") from None
        finally:
            scratch.remove()
    progress.print_line(
        f"new checkpoint {dest}: {preset}, {num_parameters / 1e6:.1f} M random parameters in {dtype}, "
        f"{tokenizer.get_vocab_size()} tokens"
    )


def train_tokenizer(lines: Iterator[str], vocab_size: int) -> "Tokenizer":
    """A byte-level BPE of at most `vocab_size` tokens; each digit is a token, each text starts with BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[bos]
    )
    return tokenizer


def _preset(name: str) -> dict[str, Any]:
    from lptune.models.presets import find_preset, preset_names

    names = preset_names()
    if name not in names:
        raise UserError(
            f"{name}: no such family and size{closest(name, names)}; there are {', '.join(names)}"
        )
    return find_preset(name)


def _lines() -> Iterator[str]:
    from lptune.data.builtin import builtin_rows, max_num_rows

    for row in builtin_rows(max_num_rows()):
        yield f"user\n{row['prompt']}"
        yield f"assistant\n{row['response']}"


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings", 2048),
        "chat_template": CHAT_TEMPLATE,
    }


def _write_weights(folder: Path, seed: int, dtype: str) -> int:
    """Writes random weights for config.json, in files of at most 4 GiB; returns the number of parameters."""
    import torch

    from lptune import models

    model = models.build_on_meta(models.read_config(folder))
    shards: list[list[str]] = [[]]
    tensors: dict[str, torch.Tensor] = {}
    filled = total = 0
    for name, values in model.initial_tensors(seed):
        tensor = values.to(getattr(torch, dtype))
        if tensors and filled + tensor.nbytes > _SHARD_BYTES:
            _save(tensors, folder / f"{len(shards)}.part")
            shards.append([])
            filled = 0
        tensors[name] = tensor
        shards[-1].append(name)
        filled, total = filled + tensor.nbytes, total + tensor.nbytes
    _save(tensors, folder / f"{len(shards)}.part")
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else ["model.safetensors"]
    for number, file in enumerate(files, start=1):
        (folder / f"{number}.part").rename(folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / "model.safetensors.index.json", index)
    return models.num_parameters(model)


def _save(tensors: "dict[str, torch.Tensor]", file: Path) -> None:
    """Writes `tensors` and forgets them."""
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod((file.parent / "config.json").stat().st_mode)  # safetensors makes it private
    tensors.clear()
