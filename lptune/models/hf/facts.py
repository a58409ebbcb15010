"""config.json -> HFFacts: what is known of a transformers model before it is built for training.

The facts are read from a model on meta, not only from the config: names of sizes differ between families,
modules do not lie. It takes a second or two, most of which is the import of transformers.
"""

import functools
import hashlib
import json
import logging
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lptune.base.errors import UserError
from lptune.models.facts import Facts, Layer
from lptune.models.families import MAX_LAYERS
from lptune.models.headers import read_index
from lptune.models.keys import Keys
from lptune.models.quantized import QUANTIZED_KEYS, read_scheme

if TYPE_CHECKING:
    from lptune.models.hf.model import HFModel


_OLDEST = 5, 17
"""The oldest transformers with which the models were tried. Our own decoder needs none of its models."""


@dataclass(frozen=True, kw_only=True)
class HFLayer(Layer):
    """A block of a transformers model."""

    kind: str
    """Of attention or mixer, as the config names it."""
    modules: str
    """A digest of the classes and shapes in the block. Equal blocks do equal work."""

    @property
    def reads(self) -> tuple[Hashable, ...]:
        return (self.kind,)


@dataclass(frozen=True, kw_only=True)
class HFFacts(Facts):
    """The facts of one model of transformers."""

    layers: tuple[HFLayer, ...]
    content: str
    """config.json as text, from which the model is built."""
    where: str
    """The name of config.json in messages."""
    stored: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)
    """Name and shape of each tensor of the checkpoint; (): it has no weights."""
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    longest_packed_row: int | None = None
    """The largest number of tokens of a row with several documents; None: any."""
    is_recurrent: bool = False
    """Whether any block has a mixer that is no attention."""
    shares_between_blocks: bool = False
    """Also where the code of transformers finds the kind of a block by its number."""
    is_part: bool = False
    """Whether it is the text part of a model that sees or hears, whose other tensors pass on."""
    kept: tuple[int, ...] | None = None
    """The blocks that `keep_blocks` left; None: all."""

    def build(self) -> "HFModel":
        from lptune.models.hf.model import HFModel

        return HFModel(self)

    @property
    def why_not_cut(self) -> str | None:
        """Its modules are transformers', and have no plan."""
        return f"{self.family!r} is built by transformers' code, whose matrices lptune cannot cut"

    @property
    def why_not_shared(self) -> str | None:
        """Mixers are not cut by heads; and what counts places itself would begin at 0 on each rank."""
        if self.is_recurrent:
            return f"{self.family!r} has layers other than attention that need all tokens of a row"
        if self.longest_packed_row is not None:
            return f"{self.family!r} scales attention by the place in a row, which transformers counts itself"
        return None

    def check_execution(self, num_tensor_ranks: int, compile_mode: str, *others: int) -> None:
        super().check_execution(num_tensor_ranks, compile_mode, *others)
        if compile_mode == "model":
            raise UserError(
                f"compile: torch cannot compile transformers' {self.family!r} as a whole; set compile=block"
            )

    def check(self) -> None:
        """Tries a small model of the same config (check.py)."""
        from lptune.models.hf.check import check

        check(self)

    @property
    def folder(self) -> Path:
        """Where config.json is; constants are read from there, too."""
        return Path(self.where).parent

    def with_layers(self, numbers: Sequence[int]) -> Self:
        if len(numbers) < len(self.layers) and self.shares_between_blocks:
            raise UserError(
                f"{self.where}: blocks of {self.family!r} run only together, so one of them cannot be timed "
                "alone; compare kinds by `lptune sweep`"
            )
        kept = range(len(self.layers)) if self.kept is None else self.kept
        return replace(super().with_layers(numbers), kept=tuple(kept[number] for number in numbers))


def read(keys: Keys, folder: Path) -> HFFacts | None:
    """The facts of a folder whose model type transformers has; None: it has no such causal language model.

    Raises UserError for a quantized format that lptune does not read, code that comes with it, settings that
    transformers refuses, and a model that lptune cannot train exactly.
    """
    text = keys.get("text_config")
    given = dict(text) if isinstance(text, dict) else keys.given
    family = given.get("model_type")
    if not isinstance(family, str) or not _builds(family):
        return None
    _check(keys)
    has_weights = any(folder.glob("*.safetensors"))
    tensors = read_index(folder).tensors if has_weights else {}
    stored = tuple((name, each.shape) for name, each in tensors.items())
    if given is not keys.given:  # the whole model ties its head, whatever the part says
        is_stored = any(name.endswith("lm_head.weight") for name, _ in stored)
        whole = bool(keys.given.get("tie_word_embeddings", given.get("tie_word_embeddings", False)))
        given["tie_word_embeddings"] = whole or (bool(stored) and not is_stored)
    return _facts(json.dumps(given), keys.where, stored, given is not keys.given)


@functools.lru_cache(maxsize=8)  # a run asks several times; the model on meta takes a second
def _facts(
    content: str, where: str, stored: tuple[tuple[str, tuple[int, ...]], ...], is_part: bool
) -> HFFacts:
    from lptune.models.hf.model import facts_of

    return replace(facts_of(content, where, stored), is_part=is_part)


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, what transformers and the packages that it imports say of themselves is not printed."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree", "transformers")]
    before = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers[:-1], before, strict=False):  # transformers stays so
            each.setLevel(level)


def _builds(family: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _check(keys: Keys) -> None:
    import transformers

    found = transformers.__version__
    if tuple(map(int, found.split(".")[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise keys.error(
            "model_type",
            f"{keys.get('model_type')!r} is built by transformers {oldest} or newer, found {found}; "
            f"run: {sys.executable} -m pip install -U transformers",
        )
    read_scheme(keys)
    if isinstance(count := keys.get("num_hidden_layers"), int) and count > MAX_LAYERS:
        raise keys.error("num_hidden_layers", f"{count} is more than any model has; download the file again")
    if keys.get("text_config") is None:
        keys.check_architectures()


def config_of(content: str, where: str) -> Any:
    """transformers' config of this config.json, with dropout of 0. Raises UserError for a setting that it
    refuses.
    """
    from transformers import CONFIG_MAPPING

    given: dict[str, Any] = json.loads(content, object_hook=_number)
    given.pop("auto_map", None)  # names code of the checkpoint, which never runs
    for key in QUANTIZED_KEYS:
        given.pop(key, None)
    try:
        config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    except Exception as error:  # transformers raises what its checks raise
        raise UserError(f"{where}: transformers refuses it: {error}") from None
    for key, value in vars(config).items():
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    config.use_cache = False
    if hasattr(config, "per_layer_config"):  # transformers refuses to say what differs between layers
        config.allow_global_per_layer_attribute_access = True
    return config


def _number(found: dict[str, Any]) -> Any:
    """Infinity and NaN as transformers writes them, which JSON does not have."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def digest(parts: Sequence[object]) -> str:
    """A short name for `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
