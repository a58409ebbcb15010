"""Writes a teacher's most probable words of each target token to disk, for distill without a teacher.

    lptune run precompute_logits --config llama3_2/1b_distill_topk data.source=rows.jsonl
    lptune run distill           --config llama3_2/1b_distill_topk data.source=rows.jsonl

Takes the config of distill: the rows must be the same. The teacher is sharded over 1..N ranks, each of which
writes files of its own. A job that was killed continues after its finished files.
"""

from lptune import checkpoint, data, distillation, distributed, models
from lptune.config import PrecomputeConfig


def main(cfg: PrecomputeConfig) -> None:
    """Runs the job that `cfg` describes. Wrong input raises UserError before logits.folder is changed."""
    with distributed.session(cfg.device, cfg.parallel, cfg.seed, cfg.deterministic) as world:
        # --- Input. All input is read and checked before the folder is made or changed.
        distributed.check_compiler(cfg.compile)
        student = checkpoint.read_base(cfg.model.path, world.print)  # its tokenizer and chat template
        teacher = distillation.LiveTeacher(cfg, world)
        job = distillation.LogitsJob(cfg, world)
        vocab_size = student.config.vocab_size
        tokenizer = data.load_tokenizer(student.folder, cfg.data.chat_template, date=job.started_on)
        teacher.check_tokens(tokenizer, vocab_size)
        with distributed.machine_first(world):  # one rank tokenizes; the others read its cache
            rows, _, report = data.prepare(cfg.data, tokenizer, seed=cfg.seed, vocab_size=vocab_size)
        job.prepare(rows, tokenizer, teacher, vocab_size)
        for line in report:
            world.print(line)

        with job.begin() as is_needed:
            if not is_needed:
                return

            # --- Teacher. It is cut, compiled and sharded; then it gets storage and weights.
            teacher.load()
            assert teacher.low is not None

            # --- Files. Each rank computes a file of its own, and all run equally many batches.
            num_batches = 0
            for file in job.files():
                for batch in file.batches():
                    with teacher.low.step(num_batches, num_passes=1):  # verifies the GEMMs of the first batch
                        found = top_k(teacher, batch, cfg, job)
                    file.add(batch, found)
                    num_batches += 1
                file.write()
            job.finish()


def top_k(
    teacher: distillation.LiveTeacher,
    batch: data.Batch,
    cfg: PrecomputeConfig,
    job: distillation.LogitsJob,
) -> distillation.TopK:
    """The teacher's most probable words for the targets of the batch."""
    hidden_BSH = teacher.hidden_states(batch)
    is_target_BS = (batch.labels_BS != models.IGNORE_INDEX).to(hidden_BSH.device)
    assert teacher.model is not None
    return distillation.top_k(
        teacher.model, hidden_BSH[is_target_BS], cfg.logits.top_k, job.temperatures, job.dtype
    )


def planned_step(cfg: PrecomputeConfig) -> None:
    """For `lptune plan`: nothing is trained. The job prints the size of its files before it computes them."""
