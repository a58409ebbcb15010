"""HFModel: the modules of a transformers model, under its names, as a Backbone.

The model of transformers is not wrapped: its children become those of the Backbone, so parameters have the
names that the checkpoint's own program uses. What its forward does around them is taken apart:

    tokens -> hidden states   its base model's forward, with our attention (attention.py) and document bounds
    hidden states -> logits   the head alone; a factor and a soft-cap follow

The second is tried before anything is trained: transformers' forward runs between a stub of the base model
and a stub of the head, and must do what the facts say, or the model is refused.

Buffers that no checkpoint stores (rotary frequencies) are computed as transformers does when it builds the
model. Buffers that it stores (biases of routers) are constants: read from the checkpoint, never trained, and
exported as they are.
"""

import functools
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from lptune.base.errors import UserError
from lptune.base.text import first_line
from lptune.models.backbone import Backbone, Cache, ChunkLoss, Part, drawn
from lptune.models.context import part
from lptune.models.documents import DocumentBounds
from lptune.models.headers import HFIndex, open_tensors, read_index
from lptune.models.hf import attention, experts, float32, mixers
from lptune.models.hf.facts import HFFacts, HFLayer, config_of, digest, quiet
from lptune.models.hf.names import map_names

_PROBES = (1e-3, -1.0, 7.0, -40.0, 300.0)


class Router(nn.Linear):
    """The linear layer that chooses experts. A class of its own keeps it in high precision: a rounding would
    send tokens to other experts.
    """


class Float32Linear(nn.Linear):
    """A linear layer whose weight transformers keeps in float32. A class of its own, as a router's."""


