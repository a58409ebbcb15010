"""What a decoder is made of, as values: config.json is turned into this, and the modules are built from it.

All supported families are the same machine: embed, then per layer `x += attention(norm(x))` and `x +=
mlp(norm(x))`, then a last norm and a linear head. They differ in a handful of places (where the norms stand,
whether q and k are normed, which layers look through a window, what is scaled by what), and each such place
is one field here. So the modules ask "is there a norm here?", never "is this Gemma?". Imports no torch.
"""

from dataclasses import dataclass, field

NORM_PLACEMENTS = ("pre", "post", "both")
QK_NORMS = ("none", "head", "full")
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
    """How positions become angles, `angle[position, i] = position * inv_freq[i]`; rope.py has the kinds."""

    kind: str = "default"
    """default | linear | llama3 | yarn | longrope."""
    theta: float
    """Base of the geometric series of wavelengths."""
    rotary_dim: int
    """How many of a head's first numbers are rotated; the rest pass through."""
    factor: float = 1.0
    """By how much the context was stretched (linear, llama3, yarn)."""
    original_max_position_embeddings: int = 0
    """Context length before stretching (llama3, yarn, longrope)."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn, longrope)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original length / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original length / this are left alone."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the original length are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched in full."""
    truncate: bool = True
    """yarn: round the two limits outwards to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope: one stretch per dimension pair, for documents within the original length."""
    long_factor: tuple[float, ...] = ()
    """longrope: the same for longer documents."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer. Layers with equal values share one compiled graph."""

    window: int | None = None
    """Query i sees keys i - window + 1 ... i; None sees the whole document up to i."""
    rope: RopeConfig | None
    """None: the layer knows no positions (NoPE)."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder. The defaults are a Llama's; `families.py` says which family sets what."""

    family: str
    """`model_type` of the checkpoint. For messages only: no module branches on it."""
    vocab_size: int
    """Rows of the embedding and of the head."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; num_heads is a multiple (GQA)."""
    head_dim: int
    """Numbers per head; num_heads * head_dim need not be hidden_size."""
    layers: tuple[LayerConfig, ...]
    """One entry per block."""
    norm_eps: float
    """Added to the mean square in every RMSNorm."""
    max_position_embeddings: int
    """Longest document that the checkpoint was made for."""
    activation: str = "silu"
    """Nonlinearity of the gated MLP."""
    tied: bool = False
    """The head's weight is the embedding's."""
    attention_scale: float
    """Multiplies q @ k.T."""
    attention_softcap: float | None = None
    """c * tanh(scores / c) before the mask."""
    logit_softcap: float | None = None
    """The same on the final logits."""
    logit_divisor: float = 1.0
    """Logits are divided by this."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by this."""
    residual_scale: float = 1.0
    """What attention and MLP add to the residual stream is multiplied by this."""
    norm_placement: str = "pre"
    """pre: norm before attention and MLP; post: norm of what they return; both."""
    norm_adds_one: bool = False
    """Norms multiply by 1 + weight, so that a zero weight is the identity."""
    qk_norm: str = "none"
    """head: norm of each head's q and k; full: over all heads together."""
    qkv_bias: bool = False
    """q, k and v projections have a bias."""
    output_bias: bool = False
    """The attention's output projection has a bias."""
    mlp_bias: bool = False
    """The MLP's projections have a bias."""
    fused_projections: bool = False
    """The checkpoint stores qkv_proj and gate_up_proj instead of five separate weights."""
    initializer_range: float = 0.02
    """Standard deviation of new random weights."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What config.json asks for and a run does not do; a line each."""
    layer_kinds: tuple[LayerConfig, ...] = field(init=False, repr=False, compare=False)
    """The distinct entries of `layers`, in order of appearance."""

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert self.norm_placement in NORM_PLACEMENTS, self.norm_placement
        assert self.qk_norm in QK_NORMS, self.qk_norm
        object.__setattr__(self, "layer_kinds", tuple(dict.fromkeys(self.layers)))

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    @property
    def rope_kinds(self) -> tuple[RopeConfig, ...]:
        """The distinct rope settings of the layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def linear_flops_per_token(self) -> int:
        """Floating point operations of all linear layers, head included, for one token of one forward pass.

        Two per weight. A training step does three times as many (forward, grad_input, grad_weight).
        """
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return 2 * (self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size)

    def attention_flops_per_token(self, document_len: int) -> float:
        """Operations of q @ k.T and scores @ v for one token of one forward pass, averaged over a document.

        A causal query sees half of the document on average, or its window.
        """
        seen = [min(document_len / 2, layer.window or document_len) for layer in self.layers]
        return 4 * self.num_heads * self.head_dim * sum(seen)
