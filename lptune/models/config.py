"""DecoderConfig: the architecture of a decoder. It is read from config.json, and modules are built from it.

All supported families have the same structure: an embedding, then in each block `x += attention(norm(x))` and
`x += mlp(norm(x))`, then a last norm and a linear head. They differ in a few points: where the norms are,
whether q and k are normed, which layers have a window, and several scale factors. Each point is a field here.
So modules ask "is there a norm here?", never "is this Gemma?". This file imports no torch.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lptune.models.facts import Facts, Layer

if TYPE_CHECKING:
    from lptune.models.decoder import Decoder

NORM_PLACEMENTS = ("pre", "post", "both")
QK_NORMS = ("none", "head", "full", "rotated")
ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "silu": ("silu", {}),
    "swish": ("silu", {}),
    "gelu": ("gelu", {}),
    "gelu_new": ("gelu", {"approximate": "tanh"}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": "tanh"}),
    "relu": ("relu", {}),
}
"""Name in config.json -> the function of torch.nn.functional and its arguments."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The angles of rotary positions: `angle[position, i] = position * inv_freq[i]`. See rope.py."""

    kind: str = "default"
    """default | linear | llama3 | yarn | longrope."""
    theta: float
    """Base of the geometric series of frequencies."""
    rotary_dim: int
    """Number of dimensions of each head that are rotated, from the first on; the others stay unchanged."""
    interleaved: bool = False
    """Whether dimensions 2i and 2i + 1 are rotated together, and not i and i + rotary_dim / 2."""
    factor: float = 1.0
    """Factor by which the context was stretched (linear, llama3, yarn)."""
    original_max_position_embeddings: int = 0
    """Context length before stretching (llama3, yarn, longrope)."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original length / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original length / high_freq_factor are not stretched."""
    beta_fast: float = 32.0
    """yarn: dimensions with more turns than this over the original length are not stretched."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer turns than this over the original length are stretched fully."""
    truncate: bool = True
    """yarn: round the two limits outwards to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope: one factor per frequency, for documents up to the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: one factor per frequency, for longer documents."""
    query_growth: float = 0.0
    """b in 1 + b * log(1 + floor(position / original length)), by which rotated queries are multiplied."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Layer):
    """The settings that may differ between blocks of a decoder."""

    rope: RopeConfig | None
    """None: no rotary positions (NoPE)."""

    @property
    def reads(self) -> tuple[Hashable, ...]:
        """Its table of rotary positions and its mask."""
        return self.rope, self.window


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Facts):
    """The architecture of one decoder. Defaults are those of Llama; families.py sets the other values."""

    layers: tuple[LayerConfig, ...]
    norm_eps: float
    """Added to the mean square in every RMSNorm."""
    activation: str = "silu"
    """Nonlinearity of the gated MLP."""
    attention_scale: float
    """Factor of q @ k.T."""
    logit_softcap: float | None = None
    """c in c * tanh(logits / c), which is applied to the logits; None: no soft-cap."""
    logit_divisor: float = 1.0
    """Logits are divided by this."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by this."""
    residual_scale: float = 1.0
    """Outputs of attention and MLP are multiplied by this before they are added to the residual stream."""
    norm_placement: str = "pre"
    """Norm of the inputs of attention and MLP (pre), of their outputs (post), or of both."""
    norm_adds_one: bool = False
    """Whether norms multiply by 1 + weight."""
    qk_norm: str = "none"
    """none; head: norm of q and k in each head; full: over all heads together; rotated: in each head, after
    the rotation.
    """
    qkv_bias: bool = False
    """Whether the q, k and v projections have a bias."""
    output_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the projections of the MLP have a bias."""
    fused_projections: bool = False
    """Whether the checkpoint stores qkv_proj and gate_up_proj instead of five separate weights."""
    initializer_range: float = 0.02
    """Standard deviation of new random weights."""
    prefixes: tuple[str, str] = ("model.", "lm_head.")
    """What the names of the checkpoint's tensors begin with: of the body, and of the head. Others than these
    two are of the text part of a model whose further tensors pass on.
    """
    layer_kinds: tuple[LayerConfig, ...] = field(init=False, repr=False, compare=False)
    """The distinct entries of `layers`, in order of appearance."""

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert self.norm_placement in NORM_PLACEMENTS, self.norm_placement
        assert self.qk_norm in QK_NORMS, self.qk_norm
        object.__setattr__(self, "layer_kinds", tuple(dict.fromkeys(self.layers)))

    def build(self) -> "Decoder":
        """The decoder. Tied weights are one parameter."""
        from lptune.models.decoder import Decoder  # torch

        return Decoder(self)

    @property
    def num_layers(self) -> int:
        """The number of decoder blocks."""
        return len(self.layers)

    @property
    def rope_kinds(self) -> tuple[RopeConfig, ...]:
        """The distinct rope settings of the layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def num_parameters(self) -> int:
        """The number of weights of the decoder; a tied head counts once."""
        width, num_kv = self.hidden_size, self.num_kv_heads * self.head_dim
        num_q = self.num_heads * self.head_dim
        attention = 2 * width * (num_q + num_kv)
        attention += self.qkv_bias * (num_q + 2 * num_kv) + self.output_bias * width
        attention += {"none": 0, "full": num_q + num_kv}.get(self.qk_norm, 2 * self.head_dim)
        mlp = 3 * width * self.intermediate_size + self.mlp_bias * (2 * self.intermediate_size + width)
        norms = (4 if self.norm_placement == "both" else 2) * width
        words = (1 if self.tied else 2) * self.vocab_size * width
        return self.num_layers * (attention + mlp + norms) + width + words
