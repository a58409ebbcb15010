"""Do the tests still notice faults? One fault at a time is planted in a copy of the tree.

    python -m tests.proofs.planted [--only TEXT] [--jobs 1]

A fault is a text of a file, the text that replaces it, and the test files that should fail then, run as the
suite runs them (without what is marked slow or kernels). The program prints how many faults were noticed, and
names those that escaped. Many of the faults were once in lptune: `mended` says what they did, as docs/log.md
and CHANGELOG.md do. tests/proofs/test_planted.py holds that every text still occurs exactly once, so that a
fault moves along with its code.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.helpers import cold

ROOT = Path(__file__).parents[2]
SUITE = "not slow and not kernels"
_MOST_S = 300.0


class Fault(NamedTuple):
    """One fault, and who must notice it."""

    file: str
    """Below lptune/."""
    old: str
    new: str
    tests: str
    """Files below tests/, with a blank between them."""
    mended: str = ""
    """What it did when lptune had it; empty if it never had."""


FAULTS = [
    # --- numerics
    Fault(
        "linear/weights/reduce_scatter.py",
        'random_key(random_key(self._seed, step, comm.name), micro_batch, "reduce")',
        'random_key(random_key(self._seed, 0, comm.name), micro_batch, "reduce")',
        "distributed/test_reduce_dtype.py",
    ),
    Fault(
        "linear/weights/reduce_scatter.py",
        "        if op == dist.ReduceOp.AVG:",
        "        if op == dist.ReduceOp.AVG and self.dtype != torch.int8:",
        "distributed/test_reduce_dtype.py",
    ),
    Fault(
        "training/from_host.py",
        "streams.wait(streams.bring, sent[number % len(rounds)])",
        "pass",
        "training/test_from_host.py",
    ),
    Fault(
        "training/in_backward.py",
        '        if reduced.device.type != "cuda":\n            self._update_rest()',
        '        if reduced.device.type != "cuda":',
        "training/test_from_host.py",
    ),
    Fault(
        "distributed/parallelize.py",
        "    others = in_blocks | of_embedding | in_float32",
        "    others = in_blocks | in_float32",
        "plan/test_fit.py",
    ),
    Fault(
        "training/muon.py",
        "update = update.masked_fill(found_inf.bool(), 0)",
        "pass",
        "training/test_update.py",
    ),
    Fault(
        "numerics/quantize.py",
        "scale = torch.where(amax == 0, 0.0, scale)",
        "scale = torch.where(amax == 0, 1.0, scale)",
        "numerics/test_scales.py",
        "a row of zeros with a scale of 1 took the error of grad_input from 0.01 to 0.94",
    ),
    Fault(
        "numerics/quantize.py",
        "not_finite = ~(amax < torch.inf)",
        "not_finite = amax == torch.inf",
        "numerics/test_scales.py",
    ),
    Fault(
        "numerics/quantize.py",
        "scale = torch.where(tiny, SMALLEST_SCALE, scale)",
        "scale = scale.clamp(min=1e-12)",
        "numerics/test_scales.py",
    ),
    Fault(
        "numerics/quantize.py",
        "scaled.round() if fmt.mantissa_bits",
        "(scaled + 0.5).floor() if fmt.mantissa_bits",
        "numerics/test_scales.py numerics/test_formats.py",
    ),
    Fault(
        "numerics/quantize.py",
        "return torch.where(amax.isnan(), torch.inf, amax)",
        "return amax",
        "numerics/test_scales.py distributed/test_gather.py linear/steps/test_delayed.py",
    ),
    Fault(
        "numerics/rounding.py",
        "rounded = (below + (random < steps - below)) * step",
        "rounded = (steps + random).floor() * step",
        "numerics/test_rounding.py",
    ),
    Fault(
        "numerics/mx.py",
        "power_of_two=True)",
        "power_of_two=False)",
        "numerics/test_scales.py",
    ),
    # --- kernels
    Fault(
        "kernels/scaled_mm.py",
        "return acc_MN if scale_b is None else acc_MN * scale_b",
        "return acc_MN if scale_b is None else acc_MN * scale_b.mean()",
        "kernels/test_scaled_mm.py",
    ),
    Fault("kernels/scaled_mm.py", "    note(layer, gemm)\n", "", "linear/steps/test_verify.py"),
    Fault(
        "kernels/scaled_mm.py",
        "acc_MN += mm(a_MK[:, part], b_KN[part])",
        "acc_MN = mm(a_MK[:, part], b_KN[part])",
        "kernels/test_scaled_mm.py",
    ),
    Fault(
        "kernels/stochastic.py",
        "return key ^ _SALTS[dim], micro_batch * num_elements",
        "return key ^ _SALTS[dim], 0",
        "kernels/test_stochastic.py proofs/test_equivalence.py",
    ),
    Fault(
        "kernels/stochastic.py",
        "return key ^ _SALTS[dim],",
        "return key,",
        "kernels/test_stochastic.py linear/test_linear.py",
    ),
    # --- linear
    Fault(
        "linear/module.py",
        "return w_NK if w_NK.dtype == dtype else cast(w_NK, dtype)",
        "return w_NK",
        "linear/test_linear.py linear/weights/test_compute_weights.py",
    ),
    Fault(
        "linear/kinds/rowwise.py",
        "return rotate(gradient, gradient.dtype) if spec.rotated else gradient",
        "return gradient",
        "linear/test_linear.py linear/test_kinds.py",
    ),
    Fault(
        "linear/weights/int8_weight.py",
        "q_NK = torch.where(scale_N1 == 0, 0.0, w32_NK / scale_N1).round()",
        "q_NK = (w32_NK / scale_N1).trunc()",
        "checkpoint/test_int8_weight.py linear/weights/test_int8_weight.py",
    ),
    Fault(
        "linear/low_precision.py",
        "        self._rounding.start(self._step, number)\n",
        "        self._rounding.start(0, number)\n",
        "linear/test_low_precision.py linear/steps/test_stochastic.py proofs/test_equivalence.py",
    ),
    # --- histories and gathers
    Fault(
        "linear/steps/delayed.py",
        "self._history_LH3.copy_(torch.where(skipped, self._before_LH3, self._history_LH3))",
        "pass",
        "linear/steps/test_delayed.py training/test_update.py",
        "a skipped step left its amaxes in the histories",
    ),
    Fault(
        "linear/steps/delayed.py",
        "        amaxes /= self._factor_3\n",
        "",
        "linear/steps/test_delayed.py proofs/test_rank_matrix.py",
        "a run that resumed on another number of ranks scaled gradients by the old one",
    ),
    Fault(
        "linear/steps/delayed.py",
        "amaxes = torch.where(amaxes.isinf(), 0.0, amaxes)",
        "amaxes = amaxes + 0",
        "linear/steps/test_delayed.py",
    ),
    Fault(
        "linear/weights/weight_amax.py",
        "return min(mesh.get_local_rank() * -(-full_rows // mesh.size()), full_rows)",
        "return mesh.get_local_rank() * (full_rows // mesh.size())",
        "distributed/test_gather.py",
    ),
    Fault(
        "linear/weights/weight_amax.py",
        "= measured.to(shard.compute_dtype)",
        "= measured",
        "distributed/test_gather.py",
        "the amax of float32 rows gave scales of other bits than that of the rows in bf16",
    ),
    # --- the update
    Fault(
        "training/update.py",
        "mine = loss_sum if world.rank % world.ranks_per_row == 0 else torch.zeros_like(loss_sum)",
        "mine = loss_sum",
        "training/test_update.py distributed/test_tensor_parallel.py recipes/test_meshes.py",
        "tensor-parallel ranks each counted the loss",
    ),
    Fault(
        "training/update.py",
        "skipped = ~(loss.isfinite() & norm.isfinite())",
        "skipped = ~loss.isfinite()",
        "training/test_update.py",
    ),
    Fault(
        "training/optimizer.py",
        "return is_first_holder(gradient)",
        "return True",
        "training/test_update.py training/test_training.py distributed/test_parallelize.py",
        "replicas each counted their squares in the gradient norm",
    ),
    Fault(
        "training/chunked_adamw.py",
        'state["step"] -= found_inf',
        "pass",
        "training/test_chunked_adamw.py training/test_update.py",
        "a skipped step counted in the moments of INT8 weights",
    ),
    Fault(
        "training/chunked_adamw.py",
        'if "num_updates" in state:',
        "if False:",
        "training/test_chunked_adamw.py training/test_update.py",
        "after a skipped step INT8 weights drew other random bits",
    ),
    Fault(
        "training/chunked_adamw.py",
        "weight_here[0].copy_(round_to_bfloat16(w_NK, *bits))",
        "weight_here[0].copy_(w_NK)",
        "training/test_master.py",
        "weights in bfloat16 were rounded to nearest",
    ),
    Fault(
        "training/chunked_adamw.py",
        "bits = RandomBits(key, (first_row + rows.start) * k)",
        "bits = RandomBits(key, rows.start * k)",
        "training/test_master.py",
        "each rank drew the random bits of the first one",
    ),
    Fault(
        "training/moments.py",
        "boundaries = torch.where(ascending[:-1] == 0, 0.0, boundaries)",
        "pass",
        "training/test_moments.py",
        "small second moments became 0 in 8 bits",
    ),
    Fault(
        "training/moments.py",
        "if self._stochastic and bits is not None:",
        "if False:",
        "training/test_moments.py",
        "second moments in bfloat16 did not decay",
    ),
    Fault(
        "training/adamw.py",
        "column = 0 if blocks_are_whole(parameter, BLOCK) else first_column(parameter)",
        "column = 0",
        "checkpoint/test_moments.py",
        "ranks read the scales of other columns",
    ),
    Fault(
        "training/adamw.py",
        "1.0 if found_inf is None else 1 - found_inf",
        "1.0",
        "training/test_update.py recipes/test_ema.py",
        "averages of weights moved in a skipped step",
    ),
    Fault(
        "training/schedule.py",
        "return peak * (step + 1) / cfg.warmup_steps",
        "return peak * step / cfg.warmup_steps",
        "training/test_training.py",
    ),
    Fault(
        "training/kto.py",
        "reference_N2[numbers_A, 1].to",
        "reference_N2[numbers_A, 0].to",
        "training/test_kto.py recipes/test_full_kto.py",
    ),
    Fault(
        "training/kto.py",
        "return (totals_2[0] / totals_2[1]).clamp(min=0).float()",
        "return (totals_2[0] / totals_2[1]).float()",
        "training/test_kto.py",
    ),
    # --- models
    Fault(
        "models/loss.py",
        "difference_tv = torch.where(p_tv > 0, y_tv - x_tv, 0.0)",
        "difference_tv = y_tv - x_tv",
        "models/test_loss.py",
        "a word that the teacher excludes made the divergence NaN",
    ),
    Fault(
        "models/rope.py",
        "        self.reset(self.inv_freq_F.device)\n",
        "",
        "models/test_rope.py models/test_decoder.py",
    ),
    Fault(
        "models/rope.py",
        "_last_position(documents) >= self.config",
        "_last_position(documents) > self.config",
        "models/test_rope.py models/test_parity.py",
    ),
    Fault(
        "models/document_attention.py",
        ".tril(-window)",
        ".tril(-window - 1)",
        "models/test_document_attention.py models/test_attention.py",
    ),
    # --- models of transformers
    Fault(
        "models/hf/attention.py",
        "make_visibility(state.backend(dtype), state.documents, batch_size",
        "make_visibility(state.backend(dtype), None, batch_size",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/attention.py",
        "return seen_B1SS & same_BSS[:, None] & (",
        "return seen_B1SS & (",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/model.py",
        'arguments["lptune_rows"] = mixers.Rows.of(documents)',
        "pass",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/model.py",
        "            module.__class__ = Router\n",
        "            pass\n",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/model.py",
        "        self.eval()\n",
        "        for name, each in self.named_modules():\n"
        "            if name.endswith(('router', 'gate')):\n"
        "                each.register_forward_pre_hook(lambda _, x: (x[0].bfloat16().float(), *x[1:]))\n"
        "        self.eval()\n",
        "models/hf/test_types.py",
    ),
    Fault(
        "linear/weights/compute_weights.py",
        '                    or f"{prefix}.{name}" in self._float32_names\n',
        "\n",
        "models/hf/test_float32.py",
    ),
    Fault(
        "distributed/parallelize.py",
        'shard | {"mp_policy": policy(param_dtype=torch.float32)}',
        "shard",
        "models/hf/test_float32.py",
    ),
    Fault(
        "models/hf/experts.py",
        "out_SH * top_k_weights.reshape(-1)",
        "out_SH * top_k_weights.bfloat16().reshape(-1)",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/model.py",
        "return value.to(made.dtype)",
        "return value.to(torch.bfloat16)",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/attention.py",
        "self._num_calls[layer] += 1",
        "self._num_calls[layer] += 0",
        "models/hf/test_types.py",
        "the cache mixed the two attentions of a layer of diffllama, which generated other tokens",
    ),
    Fault(
        "models/hf/mixers.py",
        "if detect_fake_mode() is not None:",
        "if False:",
        "models/hf/test_types.py",
        "`lptune plan` of a recurrent model ended in a traceback",
    ),
    Fault(
        "models/hf/names.py",
        "(*box.start[:dim], number, *box.start[dim:]),",
        "(*box.start[:dim], number ^ 1, *box.start[dim:]),",
        "models/hf/test_types.py",
    ),
    Fault(
        "models/hf/experts.py",
        "                at[dim] += number\n",
        "                at[dim] += part.sizes[0] - 1 - number\n",
        "models/hf/test_types.py",
    ),
    Fault(
        "linear/weights/compute_weights.py",
        "                    setattr(each.weight, name, part)\n",
        "                    _ = name == 'scale' or setattr(each.weight, name, part)\n",
        "models/hf/test_recipe.py",
    ),
    Fault(
        "linear/weights/master_weight.py",
        "        return self.spec.kind.pack_shard"
        "(self.spec, self.shard(mesh), self._agree(mesh), num_rows)\n",
        "        sent = self.spec.kind.pack_shard(self.spec, self.shard(mesh), self._agree(mesh), num_rows)\n"
        "        old = self.__dict__.setdefault('old', sent.buffer[..., :4].clone())\n"
        "        sent.buffer[..., :4] = old\n"
        "        return sent\n",
        "models/hf/test_recipe.py",
    ),
    # --- context parallelism
    Fault(
        "models/rope.py",
        "part(self.sin_BS1R, group)",
        "self.sin_BS1R[:, : self.sin_BS1R.shape[1] // group.size]",
        "distributed/test_context_parallel.py",
    ),
    Fault(
        "models/context.py",
        "return g * ctx.size, None",
        "return g, None",
        "distributed/test_context_parallel.py",
    ),
    Fault(
        "models/hf/attention.py",
        "own_heads(s_aux, group)",
        "s_aux[: query.shape[1]]",
        "distributed/test_context_parallel.py",
    ),
    Fault(
        "distributed/parallelize.py",
        "low.micro_batch(world.token_rank *",
        "low.micro_batch(world.data_rank *",
        "distributed/test_context_parallel.py",
    ),
    # --- data
    Fault(
        "data/rows.py",
        "labels_BS[b, start : stop - 1] = np.where(is_target, tokens[1:], IGNORE)",
        "labels_BS[b, start : stop - 1] = tokens[1:]",
        "data/test_rows.py",
    ),
    Fault(
        "data/rows.py",
        "documents.is_target_T[base + 1 : base_stop]",
        "documents.is_target_T[base : base_stop - 1]",
        "data/test_rows.py",
    ),
    Fault(
        "data/rows.py",
        "positions_BS[b, start:stop] = np.arange(stop - start)",
        "positions_BS[b, start:stop] = np.arange(start, stop)",
        "data/test_rows.py",
    ),
    Fault(
        "data/rows.py",
        "document_BS[b, start:stop] = i",
        "document_BS[b, start:stop] = 0",
        "data/test_rows.py",
    ),
    Fault(
        "data/rows.py",
        "start = step * self.global_batch_size + self.rank * self.micro_batches_per_rank * size",
        "start = step * self.global_batch_size",
        "data/test_rows.py",
    ),
    Fault(
        "data/turns.py",
        'message.get("role") == "assistant" and message.get("weight", 1) != 0',
        'message.get("role") == "assistant"',
        "data/test_turns.py data/test_formats.py",
    ),
    Fault(
        "data/messages.py",
        "if is_answer and is_learned(message, where) is False else {}",
        "if is_answer and message.get('weight') == 0 else {}",
        "data/test_formats.py data/test_turns.py",
        "answers with `train_on_turn: false` were learned",
    ),
    Fault(
        "data/messages.py",
        "json.dumps(arguments, allow_nan=False)",
        "json.dumps(arguments)",
        "data/test_formats.py data/test_unwritten.py data/test_templates.py",
        "NaN, Infinity and 1e400 in arguments were learned as no JSON",
    ),
    Fault(
        "data/sources.py",
        "if self._types.is_float32(type_) or self._types.is_float16(type_):",
        "if self._types.is_float16(type_):",
        "data/test_structs.py data/test_sources.py",
        "a float32 column of a Parquet file was learned as 3.140000104904175",
    ),
    # --- checkpoints and resume
    Fault(
        "checkpoint/manifest.py",
        "if sha256(file) != entry.sha256:",
        "if False:",
        "checkpoint/test_save.py checkpoint/test_load.py faults/test_faults.py",
    ),
    Fault(
        "checkpoint/manifest.py",
        "if sealed != body + _seal(body).encode():",
        "if False:",
        "checkpoint/test_save.py faults/test_faults.py",
    ),
    Fault(
        "base/step_folders.py",
        '"[0-9]+", path.name[5:]) and path.is_dir()',
        '"[0-9]+", path.name[5:])',
        "checkpoint/test_state.py checkpoint/test_save.py",
    ),
    Fault(
        "checkpoint/retention.py",
        "if loss is not None and loss < best:",
        "if loss is not None and loss <= best:",
        "recipes/test_early_stop.py checkpoint/test_save.py",
    ),
    Fault(
        "checkpoint/retention.py",
        "if step_of(path) <= newest}",
        "}",
        "checkpoint/test_state.py",
    ),
    Fault(
        "checkpoint/resume.py",
        "if saved is None or name in saved.frozen]",
        "]",
        "checkpoint/test_resume.py recipes/test_freezing.py checkpoint/test_export.py",
        "a weight that an earlier part of the run had trained was exported as the base's",
    ),
    Fault(
        "checkpoint/hosts.py",
        "{host for host, other in found if other != found[0][1]}",
        "set[str]()",
        "checkpoint/test_resume.py checkpoint/test_hosts.py",
        "ranks that read different files trained on different rows, exit 0",
    ),
    Fault(
        "checkpoint/resume.py",
        "if changed := changed_keys(saved, now, say, cls):",
        "if changed := list[str]():",
        "checkpoint/test_resume.py recipes/test_full_finetune.py",
        "a finished run hid a changed config",
    ),
    Fault(
        "checkpoint/load.py",
        "            beside[prefix] = tensor.clone()\n",
        "            continue\n",
        "checkpoint/test_int8_weight.py checkpoint/test_load.py",
    ),
    # --- export
    Fault(
        "checkpoint/export.py",
        "widest = reduce(torch.promote_types, (getattr(torch, base.tensors[each].dtype) for each in same))",
        "widest = getattr(torch, base.tensors[list(same)[-1]].dtype)",
        "checkpoint/test_export.py",
        "a tied weight in two dtypes was exported as two weights",
    ),
    Fault(
        "checkpoint/export.py",
        '    f"{TEMPLATES}/*.jinja",\n',
        "",
        "checkpoint/test_export.py",
        "an export lost the folder `additional_chat_templates`",
    ),
    Fault(
        "checkpoint/export.py",
        "for text, each in learned.items() if each not in stop_ids}",
        "for text, each in learned.items() if each in stop_ids}",
        "checkpoint/test_export.py recipes/test_every_recipe.py",
        "an export of a model that had learned chats ran on after its answer in every other program",
    ),
    Fault(
        "checkpoint/export.py",
        "if not target.sources or any(source.parameter in frozen for source in target.sources):",
        "frozen = frozenset()\n    if not target.sources:",
        "checkpoint/test_export.py recipes/test_freezing.py",
        "a frozen weight that a run held in 8 bits was exported with the values of 8 bits",
    ),
    Fault(
        "checkpoint/export.py",
        "goes = is_as_written(folder) or",
        "goes = True or",
        "checkpoint/test_export.py checkpoint/test_run_folder.py",
        "an export that its user had edited was deleted",
    ),
    Fault(
        "checkpoint/export.py",
        "if target.dtype == torch.float16 and not tensor.isfinite().all():",
        "if False:",
        "checkpoint/test_export.py",
    ),
    # --- generation and evaluation
    Fault(
        "inference/sampling.py",
        "p_BV = torch.where(before_BV < top_p, p_BV, 0.0)",
        "p_BV = torch.where(p_BV.cumsum(dim=-1) < top_p, p_BV, 0.0)",
        "inference/test_sampling.py",
    ),
    Fault(
        "inference/exact_match.py",
        "is_correct = found == extracted(question.reference, self._rule)",
        "is_correct = found == question.reference",
        "inference/test_score.py recipes/test_evaluate.py",
    ),
    # --- the command line and the launcher
    Fault(
        "cli/main.py",
        "except (UserError, DivergedError) as error:\n        fail(str(error), error.exit_code)",
        "except (UserError, DivergedError) as error:\n        fail(str(error))",
        "cli/test_run.py",
    ),
    Fault(
        "cli/main.py", 'message = " ".join(message.split())', "message = message", "cli/test_wrong_inputs.py"
    ),
    Fault(
        "config/recipes.py",
        "if self.checkpoint.keep_best and self.checkpoint.every_steps % self.eval_every_steps:",
        "if False:",
        "cli/test_wrong_inputs.py",
    ),
    Fault(
        "cli/verify.py",
        "models.build_on_meta(hf.read_config(index, click.echo))",
        "models.build_on_meta(models.read_config(folder))",
        "cli/test_new_checkpoint.py",
    ),
    Fault(
        "cli/download.py",
        "(each.lfs.sha256 if each.lfs else each.blob_id)",
        "each.blob_id",
        "cli/test_download.py",
    ),
    Fault(
        "launch/outcome.py",
        "return self.lost_peer, left_after_saving,",
        "return False, left_after_saving,",
        "cli/test_run.py cli/test_multi_node.py",
        "a rank that had lost its peer was named as the cause",
    ),
    Fault(
        "launch/preemption.py",
        "elif now_s - self._first_s > GRACE_S:",
        "else:",
        "test_preemption.py cli/test_run.py",
        "the second of two signals that Slurm sends at once ended the save",
    ),
    # --- tools
    Fault(
        "tools/diff/sides.py",
        "np.isnan(a_N) != np.isnan(b_N)",
        "np.isnan(a_N) | np.isnan(b_N)",
        "tools/diff/test_diff.py",
    ),
    Fault(
        "tools/report/page.py",
        "default-src 'none'",
        "default-src *",
        "tools/report/test_page.py",
    ),
]


def source_of(fault: Fault, root: Path = ROOT) -> Path:
    """The file that `fault` changes."""
    return root / "lptune" / fault.file


def planted(fault: Fault, tree: Path) -> tuple[bool | None, str]:
    """Whether a test noticed `fault` in the copy `tree`, and how pytest ended; None: no test ran."""
    path = source_of(fault, tree)
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, f"{fault.file}: {fault.old!r} occurs {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        files = [f"tests/{file}" for file in fault.tests.split()]
        arguments = ("-m", "pytest", "-x", "-q", "-m", SUITE, "--color=no", "--tb=no")
        arguments += ("-p", "no:cacheprovider", "-p", "no:xdist", *files)
        done = cold.run(*arguments, folder=tree, timeout_s=_MOST_S, PYTHONPATH=str(tree), CI="1")
    except subprocess.TimeoutExpired:
        return True, f"still running after {_MOST_S} s"
    finally:
        path.write_text(text, encoding="utf-8")
    lines = done.stdout.strip().splitlines()
    failed = next(
        (line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1] if lines else ""
    )
    return (done.returncode == 1) if done.returncode in (0, 1) else None, failed[:140]


def copied(folder: Path) -> Path:
    """A copy in `folder` of the files that git keeps or would keep."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def _run(faults: Sequence[Fault], folder: Path) -> int:
    """Plants the faults one after the other; returns the number of those that were noticed."""
    tree, num_noticed = copied(folder), 0
    for fault in faults:
        started = time.monotonic()
        noticed, how = planted(fault, tree)
        num_noticed += noticed is True
        word = {True: "noticed", False: "ESCAPED", None: "NOT RUN"}[noticed]
        print(
            f"{word} {time.monotonic() - started:4.0f} s  {fault.file}: {fault.new!r:.60}  {how}", flush=True
        )
    return num_noticed


def main() -> None:
    """Plants all of them."""
    parser = argparse.ArgumentParser(description="Plant faults, and see whether tests notice them.")
    parser.add_argument("--only", default="", help="faults whose file, texts or tests contain this")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that are tried at a time")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if any(args.only in text for text in fault)]
    with (
        tempfile.TemporaryDirectory(prefix="lptune-planted-") as within,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        shares = [faults[number :: args.jobs] for number in range(args.jobs)]
        folders = [Path(within, str(number)) for number in range(args.jobs)]
        num_noticed = sum(pool.map(_run, shares, folders))
    print(f"{num_noticed} of {len(faults)} faults noticed")
    sys.exit(num_noticed < len(faults))


if __name__ == "__main__":
    main()
