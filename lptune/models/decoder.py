"""The decoder: nn.Linear, nn.Embedding and RMSNorm modules, as a `DecoderConfig` describes them.

Attribute names are those of Hugging Face, so that parameters have the names of the checkpoint
(`model.layers.0.self_attn.q_proj.weight`). Precision and sharding are applied from outside; no code here
depends on them. An nn.Linear may become a subclass. `Decoder` is a Backbone (backbone.py), which has its
forward and its loss.

Blocks with equal LayerConfigs share one compiled graph, for two reasons. A block gets all values that vary
(hidden states, rotation, visibility) as arguments. Its constants (window, scales) depend only on the
LayerConfig, never on the number of the block.

Shapes: B batch, S sequence, T = B * S, H hidden, N query heads, M key heads, D head size, I intermediate, V
vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lptune.models.attention import attend, make_visibilities
from lptune.models.backbone import Backbone, Cache, ChunkLoss, Cut, Part, TensorPlan, drawn
from lptune.models.cache import KVCache
from lptune.models.config import ACTIVATIONS, DecoderConfig, LayerConfig, RopeConfig
from lptune.models.context import Group
from lptune.models.documents import DocumentBounds, Visibility
from lptune.models.rope import Rope, RopeTable, apply_rope

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
QK_NORM_NAMES: dict[str, tuple[str, ...]] = {
    "none": (),
    "head": ("q_norm", "k_norm"),
    "full": ("q_norm", "k_norm"),
    "rotated": ("query_layernorm", "key_layernorm"),
}
"""By kind of norm of q and k: the names of the two."""


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
        self.interleaved = layer.rope is not None and layer.rope.interleaved
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
        for name, size in zip(QK_NORM_NAMES[self.qk_norm], (q_size, kv_size), strict=False):
            size = size if self.qk_norm == "full" else config.head_dim
            self.add_module(name, RMSNorm(size, config.norm_eps, config.norm_adds_one))

    def forward(self, hidden_BSH: Tensor, rope: Rope | None, visible: Visibility) -> Tensor:
        if self.fused:
            qkv = self.qkv_proj(hidden_BSH)
            # Under tensor parallelism the projection returns this rank's parts of q, k and v.
            shares = [size * qkv.shape[-1] // sum(self.sizes) for size in self.sizes]
            q, k, v = qkv.split(shares, dim=-1)
        else:
            q, k, v = self.q_proj(hidden_BSH), self.k_proj(hidden_BSH), self.v_proj(hidden_BSH)
        if self.qk_norm == "full":
            q, k = self._normed(q, k)
        # -1, not the number of heads, because a rank may have only some of the heads
        q_BSND, k_BSMD, v_BSMD = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm == "head":
            q_BSND, k_BSMD = self._normed(q_BSND, k_BSMD)
        if rope is not None:
            q_BSND, k_BSMD = (apply_rope(x, rope, interleaved=self.interleaved) for x in (q_BSND, k_BSMD))
            if rope.query_scale_BS11 is not None:
                q_BSND = q_BSND * rope.query_scale_BS11.to(q_BSND.dtype)
        if self.qk_norm == "rotated":
            q_BSND, k_BSMD = self._normed(q_BSND, k_BSMD)
        out_BSND = attend(
            q_BSND, k_BSMD, v_BSMD, visible, scale=self.scale, window=self.window, softcap=self.softcap
        )
        out_BSH: Tensor = self.o_proj(out_BSND.flatten(-2))
        return out_BSH

    def _normed(self, *q_and_k: Tensor) -> Iterator[Tensor]:
        names = QK_NORM_NAMES[self.qk_norm]
        return (getattr(self, name)(each) for name, each in zip(names, q_and_k, strict=True))


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

    def forward(
        self, tokens_BS: Tensor, documents: DocumentBounds | None = None, group: Group | None = None
    ) -> Tensor:
        """Hidden states (B, S, H) after the last norm, in the compute dtype. tokens_BS: int64. group: the
        ranks that have the other tokens of the rows (context.py); `documents` are of whole rows.
        """
        config = self.config
        batch, seq_len = tokens_BS.shape
        seq_len *= 1 if group is None else group.size
        hidden_BSH = self._embed(tokens_BS)
        ropes = self._rotations(documents, seq_len)
        if group is not None:
            ropes = {kind: rope.part(group) for kind, rope in ropes.items()}
        device, dtype = hidden_BSH.device, hidden_BSH.dtype
        visible = make_visibilities(config, documents, batch, seq_len, device, dtype, group)
        return self._run_blocks(hidden_BSH, ropes, [visible[layer] for layer in config.layers])

    def extend(self, tokens_BS: Tensor, lengths_B: Tensor, cache: KVCache) -> Tensor:
        """`forward` for tokens that follow those in `cache`, which also stores them. The arguments are those
        of `Backbone.next_logits`.
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


