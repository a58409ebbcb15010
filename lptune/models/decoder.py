"""The decoder: nn.Linear, nn.Embedding and RMSNorm modules, as a `DecoderConfig` describes them.

Attribute names are those of Hugging Face, so that parameters have the names of the checkpoint
(`model.layers.0.self_attn.q_proj.weight`). Precision and sharding are applied from outside; no code here
depends on them. An nn.Linear may become a subclass. A head that returns the logits of only some words has an
attribute `words`, which the objective reads (words.py).

Blocks with equal LayerConfigs share one compiled graph, for two reasons. A block gets all values that vary
(hidden states, rotation, visibility) as arguments. Its constants (window, scales) depend only on the
LayerConfig, never on the number of the block.

Shapes: B batch, S sequence, T = B * S, H hidden, N query heads, M key heads, D head size, I intermediate, V
vocabulary.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lptune.models.attention import attend, choose_backend, make_visibilities
from lptune.models.cache import KVCache
from lptune.models.chunks import Logits, in_chunks
from lptune.models.config import ACTIVATIONS, DecoderConfig, LayerConfig, RopeConfig
from lptune.models.documents import DocumentBounds, Visibility
from lptune.models.loss import (
    IGNORE_INDEX,
    Objective,
    check_serves_parts,
    is_number,
    summed_cross_entropy,
)
from lptune.models.rope import Rope, RopeTable, apply_rope
from lptune.models.words import words_of

NORM_NAMES: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""By norm placement: names of the norms before attention, after attention, before the MLP, after the MLP."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, or * (1 + weight). Computed in float32, returned in the dtype of x."""

    def __init__(self, size: int, eps: float, adds_one: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.adds_one = adds_one

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm with another `weight` than this module's, for a rank that has a part of the model."""
        weight = weight.float() + 1.0 if self.adds_one else weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Projects to q, k and v; norms and rotates q and k; attends; projects back."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.window = layer.window
        self.qk_norm = config.qk_norm
        self.fused = config.fused_projections
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.sizes = (q_size, kv_size, kv_size)
        if self.fused:
            self.qkv_proj = nn.Linear(config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        else:
            self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
            self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
            self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.output_bias)
        if self.qk_norm != "none":
            full = self.qk_norm == "full"
            self.q_norm = RMSNorm(q_size if full else config.head_dim, config.norm_eps, config.norm_adds_one)
            self.k_norm = RMSNorm(kv_size if full else config.head_dim, config.norm_eps, config.norm_adds_one)

    def forward(self, hidden_BSH: Tensor, rope: Rope | None, visible: Visibility) -> Tensor:
        if self.fused:
            qkv = self.qkv_proj(hidden_BSH)
            # Under tensor parallelism the projection returns this rank's parts of q, k and v.
            shares = [size * qkv.shape[-1] // sum(self.sizes) for size in self.sizes]
            q, k, v = qkv.split(shares, dim=-1)
        else:
            q, k, v = self.q_proj(hidden_BSH), self.k_proj(hidden_BSH), self.v_proj(hidden_BSH)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        # -1, not the number of heads, because a rank may have only some of the heads
        q_BSND, k_BSMD, v_BSMD = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm == "head":
            q_BSND, k_BSMD = self.q_norm(q_BSND), self.k_norm(k_BSMD)
        if rope is not None:
            q_BSND, k_BSMD = apply_rope(q_BSND, rope), apply_rope(k_BSMD, rope)
        out_BSND = attend(
            q_BSND, k_BSMD, v_BSMD, visible, scale=self.scale, window=self.window, softcap=self.softcap
        )
        out_BSH: Tensor = self.o_proj(out_BSND.flatten(-2))
        return out_BSH


class MLP(nn.Module):
    """The gated MLP: down(activation(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        function, options = ACTIVATIONS[config.activation]
        activation: Callable[[Tensor], Tensor] = getattr(F, function)
        self.activation = functools.partial(activation, **options) if options else activation
        self.fused = config.fused_projections
        if self.fused:
            self.gate_up_proj = nn.Linear(
                config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias
            )
        else:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
            self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        if self.fused:
            gate_BSI, up_BSI = self.gate_up_proj(hidden_BSH).chunk(2, dim=-1)
        else:
            gate_BSI, up_BSI = self.gate_proj(hidden_BSH), self.up_proj(hidden_BSH)
        out_BSH: Tensor = self.down_proj(self.activation(gate_BSI) * up_BSI)
        return out_BSH


class Block(nn.Module):
    """x += attention(x), then x += mlp(x), with norms at the places of config.norm_placement."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.norm_names = NORM_NAMES[config.norm_placement]
        self.residual_scale = config.residual_scale
        for name in self.norm_names:
            if name is not None:
                self.add_module(name, RMSNorm(config.hidden_size, config.norm_eps, config.norm_adds_one))

    def forward(self, hidden_BSH: Tensor, rope: Rope | None, visible: Visibility) -> Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self.norm_names
        update_BSH = self.self_attn(self._norm(before_attention, hidden_BSH), rope, visible)
        hidden_BSH = hidden_BSH + self._scaled(self._norm(after_attention, update_BSH))
        update_BSH = self.mlp(self._norm(before_mlp, hidden_BSH))
        return hidden_BSH + self._scaled(self._norm(after_mlp, update_BSH))

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        normed: Tensor = x if name is None else getattr(self, name)(x)
        return normed

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class Transformer(nn.Module):
    """The decoder without its head: from tokens to hidden states."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        # No padding_idx: in some checkpoints the padding token is also the end token, which needs a gradient.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_adds_one)
        self.ropes = nn.ModuleList(RopeTable(rope) for rope in config.rope_kinds)

    def forward(self, tokens_BS: Tensor, documents: DocumentBounds | None = None) -> Tensor:
        """Hidden states (B, S, H) after the last norm, in the compute dtype. tokens_BS: int64."""
        config = self.config
        batch, seq_len = tokens_BS.shape
        hidden_BSH = self._embed(tokens_BS)
        ropes = self._rotations(documents, seq_len)
        visible = make_visibilities(config, documents, batch, seq_len, hidden_BSH.device, hidden_BSH.dtype)
        return self._run_blocks(hidden_BSH, ropes, [visible[layer] for layer in config.layers])

    def extend(self, tokens_BS: Tensor, lengths_B: Tensor, cache: KVCache) -> Tensor:
        """`forward` for tokens that follow those in `cache`, which also stores them. The arguments are those
        of `Decoder.next_logits`.
        """
        batch, seq_len = tokens_BS.shape
        documents, visible = cache.append(batch, seq_len, lengths_B)
        return self._run_blocks(self._embed(tokens_BS), self._rotations(documents, seq_len), visible)

    def _embed(self, tokens_BS: Tensor) -> Tensor:
        hidden_BSH: Tensor = self.embed_tokens(tokens_BS)
        if self.config.embedding_scale != 1.0:
            # The scale is rounded to the compute dtype first, as when the published checkpoints were trained.
            hidden_BSH = hidden_BSH * torch.full(
                (), self.config.embedding_scale, dtype=hidden_BSH.dtype, device=hidden_BSH.device
            )
        return hidden_BSH

    def _rotations(self, documents: DocumentBounds | None, seq_len: int) -> dict[RopeConfig, Rope]:
        kinds = zip(self.config.rope_kinds, self.ropes, strict=True)
        return {kind: table(documents, seq_len) for kind, table in kinds}

    def _run_blocks(
        self, hidden_BSH: Tensor, ropes: dict[RopeConfig, Rope], visible: Sequence[Visibility]
    ) -> Tensor:
        """The blocks and the last norm. visible: one for each layer."""
        for layer, block, seen in zip(self.config.layers, self.layers, visible, strict=True):
            hidden_BSH = block(hidden_BSH, ropes[layer.rope] if layer.rope else None, seen)
        normed_BSH: Tensor = self.norm(hidden_BSH)
        return normed_BSH


class ChunkLoss(nn.Module):
    """Computes the head and an objective for a chunk of tokens. Has no parameters: `head` is an argument."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.divisor = config.logit_divisor
        self.softcap = config.logit_softcap

    def finish(self, logits: Tensor) -> Tensor:
        """Divides and soft-caps the output of the head, if the config says so."""
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def forward(
        self, head: nn.Module, loss: Objective, hidden_tH: Tensor, labels_t: Tensor, *targets: Tensor
    ) -> Tensor:
        """The values of the objective (t,), 0 where the label is -100, or their sum. float32."""
        logits = Logits(head(hidden_tH), self.finish, words_of(head, self.vocab_size))
        values_t = loss.values(logits, labels_t, *targets)
        return loss.result(torch.where(labels_t != IGNORE_INDEX, values_t, 0.0), labels_t)


class Decoder(nn.Module):
    """A causal language model with the modules and parameters of a Hugging Face ...ForCausalLM."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.chunk_loss = ChunkLoss(config)
        self._tie()

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
        hidden_BSH = self.model(tokens_BS, documents)
        if labels_BS is None:
            words = words_of(self.lm_head, self.config.vocab_size)
            return words.gather(self.chunk_loss.finish(self.lm_head(hidden_BSH)))
        tensors = [each.flatten(0, 1) for each in (hidden_BSH, labels_BS, *loss.targets)]
        found = self._in_chunks(tensors, loss, expected_gradient)
        # clone(), because wrappers put hooks on the output, and an in-place operator on a view loses them.
        return found.unflatten(0, tokens_BS.shape).clone() if found.dim() else found

    def summed_loss(self, tokens_BS: Tensor, documents: DocumentBounds | None, labels_BS: Tensor) -> Tensor:
        """`forward` with labels, up to the order of the sum, but without the head where there is no target:
        its work for prompts is saved. The shapes depend on the labels, so it is not for compiled models.
        """
        is_target_BS = labels_BS != IGNORE_INDEX
        hidden_TH = self.model(tokens_BS, documents)[is_target_BS]
        return self._in_chunks([hidden_TH, labels_BS[is_target_BS]], summed_cross_entropy, 1.0)

    def _in_chunks(self, tensors: Sequence[Tensor], loss: Objective, expected_gradient: float) -> Tensor:
        """The head and the objective for T rows of hidden states, labels and the objective's targets."""
        words = words_of(self.lm_head, self.config.vocab_size)
        if not words.is_all:
            check_serves_parts(loss)
        of_chunk = functools.partial(self.chunk_loss, self.lm_head, loss)
        parameters = tuple(self.lm_head.parameters()) if is_number(loss) else None
        return in_chunks(
            of_chunk, tensors, words.width, parameters=parameters, expected_gradient=expected_gradient
        )

    def hidden_states(self, tokens_BS: Tensor, documents: DocumentBounds | None = None) -> Tensor:
        """Hidden states (B, S, H) after the last norm, in the compute dtype: what the head reads."""
        hidden_BSH: Tensor = self.model(tokens_BS, documents)
        return hidden_BSH

    def logits_of(self, hidden_tH: Tensor) -> Tensor:
        """Logits (t, v) of hidden states, of the words that this rank's head has, in the compute dtype."""
        return self.chunk_loss.finish(self.lm_head(hidden_tH))

    @torch.no_grad()
    def next_logits(self, tokens_BS: Tensor, lengths_B: Tensor, cache: KVCache) -> Tensor:
        """The logits (B, V) of the token that follows each row, in the compute dtype.

        tokens_BS: int64, the tokens that follow those in `cache`, padded on the right with any id. lengths_B:
        int64, 1 ... S: how many they are in each row. `cache` stores them; each row must have room for S.
        Equal to `forward` of the whole rows up to rounding. The model must not be sharded.
        """
        hidden_BSH = self.model.extend(tokens_BS, lengths_B, cache)
        rows_B = torch.arange(len(lengths_B), device=lengths_B.device)
        logits_BV = self.logits_of(hidden_BSH[rows_B, lengths_B - 1])
        return words_of(self.lm_head, self.config.vocab_size).gather(logits_BV)

    def attention_backend(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        one_document_per_row: bool = False,
        seq_len: int | None = None,
    ) -> str:
        """The attention backend that forward uses for rows of `seq_len` tokens (None: long ones) on this
        device in this compute dtype.
        """
        return choose_backend(
            self.config, device, dtype, one_document_per_row=one_document_per_row, seq_len=seq_len
        )

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Recomputes the rope frequencies, which no checkpoint stores. device: None: where they are."""
        for table in self.model.ropes:
            assert isinstance(table, RopeTable)
            table.reset(table.inv_freq_F.device if device is None else torch.device(device))

    def initial_value(self, name: str, seed: int) -> Tensor:
        """The initial value of one parameter: float32, on the CPU, a function of (seed, name, shape) only.

        Matrices are normal with standard deviation config.initializer_range; biases are 0; norms are 1, or 0
        if they multiply by 1 + weight.
        """
        shape = self.get_parameter(name).shape
        is_norm = isinstance(self.get_submodule(name.rpartition(".")[0]), RMSNorm)
        with torch.device("cpu"):
            if is_norm or name.endswith(".bias"):
                return torch.full(shape, 1.0 if is_norm and not self.config.norm_adds_one else 0.0)
            # One generator per name, so that neither sharding nor the order of parameters changes a value.
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            return torch.empty(shape).normal_(0.0, self.config.initializer_range, generator=generator)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fills all parameters with `initial_value`. They must have storage."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, seed))

    def _tie(self) -> None:
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # When a model leaves the meta device, nn.Module makes two parameters of a shared one.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self


def build_on_meta(config: DecoderConfig) -> Decoder:
    """The decoder with all tensors on the meta device, without storage. Tied weights are one parameter.

    Then call `to_empty(device=...)`, and load weights or call `init_weights(seed)`.
    """
    with torch.device("meta"):
        return Decoder(config)


def num_parameters(model: nn.Module) -> int:
    """The number of elements of all parameters. A shared parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
