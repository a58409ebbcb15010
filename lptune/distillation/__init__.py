"""The teacher of a distillation: a model on the ranks of the student, or a folder of its log-probabilities.

teacher = open_teacher(cfg, world)          LiveTeacher, or StoredTeacher if logits.folder is set
teacher.check_tokens(tokenizer, vocab_size) and teacher.check_rows(rows, chat_template)
teacher.load()                              after the student has its storage
teacher.low                                 verifies its passes (training.State); None: no model runs
loss_BS = student(tokens_BS, documents, labels_BS, teacher.objective(batch))

live.py      the model, and its step for `lptune plan`
stored.py    the folder
top_k.py     the k most probable words of a token
files.py     the format of the folder
job.py       LogitsJob, which fills the folder (recipes/precompute_logits.py)
"""

from lptune.distillation.job import LogitsJob
from lptune.distillation.live import LiveTeacher, planned_step
from lptune.distillation.stored import StoredTeacher, Teacher, open_teacher
from lptune.distillation.top_k import TopK, top_k

__all__ = [
    "LiveTeacher",
    "LogitsJob",
    "StoredTeacher",
    "Teacher",
    "TopK",
    "open_teacher",
    "planned_step",
    "top_k",
]