class HFModel(Backbone):
    """A causal language model of transformers."""

    facts: HFFacts

    def __init__(self, facts: HFFacts) -> None:
        super().__init__()
        self.facts = facts
        causal = _build(_content(facts), facts.where)
        for name, child in causal.named_children():
            self.add_module(name, child)
        self.config = causal.config  # `linear.convert` asks it how many experts a token uses
        for name in _stored_in_float32(facts):
            module = causal.get_submodule(name.rpartition(".")[0])
            if type(module) is nn.Linear:
                module.__class__ = Float32Linear
        self.body_name, self.blocks_name = _body_name(causal, facts.where), _blocks_name(causal, facts.where)
        self.chunk_loss = ChunkLoss(facts.vocab_size, facts.logit_divisor, facts.logit_softcap)
        for mixer in mixers.find(causal):
            mixers.keep_documents_apart(mixer)
        # Its base model would drop all tokens but the last from layers that share keys.
        self._slices = (
            "logits_to_keep" in inspect.signature(type(self.get_submodule(self.body_name)).forward).parameters
        )
        stored = causal.state_dict()
        self._parts = map_names(causal, dict(facts.stored), is_part=facts.is_part)
        for name, transposed in experts.stack(causal).items():
            layer = causal.get_submodule(name)
            size = layer.out_features // layer.num_groups
            parts = self._parts.pop(name, None) or [_of_experts(name, layer, transposed)]
            self._parts[f"{name}.weight"] = experts.stacked_parts(parts, size, transposed)
        self._mapped = {part.stored for parts in self._parts.values() for part in parts}
        self._constants = [name for name, _ in causal.named_buffers() if name in stored]
        self._stored_constants = {
            part.stored for name in self._constants for part in self._parts.get(name, ())
        }
        # What transformers leaves out: by its patterns, and blocks after the last one, which predict further
        # tokens.
        more = _integer(causal.config, "num_nextn_predict_layers", default=0)
        further = range(len(facts.layers), len(facts.layers) + more)
        self._left_out = [
            *(causal._keys_to_ignore_on_load_unexpected or ()),
            *(rf"\blayers\.{number}\." for number in further),
        ]
        if facts.kept is not None:
            kept = set(facts.kept)
            self._remove_blocks(number for number in range(len(self.blocks)) if number not in kept)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode: dropout, jitter of routers and sampled experts are off."""
        return super().train(False)

    @property
    def blocks(self) -> nn.ModuleList:
        found = self.get_submodule(self.blocks_name)
        assert isinstance(found, nn.ModuleList)
        return found

    @property
    def embedding(self) -> nn.Module:
        return self.get_submodule(self.facts.word_names[0].rpartition(".")[0])

    @property
    def head(self) -> nn.Module:
        return self.get_submodule(self.facts.word_names[1].rpartition(".")[0])

    def body(self, tokens_BS: Tensor, documents: DocumentBounds | None = None) -> Tensor:
        return self._body(tokens_BS, documents, None)

    def make_cache(self, batch: int, num_places: int) -> Cache | None:
        """A cache if it proves exact on a small twin. Of any other model (chunked attention, another release
        of transformers) the whole row runs for each token.
        """
        from lptune.models.hf.check import caches_exactly

        # From there on Llama 4 scales queries by a place that it counts itself, from 0 in each forward.
        longest = self.facts.longest_packed_row
        if longest is not None and num_places > longest:
            return None
        return self.new_cache(batch, num_places) if caches_exactly(self.facts) else None

    def new_cache(self, batch: int, num_places: int) -> attention.PastTokens:
        config = self.get_submodule(self.body_name).config
        states = mixers.make_states(config) if self.facts.is_recurrent else None
        return attention.PastTokens(batch, num_places, next(self.parameters()).device, states)

    def extend(self, tokens_BS: Tensor, lengths_B: Tensor, cache: Cache | None) -> Tensor:
        assert cache is None or isinstance(cache, attention.PastTokens)
        return self._body(tokens_BS, None, cache, lengths_B)

    def _body(
        self,
        tokens_BS: Tensor,
        documents: DocumentBounds | None,
        past: attention.PastTokens | None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        longest, group = self.facts.longest_packed_row, self.group
        batch, seq_len = tokens_BS.shape
        seq_len *= 1 if group is None else group.size
        if documents is not None and longest is not None and tokens_BS.shape[1] > longest:
            raise UserError(
                f"data.seq_len: {self.facts.family!r} scales attention by the place in a row from {longest} "
                f"tokens on, so rows of several documents may have {longest} at most"
            )
        arguments: dict[str, Any] = {"logits_to_keep": None} if self._slices else {}
        if documents is not None or group is not None:
            bounds = documents or DocumentBounds.single(batch, seq_len, tokens_BS.device)
            arguments["position_ids"] = part(bounds.positions_BS, group)
        is_recurrent = self.facts.is_recurrent
        if not is_recurrent:
            # Without padding, so transformers' rules of masks are those of one document: ours are added.
            arguments["attention_mask"] = torch.ones_like(tokens_BS)
        elif documents is not None:
            arguments["lptune_rows"] = mixers.Rows.of(documents)

        def backend(dtype: torch.dtype) -> str:
            return self.attention_backend(
                tokens_BS.device, dtype, one_document_per_row=documents is None, seq_len=seq_len
            )

        if past is not None:
            assert lengths_B is not None
            # Rows that fill the cache at once (a score) leave no states: they need not run length by length.
            if past.states is not None and tokens_BS.shape[1] < past.num_places:
                arguments["past_key_values"] = past.states
                if not past.num_used:
                    arguments["lptune_rows"] = mixers.Prompts(tuple(lengths_B.tolist()))
            arguments["position_ids"] = past.append(lengths_B, tokens_BS.shape[1])
        with attention.running(attention.Running(documents, backend, is_recurrent, past, group)):
            found = self.get_submodule(self.body_name)(input_ids=tokens_BS, use_cache=False, **arguments)
        hidden_BSH: Tensor = found.last_hidden_state
        return hidden_BSH

    def initial_value(self, name: str, seed: int) -> Tensor:
        """Random weights for trials, not those of transformers' own initialization: matrices are normal, with
        a standard deviation of 1 / sqrt(columns), biases 0, other vectors 1.
        """
        return _initial(name, tuple(self.get_parameter(name).shape), seed)

    def initial_tensors(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """As published checkpoints store them: transformers' table of names, read backwards."""
        from transformers.core_model_loading import revert_weight_conversion

        with torch.device("meta"):
            causal = _build(_content(self.facts), self.facts.where)
        state = causal.state_dict()
        if self.facts.tied:
            del state[self.facts.word_names[1]]
        for stored, tensor in revert_weight_conversion(causal, state).items():
            yield stored, _initial(stored, tuple(tensor.shape), seed)

    def stored_as(self, name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        """The parts as transformers loads them; without a checkpoint, one of the same name."""
        return self._parts.get(name) or [Part(name, (0,) * len(shape), shape)]

    @property
    def mixtures(self) -> Mapping[str, nn.Module]:
        """Those with transformers' interface of experts; Llama 4 and JetMoe have ways of their own."""
        return {name: each for name, each in self.named_modules() if experts.is_mixture(each)}

    @property
    def float32_names(self) -> frozenset[str]:
        """Those that transformers leaves in float32, and those with which its code computes in float32."""
        found = _stored_in_float32(self.facts) | float32.computed_in_float32(self.facts)
        return found & {
            name for name, _ in self.get_submodule(self.body_name).named_parameters(self.body_name)
        }

    def passes_on(self, stored: str) -> bool:
        """Whether `stored` is a constant, or one of the tensors that transformers leaves out by name."""
        if self.facts.is_part and stored not in self._mapped:
            return True
        return stored in self._stored_constants or any(re.search(each, stored) for each in self._left_out)

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Computes buffers as transformers does, and reads the constants from the checkpoint.

        Raises UserError if the checkpoint lacks one.
        """
        with _parameters_on_meta():
            made = dict(_build(_content(self.facts), self.facts.where).named_buffers())
        # A dry run has no values.
        reads = self._constants and self.facts.stored and detect_fake_mode() is None
        index = read_index(self.facts.folder) if reads else None
        for name, buffer in self.named_buffers():
            to = buffer.device if device is None else torch.device(device)
            value = made[name]
            if index is not None and name in self._constants:
                value = self._constant(name, value, index)
            module, _, last = name.rpartition(".")
            self.get_submodule(module)._buffers[last] = value.to(to)

    def _constant(self, name: str, made: Tensor, index: HFIndex) -> Tensor:
        if not (parts := self._parts.get(name)):
            raise UserError(f"{self.facts.folder}: tensor {name!r} is missing; download the checkpoint again")
        (part,) = parts
        file = self.facts.folder / index.tensors[part.stored].file
        value: Tensor = open_tensors(file).get_tensor(part.stored)
        if value.shape != made.shape:
            raise UserError(
                f"{file}: tensor {part.stored!r} has shape {list(value.shape)}, config.json asks for "
                f"{list(made.shape)}; they do not belong together"
            )
        return value.to(made.dtype)

    def keep_blocks(self, numbers: Sequence[int]) -> None:
        self._remove_blocks(set(range(len(self.facts.layers))).difference(numbers))
        self.facts = self.facts.with_layers(numbers)

    def _remove_blocks(self, numbers: Iterable[int]) -> None:
        removed = set(numbers)
        config = self.get_submodule(self.body_name).config
        for key, values in vars(config).items():
            if isinstance(values, list) and len(values) == len(self.blocks):  # one for each block
                vars(config)[key] = [value for number, value in enumerate(values) if number not in removed]
        vars(config)["num_hidden_layers"] = len(self.blocks) - len(removed)
        for number in removed:
            delattr(self.blocks, str(number))


@functools.lru_cache(maxsize=8)
def _stored_in_float32(facts: HFFacts) -> frozenset[str]:
    with torch.device("meta"):
        return float32.stored_in_float32(_build(_content(facts), facts.where, torch.bfloat16))


def _initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if len(shape) < 2:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
    return drawn(name, shape, shape[-1] ** -0.5, seed)


def _content(facts: HFFacts) -> str:
    """config.json, with the head tied or not as the stored weights are."""
    content: dict[str, Any] = json.loads(facts.content)
    return json.dumps(content | {"tie_word_embeddings": facts.tied})


def _of_experts(name: str, layer: nn.Linear, transposed: bool) -> Part:
    """The tensor of three dimensions that `layer` replaces, whole."""
    num_groups = int(layer.num_groups)  # type: ignore[arg-type]
    sizes = (layer.out_features // num_groups, layer.in_features)
    return Part(name, (0, 0, 0), (num_groups, *(sizes[::-1] if transposed else sizes)))


def facts_of(content: str, where: str, stored: tuple[tuple[str, tuple[int, ...]], ...]) -> HFFacts:
    """The facts of this config.json. Raises UserError for a model that cannot be trained exactly."""
    with torch.device("meta"):
        causal = _build(content, where)
    config = causal.config
    head, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise UserError(f"{where}: {type(causal).__name__} has no plain head and embedding")
    for module in causal.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise UserError(
                    f"{where}: rope_type {kind!r}: transformers rotates all documents of a batch by the "
                    "length of the longest one, so they would depend on each other; it cannot be trained"
                )
    softcap = getattr(config, "final_logit_softcapping", None)
    divisor = _divisor_of_logits(causal, softcap, where)
    blocks = causal.get_submodule(_blocks_name(causal, where))
    num_heads = _integer(config, "num_attention_heads", default=1)
    has_sinks = any(name.endswith("sinks") for name, _ in causal.named_parameters())
    return HFFacts(
        family=config.model_type,
        vocab_size=head.out_features,
        hidden_size=embedding.embedding_dim,
        intermediate_size=_integer(config, "intermediate_size", "moe_intermediate_size", default=1),
        num_heads=num_heads,
        num_kv_heads=_integer(config, "num_key_value_heads", default=num_heads),
        head_dim=_head_dim(blocks) or embedding.embedding_dim // num_heads,
        layers=tuple(_layers(config, blocks)),
        max_position_embeddings=_integer(config, "max_position_embeddings", default=2**20),
        attention_softcap=getattr(config, "attn_logit_softcapping", None),
        tied=head.weight is embedding.weight,
        num_experts=experts.num_experts(causal),
        word_names=(_name_of(causal, embedding), _name_of(causal, head)),
        notes=_notes(config),
        content=content,
        where=where,
        stored=stored,
        logit_softcap=softcap,
        logit_divisor=divisor,
        has_sinks=has_sinks,
        longest_packed_row=_longest_packed_row(config),
        is_recurrent=bool(mixers.find(causal)),
        shares_between_blocks=_shares_between_blocks(config),
    )


def _build(content: str, where: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model, on torch's default device, in `dtype`, with our attention."""
    with quiet():
        from transformers import AutoModelForCausalLM

        attention.register()
        experts.register()
    from_config: Any = AutoModelForCausalLM.from_config
    config = config_of(content, where)
    try:
        causal = from_config(
            config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            experts_implementation=experts.NAME,
        )
    except Exception as error:  # whatever a model of transformers raises
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise UserError(
                f"{where}: the attention of {config.model_type!r} in transformers cannot be replaced, so "
                "documents of a packed row would not be kept apart; this model cannot be trained"
            ) from None
        raise UserError(f"{where}: transformers cannot build the model: {first_line(error)}") from None
    if not hasattr(causal.config, "num_hidden_layers"):
        raise UserError(f"{where}: {type(causal).__name__} is multimodal, and the file has no text_config")
    if taken := [name for name, _ in causal.named_children() if hasattr(Backbone, name)]:
        raise UserError(
            f"{where}: {type(causal).__name__} has a part of the name {taken[0]!r}, which is taken"
        )
    own = [*causal.named_parameters(recurse=False), *causal.named_buffers(recurse=False)]
    if own:
        raise UserError(f"{where}: {type(causal).__name__} has {own[0][0]!r} outside of its modules")
    if getattr(config, "altup_num_inputs", None):
        raise UserError(
            f"{where}: {config.model_type!r} changes hidden states in place, which cannot be recomputed"
        )
    is_named = float32.names_in_float32(causal)
    num_experts = _integer(config, "num_experts", "num_local_experts", "n_routed_experts", default=0)
    for name, module in causal.named_modules():
        parent, last = ["", *str(name).split(".")][-2:]
        if type(module) is not nn.Linear:
            continue
        if "router" in (parent, last) or (last == "gate" and module.out_features == num_experts):
            module.__class__ = Router
        elif is_named(f"{name}.weight"):
            module.__class__ = Float32Linear
    return causal


def _body_name(causal: Any, where: str) -> str:
    """The child of `causal` that makes hidden states."""
    head = causal.get_output_embeddings()
    found: list[str] = [name for name, child in causal.named_children() if child is not head]
    if len(found) != 1:
        raise UserError(
            f"{where}: {type(causal).__name__} is no causal decoder of a base model and a linear head (it "
            f"has {', '.join(found) or 'nothing'} beside its head); such a model cannot be trained"
        )
    return found[0]


def _blocks_name(causal: Any, where: str) -> str:
    """The list of blocks."""
    count = causal.config.num_hidden_layers
    found: list[str] = [
        name
        for name, module in causal.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and name.count(".") == 1
    ]
    if len(found) != 1:
        raise UserError(f"{where}: {type(causal).__name__} has {len(found)} lists of {count} blocks, not one")
    return found[0]


def _shares_between_blocks(config: Any) -> bool:
    """Whether embeddings of layers are one matrix, later blocks read the keys of earlier ones, or a block is
    used several times; or the kinds of blocks are computed, so that `_remove_blocks` cannot name them.
    """
    keys = ("hidden_size_per_layer_input", "num_kv_shared_layers", "hybrid_layer_ids")
    computed = (getattr(type(config), key, None) for key in ("layer_types", "layers_block_type"))
    return any(getattr(config, key, None) for key in keys) or any(isinstance(k, property) for k in computed)


def _layers(config: Any, blocks: nn.Module) -> Iterator[HFLayer]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    for number, block in enumerate(blocks.children()):
        kind = str(kinds[number]) if isinstance(kinds, list) else "full_attention"
        window = getattr(config, "sliding_window", None)
        modules = [(name, type(each).__name__) for name, each in block.named_modules()]
        shapes = [(name, tuple(each.shape)) for name, each in block.named_parameters()]
        yield HFLayer(
            window=window if kinds is None or "sliding" in kind else None,
            kind=kind,
            modules=digest([*modules, *shapes]),
        )


def _notes(config: Any) -> tuple[str, ...]:
    notes = []
    if getattr(config, "router_aux_loss_coef", None):
        notes.append(
            "router_aux_loss_coef: the load-balancing loss of the experts is not added, as in transformers "
            "without output_router_logits"
        )
    return tuple(notes)


def _integer(config: Any, *names: str, default: int) -> int:
    """The first of these settings that is an integer, or a list of them: the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            return int(max(value))
        if isinstance(value, int) and value > 0:
            return value
    return default


def _longest_packed_row(config: Any) -> int | None:
    """From how many tokens on Llama 4 scales attention by the place in the row, not in the document."""
    scales = getattr(config, "attn_temperature_tuning", False)
    return _integer(config, "floor_scale", default=1) if scales else None


def _head_dim(blocks: nn.Module) -> int:
    """The largest size of a head that a module of the blocks names; 0: none does."""
    found = [getattr(each, name, 0) for each in blocks.modules() for name in ("head_dim", "qk_head_dim")]
    return max((size for size in found if isinstance(size, int)), default=0)


def _name_of(causal: Any, module: nn.Module) -> str:
    name: str = next(name for name, each in causal.named_modules() if each is module)
    return f"{name}.weight"


class _Between(nn.Module):
    """Stands in for a module: keeps what it gets, and returns a given value. Attributes are the module's."""

    def __init__(self, module: nn.Module, value: Any) -> None:
        super().__init__()
        self.value, self.got = value, list[Any]()
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: Any, **_: Any) -> Any:
        self.got.extend(args)
        return self.value


