"""Greedy generation with the key-value cache and without it, in turns: seconds, tokens per second, ratio.

    python benchmarks/generate.py [--new-tokens 256] [--prompt 16] [--batch 1] [--kind none]...

Without a cache each token runs its whole row again, which grows by one token at a time; nothing is padded.
The model has random weights and the widths of a preset, but few layers and a small vocabulary. Both ways must
write the same tokens in float32, or the benchmark fails. The figure of a way is that of its fastest round.
"""

import copy
import time

import torch
from harness import Results, device_type, facts, parser, synchronize

from lptune import distributed, inference, linear, models
from lptune.config import PrecisionConfig, SamplingConfig


class NoText:
    """Stands for a tokenizer: only token ids are compared."""

    def decode(self, ids: list[int]) -> str:
        return ""


def cached(model: models.Decoder, prompts: list[list[int]], num: int) -> list[list[int]]:
    answers = [inference.Answer(NoText(), (), (), num) for _ in prompts]  # type: ignore[arg-type]
    sample = inference.Sampler(SamplingConfig(), 0, range(len(prompts)))
    for _ in inference.decode(model, prompts, answers, sample):
        pass
    return [answer.ids for answer in answers]


@torch.no_grad()
def uncached(model: models.Decoder, prompts: list[list[int]], num: int) -> list[list[int]]:
    tokens_BS = torch.tensor(prompts, device=next(model.parameters()).device)
    for _ in range(num):
        hidden_BSH = model.model(tokens_BS)
        next_B1 = model.chunk_loss.finish(model.lm_head(hidden_BSH[:, -1:])).argmax(dim=-1)
        tokens_BS = torch.cat([tokens_BS, next_B1], dim=1)
    found: list[list[int]] = tokens_BS[:, len(prompts[0]) :].tolist()
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--preset", default="llama3_2/1b")
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--vocab", type=int, default=2048)
    arguments.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    arguments.add_argument("--new-tokens", type=int, default=256)
    arguments.add_argument("--batch", type=int, default=1)
    arguments.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    arguments.add_argument("--kind", action="append", help="none if no kind is given")
    arguments.add_argument("--rounds", type=int, default=2)
    given = arguments.parse_args()
    family, _, size = given.preset.partition("/")
    content = copy.deepcopy(models.PRESETS[family][size])
    content |= {"num_hidden_layers": given.layers, "vocab_size": given.vocab}
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, given.vocab, (given.batch, given.prompt), generator=generator).tolist()
    with (
        distributed.session(device_type()) as world,
        Results(given.json, **facts(), layers=given.layers) as out,
    ):
        print(f"{given.preset}, {given.layers} layers, {given.dtype}, batch {given.batch}, "
              f"{given.prompt} + {given.new_tokens} tokens, {facts()['device']}")  # fmt: skip
        print(f"{'kind':<20}{'cache s':>10}{'no cache s':>12}{'tokens/s':>10}{'ratio':>8}")
        for kind in given.kind or ["none"]:
            model = models.build_on_meta(models.config_from_dict(content)).to(getattr(torch, given.dtype))
            plan = linear.convert(model, PrecisionConfig(kind=kind), device=world.device)
            model.to_empty(device=world.device)
            model.reset_buffers(world.device)
            model.init_weights(0)
            model.requires_grad_(False)
            low = linear.LowPrecision(model, plan, world=world, verify=False)
            best, ids = dict[str, float](), dict[str, list[list[int]]]()
            for _ in range(given.rounds):
                for name, way in (("cache", cached), ("no cache", uncached)):
                    synchronize()
                    started = time.perf_counter()
                    ids[name] = way(model, prompts, given.new_tokens)
                    took = time.perf_counter() - started
                    best[name] = min(took, best.get(name, took))
            if given.dtype == "float32" and kind == "none" and ids["cache"] != ids["no cache"]:
                raise AssertionError("with the cache other tokens were written")
            ratio = best["no cache"] / best["cache"]
            speed = given.batch * given.new_tokens / best["cache"]
            out.add(kind=kind, cache_s=best["cache"], no_cache_s=best["no cache"], ratio=ratio)
            print(
                f"{kind:<20}{best['cache']:>10.3f}{best['no cache']:>12.3f}{speed:>10.1f}{ratio:>8.2f}",
                flush=True,
            )
            del low


if __name__ == "__main__":
    main()
