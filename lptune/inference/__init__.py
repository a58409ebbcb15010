"""Uses a trained model: loads it from anywhere, and generates text.

    loaded = load_model("runs/finetune", cfg.precision, "bfloat16", world, num_tokens=8)
    answers = [Answer(loaded.tokenizer, stop_ids, cfg.stop, cfg.max_new_tokens) for _ in prompts]
    for _ in decode(loaded.model, prompts, answers, Sampler(cfg, seed, rows)):
        print(answers[0].piece, end="")

The model is whole on one device. Each rank of several has all of it.
"""

from lptune.inference.answer import Answer
from lptune.inference.answer_file import AnswerFile
from lptune.inference.chat import Chat
from lptune.inference.decode import decode
from lptune.inference.model import LoadedModel, load_model
from lptune.inference.sampling import Sampler, probabilities

__all__ = [
    "Answer",
    "AnswerFile",
    "Chat",
    "LoadedModel",
    "Sampler",
    "decode",
    "load_model",
    "probabilities",
]