class _Output(dict[str, Any]):
    """The result of a base model of which only the hidden states are known."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state") if key == 0 else self.get(key)


def _divisor_of_logits(causal: Any, softcap: float | None, where: str) -> float:
    """By what the logits are divided. Raises UserError if transformers does anything but divide and soft-cap
    them, or gives the head other hidden states than the base model's.
    """
    hidden = torch.arange(float(len(_PROBES))).view(1, -1, 1)
    raw = torch.tensor(_PROBES).view(1, -1, 1)
    body_name, head = _body_name(causal, where), causal.get_output_embeddings()
    head_name = next(name for name, child in causal.named_children() if child is head)
    children = dict(causal._modules)
    stub = _Between(head, raw)
    causal._modules[body_name] = _Between(children[body_name], _Output(last_hidden_state=hidden))
    causal._modules[head_name] = stub
    try:
        tokens = torch.zeros(1, len(_PROBES), dtype=torch.int64)
        found = causal(input_ids=tokens, use_cache=False).logits.view(raw.shape)
    except Exception as error:  # whatever a model of transformers raises
        raise UserError(
            f"{where}: {type(causal).__name__} is no causal decoder whose forward calls a base model and "
            f"then its head ({first_line(error)}); such a model cannot be trained"
        ) from None
    finally:
        causal._modules.update(children)
    divisor = float(raw[0, 0, 0] / found[0, 0, 0])
    divisor = 1.0 if abs(divisor - 1) < 1e-5 else divisor
    expected = ChunkLoss(1, divisor, softcap).finish(raw)
    if not torch.equal(stub.got[0], hidden) or not torch.allclose(found, expected, rtol=1e-5, atol=0.0):
        raise UserError(
            f"{where}: {type(causal).__name__} changes its logits or the head's input in a way that lptune "
            "does not know"
        )
    return divisor


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, modules that are made have their parameters on meta, and their buffers with values."""
    register: Any = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