class Decoder(Backbone):
    """A causal language model with the modules and parameters of a Hugging Face ...ForCausalLM."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.facts = self.config = config
        self.model = Transformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.chunk_loss = ChunkLoss(config.vocab_size, config.logit_divisor, config.logit_softcap)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def embedding(self) -> nn.Module:
        return self.model.embed_tokens

    @property
    def head(self) -> nn.Module:
        return self.lm_head

    def body(self, tokens_BS: Tensor, documents: DocumentBounds | None = None) -> Tensor:
        hidden_BSH: Tensor = self.model(tokens_BS, documents, self.group)
        return hidden_BSH

    def make_cache(self, batch: int, num_places: int) -> KVCache:
        weight = next(self.parameters())
        return KVCache(self.config, batch, num_places, weight.device, weight.dtype)

    def extend(self, tokens_BS: Tensor, lengths_B: Tensor, cache: Cache | None) -> Tensor:
        assert isinstance(cache, KVCache)
        return self.model.extend(tokens_BS, lengths_B, cache)

    def keep_blocks(self, numbers: Sequence[int]) -> None:
        super().keep_blocks(numbers)
        self.config = self.model.config = self.config.with_layers(numbers)

    def stored_as(self, name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        """One tensor of the same name, with the prefix of the checkpoint."""
        own, stored = ("model.", "lm_head."), self.config.prefixes
        number = int(name.startswith(own[1]))
        return super().stored_as(stored[number] + name.removeprefix(own[number]), shape)

    def passes_on(self, stored: str) -> bool:
        """Whether the tensor is of another part of the model."""
        prefixes = self.config.prefixes
        return prefixes[0] != "model." and not stored.startswith(prefixes)

    def tensor_plan(self) -> TensorPlan:
        """Megatron's scheme: q, k, v, gate and up cut by output features, o and down by input features."""
        config, block, cuts = self.config, "model.layers.*", dict[str, Cut]()
        if config.fused_projections:
            q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            cuts[f"{block}.self_attn.qkv_proj"] = Cut("columns", (q_size, kv_size, kv_size))
            cuts[f"{block}.mlp.gate_up_proj"] = Cut("columns", (config.intermediate_size,) * 2)
        else:
            for name in ("q_proj", "k_proj", "v_proj"):
                cuts[f"{block}.self_attn.{name}"] = Cut("columns")
            for name in ("gate_proj", "up_proj"):
                cuts[f"{block}.mlp.{name}"] = Cut("columns")
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            cuts[f"{block}.{name}"] = Cut("rows")
        # One gather serves q, k and v, and one serves gate and up. It comes after these layers.
        for name in ("self_attn", "mlp"):
            cuts[f"{block}.{name}"] = Cut("input")
        # `full` normalizes all heads together, `head` and `rotated` each head by itself.
        style = "norm over features" if config.qk_norm == "full" else "norm in heads"
        cuts |= {f"{block}.self_attn.{name}": Cut(style) for name in QK_NORM_NAMES[config.qk_norm]}
        cuts[f"{block}.*layernorm"] = cuts["model.norm"] = Cut("norm")
        cuts |= {"model.embed_tokens": Cut("embedding"), "model": Cut("output"), "lm_head": Cut("head")}
        divided = {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
        }
        return TensorPlan(cuts, divided)

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
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
        if is_norm or name.endswith(".bias"):
            value = 1.0 if is_norm and not self.config.norm_adds_one else 0.0
            return torch.full(shape, value, device="cpu")
        return drawn(name, shape, self.config.initializer_range, seed)
