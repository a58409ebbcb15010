"""Backbone: what lptune asks of a causal language model. It is a module with the forward and the loss that
recipes call, made of a few things that each member says about itself.

    facts                       sizes, read before the model is built (facts.py)
    blocks, embedding, head     the modules that are gathered, compiled and recomputed one by one, the one
                                before them, and the one after, which makes logits
    body                        tokens of packed documents -> hidden states, all before the head
    make_cache, extend          generation; without a cache each new token runs its whole row
    tensor_plan                 how ranks cut the modules; None: they cannot
    stored_as, passes_on        the names map: which boxes of which stored tensors a parameter is made of

Our decoder (decoder.py) is one member; members.py chooses one for a config.json, and nothing outside
lptune/models knows which a model is. Precision and sharding are applied from outside. The names map is what
checkpoint/adapter.py reads and writes by. A head that returns the logits of only some words has an attribute
`words`, which the objective reads (words.py).

Shapes: B batch, S sequence, T = B * S, t tokens of a chunk, H hidden, V vocabulary, v words of this head.
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from lptune.base.errors import UserError
from lptune.models.attention import choose_backend
from lptune.models.chunks import Logits, in_chunks
from lptune.models.context import Group, gathered, part, summed
from lptune.models.documents import DocumentBounds
from lptune.models.facts import Facts
from lptune.models.loss import (
    IGNORE_INDEX,
    Objective,
    check_serves_parts,
    is_number,
    summed_cross_entropy,
)
from lptune.models.words import words_of

ModelT_co = TypeVar("ModelT_co", covariant=True)


class Part(NamedTuple):
    """A box of a parameter, and the box of a stored tensor that has the same values.

    The whole of one tensor: `Part(name, (0, 0), shape)`.
    Tensor e of a stack: `Part(name, (e, 0, 0), (1, N, K), dims=(None, 0, 1))`.
    The rows of a fused tensor from `first` on: `Part(name, (0, 0), (N, K), origin=(first, 0))`.
    """

    stored: str
    """Name of the stored tensor."""
    start: tuple[int, ...]
    """Where the box begins in the parameter, a number for each of its dimensions."""
    sizes: tuple[int, ...]
    """The number of indices in each dimension of the parameter."""
    origin: tuple[int, ...] = ()
    """Where the box begins in the stored tensor, a number for each of its dimensions; (): at 0 in each."""
    dims: tuple[int | None, ...] = ()
    """For each dimension of the parameter, that of the stored tensor which runs along it; None: none does,
    and the box has one index there. The box has one index in each other dimension of the stored tensor. ():
    the same dimensions in the same order.
    """


class Cut(NamedTuple):
    """How tensor parallelism cuts a module: a name in STYLES of distributed/tensor_parallel.py."""

    style: str
    fused_rows: tuple[int, ...] = ()
    """Of `columns`: the output features of the layers that this one fuses."""


class TensorPlan(NamedTuple):
    """How tensor parallelism cuts a model."""

    cuts: dict[str, Cut]
    """By name of a module, or glob, in the order in which they are applied. Each parameter needs one."""
    divided: dict[str, int]
    """By name for messages: the sizes that the number of ranks must divide."""


class Cache(Protocol):
    """What a model keeps of past tokens in generation."""

    def is_outgrown(self, lengths: Sequence[int]) -> bool:
        """Whether the cache became wrong for a row that now has one of these lengths, in tokens."""


class ChunkLoss(nn.Module):
    """Computes the head and an objective for a chunk of tokens. Has no parameters: `head` is an argument."""

    def __init__(self, vocab_size: int, divisor: float = 1.0, softcap: float | None = None) -> None:
        """divisor, softcap: logits are the output of the head, divided, then c * tanh(logits / c)."""
        super().__init__()
        self.vocab_size = vocab_size
        self.divisor = divisor
        self.softcap = softcap

    def finish(self, logits: Tensor) -> Tensor:
        """Divides and soft-caps the output of the head."""
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def forward(
        self, head: nn.Module, loss: Objective, hidden_tH: Tensor, labels_t: Tensor, *targets: Tensor
    ) -> Tensor:
        """The values of the objective (t,), 0 where the label is -100, or their sum. float32."""
        logits = Logits(head(hidden_tH), self.finish, words_of(head, self.vocab_size))
        values_t = loss.values(logits, labels_t, *targets)
        if values_t.shape != labels_t.shape:
            raise UserError(
                f"{type(loss).__name__}.values: must return one number for each of {len(labels_t):,} tokens, "
                f"found a tensor of shape {list(values_t.shape)}"
            )
        return loss.result(torch.where(labels_t != IGNORE_INDEX, values_t, 0.0), labels_t)


class Backbone(nn.Module, ABC):
    """A causal language model. A member's forward uses no random numbers; it has no dropout."""

    facts: Facts
    chunk_loss: ChunkLoss
    group: Group | None = None
    """The ranks that compute the same rows, each its part of the tokens (context.py); None: this one alone.
    Arguments and results of a forward are of whole rows in any case.
    """

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The blocks, in the order of forward, one for each of `facts.layers`."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The module before the blocks. Without anything to train in it, the first block needs no gradient
        of its input.
        """

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The module that makes raw logits (t, v) of hidden states (t, H); `chunk_loss.finish` follows."""

    @abstractmethod
    def body(self, tokens_BS: Tensor, documents: DocumentBounds | None = None) -> Tensor:
        """Hidden states (B, S, H) after the last norm, in the compute dtype: what the head reads. Attention
        and every other mixer stay within each document. With a `group`, tokens_BS and the result are this
        rank's part, and `documents` are of whole rows. From outside, call `hidden_states`.
        """

    @abstractmethod
    def initial_value(self, name: str, seed: int) -> Tensor:
        """The initial value of one parameter: float32, on the CPU, a function of (seed, name, shape) only."""

    def attention_backend(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        one_document_per_row: bool = False,
        seq_len: int | None = None,
    ) -> str:
        """The name of the attention that forward uses for these rows: as `attention.choose_backend`."""
        return choose_backend(
            self.facts, device, dtype, one_document_per_row=one_document_per_row, seq_len=seq_len
        )

    @property
    def float32_names(self) -> frozenset[str]:
        """The names of the parameters that stay float32 where the compute dtype is bfloat16: those of the
        module that holds the blocks, or of its parts.
        """
        return frozenset()

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Computes the buffers, which no checkpoint stores, after `to_empty`. device: None: where they are.
        This one serves a model without buffers.
        """
        assert not any(True for _ in self.buffers()), f"{type(self).__name__} does not compute its buffers"

    def tensor_plan(self) -> TensorPlan | None:
        """How tensor parallelism cuts this model; None: lptune cannot cut it."""
        return None

    def stored_as(self, name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        """The names map: the boxes of stored tensors that the parameter `name`, of `shape`, is made of. They
        cover the parameter once, and all parameters together cover each stored tensor once.
        """
        return [Part(name, (0,) * len(shape), shape)]

    @property
    def mixtures(self) -> Mapping[str, nn.Module]:
        """By name, the modules whose forward takes tokens (T, H) and the experts of each, int64 (T, k)."""
        return {}

    def passes_on(self, stored: str) -> bool:
        """Whether a folder may store the tensor `stored`, which no parameter has: an export copies it."""
        return False

    def make_cache(self, batch: int, num_places: int) -> Cache | None:
        """A new, empty cache for `batch` rows of up to `num_places` tokens. None: this model has none."""
        return None

    def extend(self, tokens_BS: Tensor, lengths_B: Tensor, cache: Cache | None) -> Tensor:
        """`body` for tokens that follow those in `cache`, which also stores them. The arguments are those of
        `next_logits`.
        """
        assert cache is None
        return self.body(tokens_BS)  # padding follows each row, so no token sees it

    def keep_blocks(self, numbers: Sequence[int]) -> None:
        """Removes all blocks but those with these numbers, which keep their names."""
        for number in set(range(len(self.facts.layers))).difference(numbers):
            delattr(self.blocks, str(number))  # ModuleList would number the others anew
        self.facts = self.facts.with_layers(numbers)

    def forward(
        self,
        tokens_BS: Tensor,
        documents: DocumentBounds | None = None,
        labels_BS: Tensor | None = None,
        loss: Objective = summed_cross_entropy,
        expected_gradient: float = 1.0,
    ) -> Tensor:
        """Without labels: logits (B, S, V) in the compute dtype. With labels: the objective `loss`, float32,
        either a number, the sum over labels != -100, or (B, S) numbers, 0 where the label is -100.

        tokens_BS: int64. labels_BS: int64; labels_BS[b, s] is the token to predict at (b, s), already
        shifted. documents: None if each row is one document. With labels, the logits of all tokens are never
        in memory together (chunks.py).

        expected_gradient: the factor by which you multiply the sum before backward. Any other number than 0
        is correct, but with several chunks it rounds the gradient once more (one_pass.py).
        """
        group = self.group
        hidden_BSH = self.body(part(tokens_BS, group), documents)
        if labels_BS is None:
            words = words_of(self.head, self.facts.vocab_size)
            return gathered(words.gather(self.chunk_loss.finish(self.head(hidden_BSH))), group)
        of_tokens = (part(each, group) for each in (labels_BS, *loss.targets))
        tensors = [each.flatten(0, 1) for each in (hidden_BSH, *of_tokens)]
        factor = 1 if group is None else group.size  # by which `summed` multiplies
        found = self._in_chunks(tensors, loss, expected_gradient * factor)
        if not found.dim():
            return summed(found, group)
        # clone(), because wrappers put hooks on the output, and an in-place operator on a view loses them.
        return gathered(found.unflatten(0, hidden_BSH.shape[:2]).clone(), group)

    def summed_loss(self, tokens_BS: Tensor, documents: DocumentBounds | None, labels_BS: Tensor) -> Tensor:
        """`forward` with labels, up to the order of the sum, but without the head where there is no target:
        its work for prompts is saved. The shapes depend on the labels, so it is not for compiled models.
        """
        assert self.group is None, "the ranks of a group would have other shapes"
        is_target_BS = labels_BS != IGNORE_INDEX
        hidden_TH = self.body(tokens_BS, documents)[is_target_BS]
        return self._in_chunks([hidden_TH, labels_BS[is_target_BS]], summed_cross_entropy, 1.0)

    def _in_chunks(self, tensors: Sequence[Tensor], loss: Objective, expected_gradient: float) -> Tensor:
        """The head and the objective for T rows of hidden states, labels and the objective's targets."""
        words = words_of(self.head, self.facts.vocab_size)
        if not words.is_all:
            check_serves_parts(loss)
        of_chunk = functools.partial(self.chunk_loss, self.head, loss)
        parameters = tuple(self.head.parameters()) if is_number(loss) else None
        return in_chunks(
            of_chunk, tensors, words.width, parameters=parameters, expected_gradient=expected_gradient
        )

    def hidden_states(self, tokens_BS: Tensor, documents: DocumentBounds | None = None) -> Tensor:
        """`body` of whole rows, for a call from outside: FSDP2 gathers the weights for this method and for
        forward.
        """
        return gathered(self.body(part(tokens_BS, self.group), documents), self.group)

    def logits_of(self, hidden_tH: Tensor) -> Tensor:
        """Logits (t, v) of hidden states, of the words that this rank's head has, in the compute dtype."""
        return self.chunk_loss.finish(self.head(hidden_tH))

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, lengths_B: Tensor, cache: Cache | None) -> Tensor:
        """The logits (B, V) of the token that follows each row, in the compute dtype.

        tokens_BS: int64, the tokens that follow those in `cache`, padded on the right with any id; without a
        cache, the whole rows. lengths_B: int64, 1 ... S: how many they are in each row. `cache` stores them;
        each row must have room for S. Equal to `forward` of the whole rows up to rounding. The model must not
        be sharded.
        """
        hidden_BSH = self.extend(tokens_BS, lengths_B, cache)
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        logits_BV = self.logits_of(hidden_BSH[rows_B, lengths_B - 1])
        return words_of(self.head, self.facts.vocab_size).gather(logits_BV)

    def initial_tensors(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Random tensors of a checkpoint of this model, under the names that its folder stores; float32, on
        the CPU. The model may be on meta.
        """
        for name, _ in self.named_parameters():
            yield name, self.initial_value(name, seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills all parameters with `initial_value`. They must have storage."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, seed))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # When a model leaves the meta device, nn.Module makes two parameters of a shared one.
        shared = aliases(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tie(self, shared)
        return self


class Builds(Protocol[ModelT_co]):
    """Facts, typed by the model that they build."""

    def build(self) -> ModelT_co:
        """Makes the model on torch's default device."""


def build_on_meta(facts: Builds[ModelT_co]) -> ModelT_co:
    """The model with all tensors on the meta device, without storage. Tied weights are one parameter.

    Then call `to_empty(device=...)`, and load weights or call `init_weights(seed)`.
    """
    with torch.device("meta"):
        return facts.build()


def drawn(name: str, shape: Sequence[int], std: float, seed: int) -> Tensor:
    """Normal numbers of mean 0 for one parameter: float32, on the CPU. One generator per name, so that
    neither sharding nor the order of parameters changes a value.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(tuple(shape), device="cpu").normal_(0.0, std, generator=generator)


def aliases(model: nn.Module) -> list[list[str]]:
    """The names of each parameter. A tied parameter has several; the first is that of `named_parameters`."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def tie(model: nn.Module, shared: Iterable[Sequence[str]]) -> None:
    """Gives the names of each group the parameter of its first name. shared: as `aliases` found them."""
    for first, *others in shared:
        for other in others:
            module, _, name = other.rpartition(".")
            model.get_submodule(module).register_parameter(name, model.get_parameter(first))


def num_parameters(model: nn.Module) -> int:
    """The number of elements of all parameters. A shared parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
