"""The tokens that end an answer: where generation stops, and what the training rows teach to stop with.

A base model that learns chats closes its answers with the template's `<|im_end|>`, which no file of the base
may name as an end. An export therefore adds the tokens that were learned to generation_config.json.

Legend: T tokens, N documents.
"""

import numpy as np

from lptune.base.model_folder import read_stop_ids
from lptune.data.documents import PIECE_TOKENS
from lptune.data.rows import Rows
from lptune.data.tokenizer import Tokenizer
from lptune.data.turns import TurnFinder


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer: those of generation_config.json or, if it has none, of config.json; the
    tokenizer's end token; the token that closes the assistant's turn in the chat template; and, for the
    checkpoint of a run, those that its rows taught.
    """
    found = {*read_stop_ids(tokenizer.folder), *tokenizer.learned_stops, *_closing_ids(tokenizer)}
    return sorted(found)


def learned_stops(rows: Rows, tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens that end the answers of `rows` and are learned there: text -> id. Empty if the model
    does not learn to stop.

    An answer ends where its targets do. A row may have answers that end differently: a tool call of Llama 3
    ends with <|eom_id|>. Where prompts are learned, too, the targets do not show where an answer ends, so the
    tokenizer's end token and that of the chat template count wherever they are targets. The end of a document
    of `seq_len` tokens does not count for others, because the document may have been cut there.
    """
    texts = tokenizer.template.special_texts if tokenizer.template else tokenizer.special_texts
    texts -= {tokenizer.special_tokens.get("unk_token", "")}
    ids = (tokenizer.backend.token_to_id(text) for text in texts)
    special = {each for each in ids if each is not None}
    closing = _closing_ids(tokenizer)
    documents, found = rows.documents, set[int]()
    cut_N = documents.offsets_N1[1:][documents.lengths >= rows.seq_len] - 1
    start = 0
    pieces = (documents.end_to_end(array) for array in (documents.tokens_T, documents.is_target_T))
    for all_tokens_T, all_targets_T in zip(*pieces, strict=True):
        for first in range(0, len(all_tokens_T), PIECE_TOKENS):
            stop = first + PIECE_TOKENS
            tokens_T, is_target_T = all_tokens_T[first:stop], all_targets_T[first:stop]
            is_end_T = is_target_T.copy()
            next_T = all_targets_T[first + 1 : stop + 1]  # the first token of a document is no target
            is_end_T[: len(next_T)] &= ~next_T
            here_N = cut_N[np.searchsorted(cut_N, start) : np.searchsorted(cut_N, start + len(tokens_T))]
            is_end_T[here_N - start] = False
            found |= special & set(np.unique(tokens_T[is_end_T]).tolist())
            found |= {each for each in closing - found if (is_target_T & (tokens_T == each)).any()}
            start += len(tokens_T)
    return {str(tokenizer.backend.id_to_token(each)): each for each in sorted(found)}


def _closing_ids(tokenizer: Tokenizer) -> set[int]:
    """The tokenizer's end token, and the token that closes the assistant's turn in the chat template."""
    found = {tokenizer.eos_id}
    if tokenizer.template is not None:
        closing = TurnFinder(tokenizer.template).closing_token()
        found.add(None if closing is None else tokenizer.backend.token_to_id(closing))
    return {each for each in found if each is not None}
