"""The result of a dry run as text, at most 80 columns wide."""

from typing import TYPE_CHECKING

import torch

from lptune import linear
from lptune.base.text import flop_text, size_text, table, wrapped
from lptune.plan import memory

if TYPE_CHECKING:
    from lptune.plan.dry_run import DryRun

_WIDTH, _HANG = 80, 2
STAGED = "shards between host and GPU"


def report(found: "DryRun") -> str:
    """The precision, the memory and the collectives of `found`."""
    axes = " x ".join(f"{name} {size}" for name, size in found.mesh.items())
    ranks = torch.Size(found.mesh.values()).numel()
    lines = [
        *precision_lines(found.plan),
        "",
        *_in_parts(
            f"{ranks} x {found.device.name if found.device else found.device_type}, mesh {axes}; "
            f"{_count_text(found.num_parameters)} parameters;",
            f"attention by {found.attention}",
        ),
        *_in_parts(
            f"a step: {found.tokens_per_step:,} tokens, micro-batches a rank: {found.num_micro_batches};",
            f"{flop_text(found.plan.flops_per_token)} a token in linear layers",
            f"and {flop_text(found.attention_flops)} in attention (recomputation apart)",
        ),
        "",
        *_memory_table(found),
        "",
        *_collectives_table(found),
        "",
        *_notes(found),
    ]
    return "\n".join(lines)


def precision_lines(plan: linear.Plan) -> list[str]:
    """The precision plan in few lines. Layers whose GEMMs and gather are alike share a heading; of their rows
    those with one shape are one. A run prints and stores the whole table.
    """
    lines = plan.table().splitlines()
    summary = wrapped(lines[0], hang=_HANG)
    frozen = [line for line in lines[1:] if line.startswith("frozen")]
    if not plan.converted:
        return [*summary, *(part for line in frozen for part in wrapped(line))]
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for layer in plan.layers:
        shape, *how = layer.columns()
        leaf = layer.name.rpartition(".")[2]
        key = (*how, layer.reason or "")
        rows.setdefault(key, {}).setdefault(shape, []).append(leaf)
    for (output, grad_input, grad_weight, gather, reason), shapes in rows.items():
        if reason:
            summary += wrapped(f"high precision, {reason}:", hang=_HANG)
        else:
            summary += _in_parts(
                f"output {output},",
                f"grad_input {grad_input},",
                f"grad_weight {grad_weight},",
                f"all-gather (FSDP) {gather}:",
            )
        for shape, leaves in shapes.items():
            counts = [(name, leaves.count(name)) for name in dict.fromkeys(leaves)]
            names = [name if count == 1 else f"{count} {name}" for name, count in counts]
            summary += wrapped(f"{shape:<16}{', '.join(names)}", indent=2, hang=_HANG)
    return [*summary, *(part for line in frozen for part in wrapped(line))]


def _in_parts(*parts: str) -> list[str]:
    """`parts` in lines; a line ends between two parts, where it can."""
    glued = [part if len(part) > _WIDTH - _HANG else part.replace(" ", "\xa0") for part in parts]
    return [line.replace("\xa0", " ") for line in wrapped(" ".join(glued), _WIDTH, hang=_HANG)]


def _memory_table(found: "DryRun") -> list[str]:
    columns = {**found.peaks, "afterwards": found.resting}
    unit, size = ("GiB", 2**30) if found.peak_bytes >= 2**30 else ("MiB", 2**20)
    names = [name for name in (*memory.CATEGORIES, STAGED) if any(held[name] for held in columns.values())]
    rows = [[name, *(f"{held[name] / size:,.2f}" for held in columns.values())] for name in names]
    rows.append(["sum", *(f"{held.total() / size:,.2f}" for held in columns.values())])
    return table([[f"peak memory of a rank, {unit}", *columns], *rows], "<>", rule=True)


def _collectives_table(found: "DryRun") -> list[str]:
    sizes = {**found.mesh, "all": torch.Size(found.mesh.values()).numel()}
    rows = [
        [operation, dtype, f"{axis} ({sizes.get(axis, '?')})", f"{calls:,}", size_text(num_bytes)]
        for operation, dtype, axis, calls, num_bytes in found.collectives.rows()
    ]
    header = ["collectives of a step", "dtype", "axis (ranks)", "calls", "bytes"]
    return table([header, *rows], "<>", rule=True) if rows else ["collectives of a step: none"]


def _notes(found: "DryRun") -> list[str]:
    notes = []
    if found.collectives:
        notes.append(
            "an all-gather's bytes are those of the gathered buffer, a reduce-scatter's of what is cut up"
        )
    if found.compiles:
        notes.append("blocks ran eagerly here: compiled ones keep fewer activations and temporaries")
    if found.device_type == "cuda":
        notes.append("CUDA's context, NCCL's buffers, kernels' workspaces and fragmentation come on top")
    if more := found.first_collectives - found.collectives:
        calls, num_bytes = more.total(), sum(each.num_bytes * count for each, count in more.items())
        notes.append(
            f"the first step of a run has no amax history, and {calls:,} collectives more "
            f"({size_text(num_bytes)})"
        )
    if found.host_bytes:
        notes.append(
            f"parallel.cpu_offload: {found.host_bytes / 1e9:,.1f} GB of parameters, gradients and "
            "optimizer state of each rank are in host memory, pinned"
        )
    return [line for note in notes for line in wrapped(note, hang=_HANG)]


def _count_text(count: int) -> str:
    return f"{count / 1e9:,.2f} billion" if count >= 1e9 else f"{count / 1e6:,.2f} million"
