"""torchtune's training step for benchmarks/step.py: a process of its own, because it needs its own torchao.

    python step_torchtune.py FOLDER eager|compiled NUM_THREADS DEVICE LEARNING_RATE MAX_GRAD_NORM

FOLDER: as step_variants.write_inputs makes it. Reads lines; after each it does one step and writes a line of
JSON: seconds, loss, gradient norm. The step is that of torchtune's recipe full_finetune_single_device with
dtype=bf16: weights, gradients and moments in bf16, fused AdamW, the loss in 8 chunks, layers and loss
compiled one by one, no recomputation. Imports nothing of lptune.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torchtune import training
from torchtune.models.convert_weights import hf_to_tune
from torchtune.models.llama3 import llama3
from torchtune.modules.attention_utils import packed_block_causal_mask
from torchtune.modules.loss import CEWithChunkedOutputLoss


def main() -> None:
    folder, mode, num_threads, device = sys.argv[1:5]
    lr, max_grad_norm = map(float, sys.argv[5:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torchtune logs is no answer
    torch.set_num_threads(int(num_threads))
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    rows = load_file(Path(folder) / "rows.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden = config["hidden_size"]
    with torch.device(device):
        model = llama3(
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            embed_dim=hidden,
            max_seq_len=config["max_position_embeddings"],
            rope_base=int(config["rope_theta"]),
            intermediate_dim=config["intermediate_size"],
            norm_eps=config["rms_norm_eps"],
        ).to(torch.bfloat16)
    weights = load_file(Path(folder) / "model.safetensors")
    model.load_state_dict(hf_to_tune(weights, heads, kv_heads, hidden))
    del weights
    for rope in model.modules():
        if hasattr(rope, "rope_init"):  # .to(bfloat16) has rounded its table; the recipe builds it in float32
            rope.rope_init()
            rope.to(device)
    loss_of = CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_of.num_output_chunks)
    if mode == "compiled":
        training.compile_model(model, verbose=False)
        loss_of = training.compile_loss(loss_of, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    tokens, labels, positions = (rows[name].to(device) for name in ("tokens", "labels", "positions"))
    lengths = [torch.bincount(row) for row in rows["documents"]]

    def step() -> tuple[Tensor, Tensor]:
        mask = packed_block_causal_mask(lengths)
        mask = mask.to(device) if isinstance(mask, Tensor) else mask
        loss = loss_of(model(tokens, mask=mask, input_pos=positions), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    print(json.dumps({"torch": torch.__version__}), file=answers, flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        loss, norm = (value.item() for value in step())
        found = {"seconds": time.perf_counter() - started, "loss": loss, "grad_norm": norm}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
