"""Tensor and sequence parallelism: each matrix of a decoder is cut over the ranks of the mesh axis `tensor`.

Megatron's scheme (arXiv:1909.08053, 2205.05198): q, k, v, gate and up are cut by output features, so that
each rank has whole heads and its share of the MLP; o and down are cut by input features. Each such pair needs
two collectives, one before and one after (activation_collectives.py). With sequence parallelism, norms and
residuals are cut by tokens, and both collectives run in forward and in backward. Without it, the one before
only sums gradients in backward, and the one after only sums outputs in forward. The vocabulary is cut in the
embedding, the head and the loss; its size need not divide.

styles.py says how one module is cut. For a model of your own, write a style plan like the one below
(docs/distributed.md).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lptune.base.errors import UserError
from lptune.distributed.session import World
from lptune.distributed.styles import (
    ColumnParallel,
    FeatureParallelNorm,
    GatheredInput,
    GatheredOutput,
    Replicated,
    RowParallel,
    VocabParallelEmbedding,
    WordParallelHead,
)
from lptune.models import Decoder, DecoderConfig


def decoder_plan(config: DecoderConfig, sequence: bool) -> dict[str, ParallelStyle]:
    """The style plan of a Decoder. sequence: cut the tokens of norms and residuals, too."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block, plan = "model.layers.*", dict[str, ParallelStyle]()
    if config.fused_projections:
        plan[f"{block}.self_attn.qkv_proj"] = ColumnParallel((q_size, kv_size, kv_size))
        plan[f"{block}.mlp.gate_up_proj"] = ColumnParallel((config.intermediate_size,) * 2)
    else:
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
        ):
            plan[f"{block}.{name}"] = ColumnParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"{block}.{name}"] = RowParallel(sequence)
    # One gather serves q, k and v, and one serves gate and up. It must come after these layers in the plan.
    for name in ("self_attn", "mlp"):
        plan[f"{block}.{name}"] = GatheredInput(sequence)
    # partial: ranks have different heads (q_norm, k_norm) or tokens, so they sum the norm's gradient.
    if config.qk_norm != "none":
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            full = config.qk_norm == "full"  # normalizes all heads together; otherwise each head by itself
            plan[f"{block}.{name}"] = FeatureParallelNorm() if full else Replicated(partial=True)
    plan[f"{block}.*layernorm"] = Replicated(partial=sequence)
    plan["model.norm"] = Replicated(partial=sequence)
    plan["model.embed_tokens"] = VocabParallelEmbedding(sequence)
    plan["model"] = GatheredOutput(sequence)
    plan["lm_head"] = WordParallelHead()  # logits stay cut by words: the losses of a Decoder take them so
    return plan


def cut_decoder(model: Decoder, mesh: DeviceMesh, sequence: bool) -> None:
    """Cuts a Decoder over `mesh` (the axis `tensor`), in place. Call it before activation checkpointing and
    `fully_shard`.

    Raises UserError where heads or intermediate_size do not divide.
    """
    config, num_ranks = model.config, mesh.size()
    divided = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in divided.items():
        if size % num_ranks:
            fitting = [str(n) for n in range(1, num_ranks) if not any(each % n for each in divided.values())]
            raise UserError(
                f"parallel.tensor: {num_ranks} ranks do not divide {name}={size}; "
                f"smaller numbers that do: {', '.join(fitting)}"
            )
    cut(model, mesh, decoder_plan(config, sequence))


def cut(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Applies `plan` to `model`, in place; tied parameters stay tied.

    Raises UserError for a parameter that no style of the plan takes.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    parallelize_module(model, mesh, dict(plan))
    # A style made a new parameter for each name. Names that shared one get that of the first name.
    for first, *others in names.values():
        for other in others:
            module, _, parameter_name = other.rpartition(".")
            model.get_submodule(module).register_parameter(parameter_name, model.get_parameter(first))
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(f"parallel.tensor: the plan has no style for {name}; each parameter needs one")


def describe_mesh(model: nn.Module, world: World) -> str:
    """The mesh as text: `8 x cuda`, its axes if it has several, and how modules gather activations."""
    names = world.mesh.mesh_dim_names or ()
    text = f"{world.size} x {world.device.type}"
    if len(names) > 1:
        text += f" ({' x '.join(f'{name} {world.mesh.size(i)}' for i, name in enumerate(names))})"
    gathers = Counter(getattr(module, "token_gather", "none") for module in model.modules())
    del gathers["none"]
    if gathers:
        shown = ", ".join(f"{count} x {how}" for how, count in sorted(gathers.items()))
        text += f", activations gathered: {shown}"
    return text


def fused_rows(model: nn.Module) -> dict[str, Sequence[int]]:
    """Name of each fused parameter that tensor parallelism cut -> rows of the matrices that it stacks."""
    return {
        f"{name}.{parameter}": module.fused_rows
        for name, module in model.named_modules()
        if hasattr(module, "fused_rows")
        for parameter in module._parameters
    }
