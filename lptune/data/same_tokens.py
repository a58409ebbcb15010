"""Whether two models read and predict the same tokens: a teacher must, for its logits to fit the student."""

from pathlib import Path

from lptune.base.errors import UserError
from lptune.data.tokenizer import Tokenizer, load_tokenizer


def check_same_tokens(tokenizer: Tokenizer, vocab_size: int, folder: Path, its_vocab_size: int) -> None:
    """Raises UserError unless the teacher in `folder` gives every token the same id as `tokenizer` does, and
    has as many words in its vocabulary. vocab_size, its_vocab_size: of config.json, which may pad them.
    """
    mine = tokenizer.backend.get_vocab(with_added_tokens=True)
    theirs = load_tokenizer(folder, "none").backend.get_vocab(with_added_tokens=True)
    for text in sorted(mine.keys() | theirs.keys()):
        if mine.get(text) != theirs.get(text):
            raise UserError(
                f"teacher.path: {folder} has another tokenizer than {tokenizer.folder}: token {text!r} has "
                f"the id {theirs.get(text, 'none')} there and {mine.get(text, 'none')} here; choose a "
                "teacher with the tokenizer of the student"
            )
    if vocab_size != its_vocab_size:
        raise UserError(
            f"teacher.path: {folder} has vocab_size {its_vocab_size} in config.json, the model in model.path "
            f"has {vocab_size}, so their logits do not fit together; choose a teacher with as many words"
        )
