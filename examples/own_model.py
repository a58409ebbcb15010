"""Trains your own model with your own loop in low precision, on any number of ranks.

    torchrun --nproc-per-node 4 examples/own_model.py int8_rowcol 2      kind, tensor-parallel ranks

Only PLAN and the calls of `linear.` and `distributed.` depend on precision or ranks. All other code is
ordinary PyTorch. On a CPU, float8 is emulated. docs/distributed.md explains PLAN.
"""

import sys
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lptune import distributed, linear
from lptune.config import ParallelConfig, PrecisionConfig
from lptune.distributed import ColumnParallel, GatheredInput, Replicated, RowParallel

HIDDEN, NUM_HEADS, NUM_BLOCKS, VOCABULARY, SEQ_LEN, BATCH, NUM_STEPS = 128, 4, 2, 256, 64, 8, 20


class Attention(nn.Module):
    """Causal attention without position embeddings, which it does not need (arXiv:2305.19466)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (-1, HIDDEN // NUM_HEADS)) for y in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (y.transpose(1, 2) for y in heads)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


PLAN = {
    "embedding": distributed.VocabParallelEmbedding(),
    "blocks.*.attention.qkv": ColumnParallel((HIDDEN, HIDDEN, HIDDEN)),
    "blocks.*.attention.out": RowParallel(),
    "blocks.*.mlp.0": ColumnParallel(),
    "blocks.*.mlp.2": RowParallel(),
    "blocks.*.attention": GatheredInput(),
    "blocks.*.mlp": GatheredInput(),
    "blocks.*.norm?": Replicated(),
    "norm": Replicated(),
    "head": distributed.VocabParallelHead(),
}


def main(kind: str, num_tensor_ranks: int) -> None:
    parallel = ParallelConfig(tensor=num_tensor_ranks)
    with distributed.session("auto", parallel) as world:
        torch.manual_seed(0)  # the same weights on every rank
        blocks = [Block() for _ in range(NUM_BLOCKS)]
        embedding, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        parts = {"embedding": embedding, "blocks": nn.Sequential(*blocks)}
        parts |= {"norm": nn.LayerNorm(HIDDEN), "head": head}
        model = nn.Sequential(OrderedDict(parts)).to(world.device)
        emulate = world.device.type == "cpu" and not kind.startswith("int8")
        plan = linear.convert(model, PrecisionConfig(kind=kind, emulate=emulate))
        execution = distributed.Execution(parallel=parallel, compile="block")
        distributed.parallelize(model, world, execution, blocks=blocks, plan=PLAN)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        low = linear.LowPrecision(model, plan, optimizer, world=world)
        torch.manual_seed(1 + world.data_rank)  # different data on each data rank
        for step in range(NUM_STEPS):
            first = torch.randint(0, VOCABULARY, (BATCH, 1), device=world.device)
            tokens = (first + 3 * torch.arange(SEQ_LEN + 1, device=world.device)) % VOCABULARY
            with low.step(step, num_passes=1):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            world.print(f"step {step + 1}  loss {world.sum(loss) / world.data_size:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
