"""Facts: what is known of a model before it is built. `lptune plan`, advice, metrics and notes read them.

Each member of Backbone (backbone.py) has a subclass, with what its modules need in addition: of our decoder,
DecoderConfig. The function that reads config.json (families.py) returns it. This file imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from lptune.base.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

    from lptune.models.backbone import Backbone


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The settings that may differ between blocks. Equal ones mean equal modules and equal work; our decoder
    compiles one graph for all of them.
    """

    window: int | None = None
    """Query i sees keys i - window + 1 ... i. None: it sees the whole document up to i."""

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """The tensors that this block shares with other blocks, such as a mask: equal where they are one."""
        return (self.window,)


@dataclass(frozen=True, kw_only=True)
class Facts(ABC):
    """The sizes of one causal language model, as its config.json gives them."""

    family: str
    """`model_type` of the checkpoint. For messages only: no module branches on it."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key heads and of value heads; num_heads is a multiple of it (GQA)."""
    head_dim: int
    """Size of a head; num_heads * head_dim may differ from hidden_size."""
    layers: tuple[Layer, ...]
    """One entry for each block."""
    max_position_embeddings: int
    """Length in tokens of the longest document that the checkpoint was trained for."""
    attention_softcap: float | None = None
    """c in c * tanh(scores / c), which is applied before the mask; None: no soft-cap."""
    has_sinks: bool = False
    """Whether attention has scores for keys that are not there."""
    tied: bool = False
    """Whether head and embedding share one weight."""
    num_experts: int = 0
    """Of each mixture whose experts ranks can have among them; 0: there is none."""
    word_names: tuple[str, str] = ("model.embed_tokens.weight", "lm_head.weight")
    """The names of the embedding and of the head's weight in the checkpoint."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """One line for each setting of config.json that a run does not apply."""

    @abstractmethod
    def build(self) -> "Backbone":
        """The model, with weights of unspecified values on torch's default device. See `build_on_meta`."""

    @property
    def why_not_cut(self) -> str | None:
        """Why tensor parallelism cannot cut the model's matrices; None: it can, where their sizes divide."""
        return None

    @property
    def why_not_shared(self) -> str | None:
        """Why ranks cannot share rows (context parallelism); None: they can, where the heads divide."""
        return None

    def check_execution(
        self,
        num_tensor_ranks: int,
        compile_mode: str,
        num_context_ranks: int = 1,
        num_expert_ranks: int = 1,
    ) -> None:
        """Raises UserError, one line, if the model cannot be cut or compiled as a config asks.
        num_tensor_ranks, compile_mode, num_context_ranks, num_expert_ranks: the keys `parallel.tensor`,
        `compile`, `parallel.context` and `parallel.expert`.
        """
        if num_tensor_ranks > 1 and (why := self.why_not_cut):
            raise UserError(
                f"parallel.tensor: {why}; set parallel.tensor=1: its weights are then sharded over all ranks"
            )
        if num_context_ranks > 1 and (why := self.why_not_shared):
            raise UserError(f"parallel.context: {why}; set it to 1")
        if self.num_kv_heads % num_context_ranks:
            raise UserError(
                f"parallel.context: {num_context_ranks} ranks do not divide the {self.num_kv_heads} key "
                f"heads of {self.family!r}; set it to {self.num_kv_heads}, which is the most, or to a "
                "divisor of it"
            )
        if num_expert_ranks > 1 and not self.num_experts:
            raise UserError(
                f"parallel.expert: {self.family!r} has no mixture whose experts ranks could have among them; "
                "set it to 1"
            )
        if self.num_experts % num_expert_ranks:
            raise UserError(
                f"parallel.expert: {num_expert_ranks} ranks do not divide the {self.num_experts} experts of "
                f"{self.family!r}; set it to a divisor of them"
            )

    def check(self) -> None:  # noqa: B027  (most members have nothing to try)
        """Tries whether the model that is built keeps documents apart, where that is not certain. Called once
        before a run; takes seconds. Raises UserError.
        """

    def attention_flops(self, lengths: "npt.ArrayLike") -> float:
        """FLOPs of the attention of all layers, forward and backward. lengths: of documents, in tokens.

        For each query head and each pair of a query and a visible key, forward has two products of size D,
        2 * 2D FLOPs, and backward four (for the gradients of scores, v, q and k): together 12D. Scores that
        flash attention computes again in backward are recomputation and not counted; softmax, masks and norms
        are no GEMMs. Only visible pairs count: L(L + 1) / 2 for a document of L tokens, which is half of the
        often-used L * L, and fewer in a layer with a window.
        """
        import numpy as np  # here, since reading a config needs none

        lengths_N = np.asarray(lengths, dtype=np.int64)

        def num_pairs(window: int | None) -> int:
            reach_N = lengths_N if window is None else np.minimum(lengths_N, window)
            return int((reach_N * (reach_N + 1) // 2 + (lengths_N - reach_N) * reach_N).sum())

        pairs = {window: num_pairs(window) for window in {layer.window for layer in self.layers}}
        return 12.0 * self.num_heads * self.head_dim * sum(pairs[layer.window] for layer in self.layers)

    @property
    def shares_between_blocks(self) -> bool:
        """Whether blocks run only together: one reads what others made, or what is stored for all."""
        return False

    def one_of_each(self) -> list[int]:
        """The number of the first block of each kind; of all if they run only together."""
        is_first = [self.layers.index(layer) == number for number, layer in enumerate(self.layers)]
        return [number for number, first in enumerate(is_first) if first or self.shares_between_blocks]

    def with_layers(self, numbers: Sequence[int]) -> Self:
        """The facts of the model that has only the blocks with these numbers, in this order. Raises UserError
        if blocks are missing that the others need.
        """
        return replace(self, layers=tuple(self.layers[number] for number in numbers))
