"""The built-in instruction set: reproducible, and without repetitions.

The digest of all rows pins every answer: whoever changes the set looks at the changed rows, and writes the
digest here.
"""

import hashlib
import json
import re
from collections import Counter

import pytest

from lptune.base.errors import UserError
from lptune.data.builtin import DEFAULT_NUM_ROWS, builtin_rows, max_num_rows

ALL = {row["prompt"]: row["response"] for row in builtin_rows(max_num_rows())}


def digest(rows: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True, sort_keys=True).encode()).hexdigest()[:32]


def test_rows_are_the_same_on_every_machine_and_python_version() -> None:
    assert digest(builtin_rows(DEFAULT_NUM_ROWS)) == "ce1fb02a5c0a47053766d2ecb2f3f92e"
    assert digest(builtin_rows(max_num_rows())) == "ce0a01a938dc623bb6577c0be476fc62"


def test_a_smaller_set_is_the_beginning_of_a_larger_one_and_another_seed_gives_others() -> None:
    assert builtin_rows(1000)[:100] == builtin_rows(100)
    assert builtin_rows(300, seed=3) == builtin_rows(300, seed=3) != builtin_rows(300, seed=4)
    builtin_rows(1)[0]["response"] = "changed"
    assert builtin_rows(1)[0]["response"] != "changed"


def test_no_prompt_occurs_twice_and_answers_are_one_or_two_words() -> None:
    # Prompts that differ in case or spaces only would be the same question.
    assert len({" ".join(prompt.lower().split()) for prompt in ALL}) == len(ALL) == max_num_rows()
    for prompt, answer in ALL.items():
        assert re.fullmatch(r"[!-~ ]{1,63}[?.]", prompt)
        assert prompt == prompt.strip()
        assert "{" not in prompt + answer
        assert 1 <= len(answer.split()) <= 2
    # One answer to everything must not score: no response has a large share.
    answers = Counter(row["response"] for row in builtin_rows(DEFAULT_NUM_ROWS))
    assert answers.most_common(1)[0][1] < DEFAULT_NUM_ROWS * 0.05


@pytest.mark.parametrize("num_rows", [0, max_num_rows() + 1])
def test_a_number_of_rows_that_is_not_there_is_one_line_naming_the_maximum(num_rows: int) -> None:
    with pytest.raises(UserError, match=f"1 to {max_num_rows()} rows, {num_rows} were asked for"):
        builtin_rows(num_rows)
