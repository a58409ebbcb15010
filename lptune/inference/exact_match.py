"""Questions with reference answers, and how many the model answers right.

What is compared is extracted from both texts by one rule:

    exact   the whole text, without white space around it
    gsm8k   the number after the last `####`, without `$` and commas; the references of GSM8K end with it

Two extracts are equal if they are the same characters: 18 and 18.0 differ, as in GSM8K's own `is_correct`
(github.com/openai/grade-school-math, grade_school_math/dataset.py). Unlike there, the last `####` counts and
not the first, so that an answer can show an example before its result.

With n questions and the rate p, the standard error of p is sqrt(p (1 - p) / n): the questions are taken as
drawn at random, and each is right or wrong.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from lptune.base.errors import UserError, closest
from lptune.base.files import write_errors, write_text
from lptune.config import AnswersConfig, PromptsConfig
from lptune.data import Prompt, Tokenizer, read_prompts
from lptune.data.detect import present
from lptune.data.errors import RowError, listed
from lptune.data.formats import MESSAGES_NAMES, RESPONSE_NAMES, required_text
from lptune.data.messages import is_messages, read_messages
from lptune.data.sources import Row
from lptune.inference.rounds import Finished

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def extracted(text: str, rule: str) -> str | None:
    """What `rule` compares of `text`; None if it finds nothing. rule: exact | gsm8k."""
    if rule == "exact":
        return text.strip()
    assert rule == "gsm8k", rule
    _, mark, end = text.rpartition("####")
    number = _NUMBER.match(end.lstrip().replace("$", "")) if mark else None
    return number[0].replace(",", "") if number else None


class Question(NamedTuple):
    """A prompt, and the answer that is right."""

    prompt: Prompt
    reference: str


def read_questions(
    prompts: PromptsConfig, answers: AnswersConfig, tokenizer: Tokenizer, vocab_size: int
) -> list[Question]:
    """All questions of `prompts.source`, in order. Raises UserError as `read_prompts` does, and for a row
    whose reference is missing or has nothing that `answers.extract` could compare.
    """
    questions = []
    for prompt in read_prompts(prompts, tokenizer, vocab_size):
        try:
            reference = _reference(prompt.row, prompts, answers)
        except RowError as problem:
            raise UserError(f"{prompt.row.place}: {problem}") from None
        if not extracted(reference, answers.extract):
            what = "is empty" if answers.extract == "exact" else "has no number after ####"
            raise UserError(
                f"{prompt.row.place}: the reference answer {what}; set answers.reference_column or "
                "answers.extract"
            )
        questions.append(Question(prompt, reference))
    if not questions:
        raise UserError(f"prompts.source: {prompts.source} has no rows")
    return questions


class ExactMatch:
    """Counts right answers, and keeps every row with its answer."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._rows: list[dict[str, Any]] = []
        self._num_correct = self._num_without = self._num_cut = 0

    def add(self, question: Question, answer: Finished) -> None:
        """Compares a finished answer with the reference."""
        found = extracted(answer.text, self._rule)
        is_correct = found == extracted(question.reference, self._rule)
        self._num_correct += is_correct
        self._num_without += found is None
        self._num_cut += answer.ended_by == "length"
        self._rows.append(
            {
                "row": question.prompt.row.values,
                "generated": answer.text,
                "extracted": found,
                "is_correct": is_correct,
            }
        )

    def result(self) -> dict[str, Any]:
        """The rate of right answers, its standard error, and the counts. Needs at least one answer."""
        num = len(self._rows)
        rate = self._num_correct / num
        return {
            "extract": self._rule,
            "exact_match": rate,
            "standard_error": math.sqrt(rate * (1 - rate) / num),
            "num_correct": self._num_correct,
            "num_questions": num,
            "num_without_extract": self._num_without,
            "num_at_max_new_tokens": self._num_cut,
        }

    def write(self, path: Path) -> None:
        """Writes one JSON object per question: `row`, `generated`, `extracted`, `is_correct`."""
        with write_errors(f"answers.output: {path}", "choose another"):
            write_text(path, "".join(f"{json.dumps(row, default=str)}\n" for row in self._rows))


def _reference(row: Row, prompts: PromptsConfig, answers: AnswersConfig) -> str:
    values, column = row.values, answers.reference_column
    if column is not None:
        if column not in values:
            raise RowError(
                f"has no column {column!r} (answers.reference_column){closest(column, list(values))}; its "
                f"columns: {listed(list(values))}"
            )
        return required_text(values, column)
    names = [prompts.messages_column] if prompts.messages_column else present([*values], MESSAGES_NAMES)
    chats = [name for name in names if is_messages(values.get(name))]
    if chats and not prompts.prompt_column:
        last = read_messages(values[chats[0]], chats[0])[-1]
        if last["role"] != "assistant" or not isinstance(last.get("content"), str):
            raise RowError(f"the last message of column {chats[0]!r} is no text of the assistant")
        return str(last["content"])
    found = present([*values], RESPONSE_NAMES)
    if len(found) != 1:
        what = f"columns {listed(found)} could each be" if found else "no column is"
        raise RowError(
            f"{what} the reference answer among {listed(list(values))}; set answers.reference_column"
        )
    return required_text(values, found[0])
