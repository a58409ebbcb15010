"""Uses a trained model: loads it from anywhere, generates text, and compares answers.

    loaded = load_model("runs/finetune", cfg.precision, "bfloat16", world, num_tokens=8)
    answers = [Answer(loaded.tokenizer, stop_ids, cfg.stop, cfg.max_new_tokens) for _ in prompts]
    for _ in decode(loaded.model, prompts, answers, Sampler(cfg, seed, rows)):
        print(answers[0].piece, end="")

The model is whole on one device. Each rank of several has all of it.
"""

from lptune.inference.answer_file import AnswerFile
from lptune.inference.chat import Chat
from lptune.inference.decode import Answer, decode
from lptune.inference.exact_match import ExactMatch, Question, extracted, read_questions
from lptune.inference.model import LoadedModel, OpenedModel, load_model, open_model
from lptune.inference.result import check_evaluation, loss_result, result_table, write_result
from lptune.inference.rounds import Finished, gather_answers, in_batches, rounds
from lptune.inference.sampling import Sampler, probabilities
from lptune.inference.score import Pair, Scored, score
from lptune.inference.tasks import read_tasks

__all__ = [
    "Answer",
    "AnswerFile",
    "Chat",
    "ExactMatch",
    "Finished",
    "LoadedModel",
    "OpenedModel",
    "Pair",
    "Question",
    "Sampler",
    "Scored",
    "check_evaluation",
    "decode",
    "extracted",
    "gather_answers",
    "in_batches",
    "load_model",
    "loss_result",
    "open_model",
    "probabilities",
    "read_questions",
    "read_tasks",
    "result_table",
    "rounds",
    "score",
    "write_result",
]
