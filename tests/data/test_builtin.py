"""The built-in instruction set: reproducible, without repetitions, and true.

Answers that follow from a rule (order, arithmetic, lists) are computed again here, from the text of the
prompt alone and with other means than the generator's. Facts are checked against each other (a fact has one
answer in all its wordings, a relation and its inverse agree) and against a list written independently.
"""

import calendar
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable

import pytest

from lptune.base.errors import UserError
from lptune.data.builtin import DEFAULT_NUM_ROWS, builtin_rows, max_num_rows

ALL = {row["prompt"]: row["response"] for row in builtin_rows(max_num_rows())}

DAYS = list(calendar.day_name)  # the C locale's English names: Monday first
MONTHS = list(calendar.month_name)  # [0] is empty
BY_WEIGHT_KG = {
    "ant": 3e-6, "bee": 1e-4, "mouse": 0.02, "cat": 4, "wolf": 40, "lion": 190, "horse": 500,
    "elephant": 5000, "blue whale": 1e5,
}  # fmt: skip


def day_after(day: str, count: int) -> str:
    return DAYS[(DAYS.index(day) + count) % 7]


def month_after(month: str, count: int) -> str:
    return MONTHS[(MONTHS.index(month) - 1 + count) % 12 + 1]


def letter_after(letter: str, count: int) -> str:
    return chr(ord(letter) + count)


def signed(side: str) -> int:
    return {"after": 1, "follows": 1, "before": -1, "precedes": -1}[side]


def heavier(a: str, b: str) -> str:
    return max(a, b, key=BY_WEIGHT_KG.__getitem__)


def lighter(a: str, b: str) -> str:
    return min(a, b, key=BY_WEIGHT_KG.__getitem__)


def in_list(place: str, words: str) -> str:
    return words.split(", ")[{"first": 0, "second": 1, "last": -1}[place]]


WORD_COUNT = {"two": 2, "three": 3}
DAY = f"({'|'.join(DAYS)})"
MONTH = f"({'|'.join(MONTHS[1:])})"

# pattern of the whole prompt -> the answer from its groups; every one must be met
RULES: list[tuple[str, Callable[..., object]]] = [
    (rf"What day comes (after|before) {DAY}\?", lambda side, day: day_after(day, signed(side))),
    (rf"Which day (follows|precedes) {DAY}\?", lambda side, day: day_after(day, signed(side))),
    (rf"Name the day (after|before) {DAY}\.", lambda side, day: day_after(day, signed(side))),
    (rf"If today is {DAY}, what day is tomorrow\?", lambda day: day_after(day, 1)),
    (rf"If today is {DAY}, what day was yesterday\?", lambda day: day_after(day, -1)),
    (
        rf"(?:What day is|Which day comes|Name the day) (two|three) days (after|before) {DAY}[?.]",
        lambda count, side, day: day_after(day, signed(side) * WORD_COUNT[count]),
    ),
    (rf"Which month of the year is {MONTH}, as a number\?", MONTHS.index),
    (rf"What number is {MONTH} among the months of the year\?", MONTHS.index),
    (rf"Give the number of the month {MONTH}\.", MONTHS.index),
    (r"Which month is number (\d+)\?", lambda number: MONTHS[int(number)]),
    (r"(?:What is|Name) month number (\d+)(?: of the year)?[?.]", lambda number: MONTHS[int(number)]),
    (rf"What month comes (after|before) {MONTH}\?", lambda side, month: month_after(month, signed(side))),
    (
        rf"Which month comes right (after|before) {MONTH}\?",
        lambda side, month: month_after(month, signed(side)),
    ),
    (rf"Name the month (after|before) {MONTH}\.", lambda side, month: month_after(month, signed(side))),
    (
        rf"Which month comes earlier in the year, {MONTH} or {MONTH}\?",
        lambda *two: min(two, key=MONTHS.index),
    ),
    (rf"Which month comes later in the year, {MONTH} or {MONTH}\?", lambda *two: max(two, key=MONTHS.index)),
    (r"Which letter comes (after|before) ([a-z])\?", lambda side, x: letter_after(x, signed(side))),
    (
        r"What letter comes right (after|before) ([a-z]) in the alphabet\?",
        lambda side, x: letter_after(x, signed(side)),
    ),
    (r"Name the letter (after|before) ([a-z])\.", lambda side, x: letter_after(x, signed(side))),
    (r"Which letter comes first in the alphabet, ([a-z]) or ([a-z])\?", lambda *two: sorted(two)[0]),
    (r"Which number is larger, (\d+) or (\d+)\?", lambda *two: max(map(int, two))),
    (r"Which number is smaller, (\d+) or (\d+)\?", lambda *two: min(map(int, two))),
    (r"(?:What is|Calculate) (\d+) (?:plus|\+) (\d+)[?.]", lambda a, b: int(a) + int(b)),
    (r"Add (\d+) and (\d+)\.", lambda a, b: int(a) + int(b)),
    (r"(?:What is|Calculate) (\d+) (?:minus|-) (\d+)[?.]", lambda a, b: int(a) - int(b)),
    (r"Subtract (\d+) from (\d+)\.", lambda a, b: int(b) - int(a)),
    (r"(?:Which|What) is bigger[,:] an? (.+) or an? (.+)\?", heavier),
    (r"(?:Which|What) is smaller[,:] an? (.+) or an? (.+)\?", lighter),
    (r"What is the (\w+) word of this list: (.+)\?", in_list),
    (r"Name the (\w+) word: (.+)\.", in_list),
]

# question -> {thing: answer}, from the wordings named here
FACT_WORDINGS = {
    "capital": r"What is the capital of (.+)\?",
    "country": r"Which country has the capital (.+)\?",
    "continent": r"On which continent is (.+)\?",
    "opposite": r'What is the opposite of "(.+)"\?',
    "plural": r'What is the plural of "(.+)"\?',
    "past": r'What is the past tense of "(.+)"\?',
    "legs": r"How many legs does an? (.+) have\?",
    "animal": r"What kind of animal is an? (.+)\?",
    "young": r"What is the young of an? (.+) called\?",
    "sound": r"What is the sound of an? (.+) called\?",
    "kind": r'What kind of thing is "(.+)"\?',
    "colour": r"What colour is (.+)\?",
}


# Prompts with a rule; all others are facts.
RULED = sum(any(re.fullmatch(pattern, prompt) for pattern, _ in RULES) for prompt in ALL)


def facts(question: str) -> dict[str, str]:
    found = ((re.fullmatch(FACT_WORDINGS[question], prompt), answer) for prompt, answer in ALL.items())
    return {match[1]: answer for match, answer in found if match}


def test_rows_are_the_same_on_every_machine_and_python_version() -> None:
    text = json.dumps(builtin_rows(DEFAULT_NUM_ROWS), ensure_ascii=True, sort_keys=True)
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "ce1fb02a5c0a47053766d2ecb2f3f92e000855200a98ca3a6c387fff0b9efa86"
    )


def test_a_seed_gives_the_same_rows_twice_and_another_seed_gives_others() -> None:
    assert builtin_rows(300, seed=3) == builtin_rows(300, seed=3)
    assert builtin_rows(300, seed=3) != builtin_rows(300, seed=4)


def test_a_smaller_set_is_the_beginning_of_a_larger_one() -> None:
    assert builtin_rows(1000)[:100] == builtin_rows(100)


def test_rows_are_the_callers_own() -> None:
    builtin_rows(1)[0]["response"] = "changed"
    assert builtin_rows(1)[0]["response"] != "changed"


def test_no_prompt_occurs_twice_so_no_held_out_share_shares_one_with_training() -> None:
    rows = builtin_rows(max_num_rows())
    prompts = [row["prompt"] for row in rows]
    assert len(prompts) == len(set(prompts)) == max_num_rows()
    # Prompts that differ in case or spaces only would be the same question.
    assert len({" ".join(prompt.lower().split()) for prompt in prompts}) == len(prompts)
    for fraction in (0.01, 0.05, 0.5):
        cut = round(len(rows) * fraction)
        assert not set(prompts[:cut]) & set(prompts[cut:])


def test_rows_are_short_plain_text_with_one_or_two_words_as_the_answer() -> None:
    for prompt, answer in ALL.items():
        assert prompt.isascii()
        assert answer.isascii()
        assert prompt == prompt.strip()
        assert prompt[-1] in "?."
        assert len(prompt) <= 64
        assert "{" not in prompt + answer
        assert 1 <= len(answer.split()) <= 2


@pytest.mark.parametrize("num_rows", [0, -1, max_num_rows() + 1])
def test_a_number_of_rows_that_is_not_there_is_one_line_naming_the_maximum(num_rows: int) -> None:
    with pytest.raises(UserError, match=f"1 to {max_num_rows()} rows, {num_rows} were asked for"):
        builtin_rows(num_rows)


def test_thousands_of_rows_are_there_and_the_default_is_among_them() -> None:
    assert 4000 <= DEFAULT_NUM_ROWS <= max_num_rows()


def test_answers_that_follow_from_a_rule_are_right() -> None:
    met = Counter[str]()
    for prompt, answer in ALL.items():
        for pattern, rule in RULES:
            match = re.fullmatch(pattern, prompt)
            if match:
                assert answer == str(rule(*match.groups())), prompt
                met[pattern] += 1
    assert set(met) == {pattern for pattern, _ in RULES}
    assert sum(met.values()) == RULED


def test_every_wording_of_a_fact_has_the_same_answer() -> None:
    # The other wordings of each question of FACT_WORDINGS.
    groups = {
        "capital": ("Which city is the capital of {}?", "Name the capital of {}.", "{} has which capital?",
                    "Tell me the capital city of {}."),
        "country": ("{} is the capital of which country?", "Name the country whose capital is {}.",
                    "In which country is {}?", "{} lies in which country?"),
        "continent": ("Which continent is {} in?", "Name the continent of {}.", "{} lies on which continent?",
                      "Tell me the continent of {}."),
        "opposite": ('Give the opposite of "{}".', 'Which word means the opposite of "{}"?',
                     'Tell me the opposite of "{}".', 'Name a word that is the opposite of "{}".'),
        "plural": ('Give the plural of "{}".', 'Write "{}" in the plural.',
                   'Tell me the plural form of "{}".'),
        "past": ('Give the past tense of "{}".', 'Write "{}" in the past tense.',
                 'Tell me the past form of "{}".'),
        "kind": ('Which kind of thing does "{}" name?', 'Name the kind of thing that "{}" is.',
                 'Tell me what kind of thing "{}" is.'),
        "colour": ("Which colour does {} have?", "Name the colour of {}.", "Tell me the colour of {}."),
        "legs": ("What number of legs does a {} have?", "Give the number of legs of a {}.",
                 "Tell me how many legs a {} has."),
        "animal": ("Which class of animals does a {} belong to?", "Name the kind of animal that a {} is.",
                   "Tell me what kind of animal a {} is."),
        "young": ("What do you call the young of a {}?", "Name the young of a {}.",
                  "Tell me what the young of a {} is called."),
        "sound": ("What do you call the sound of a {}?", "Name the sound of a {}.",
                  "Tell me what the sound of a {} is called."),
    }  # fmt: skip
    assert groups.keys() == FACT_WORDINGS.keys()
    num_rows = 0
    for question, wordings in groups.items():
        found = facts(question)
        assert len(found) >= 16, question
        num_rows += len(found) * (1 + len(wordings))
        for thing, answer in found.items():
            for wording in wordings:
                prompt = wording.format(thing)
                if prompt not in ALL:
                    prompt = wording.replace(" a {}", " an {}").format(thing)
                assert ALL[prompt] == answer, prompt
    assert num_rows == len(ALL) - RULED  # nothing is left unchecked


def test_capital_and_country_are_each_others_inverse() -> None:
    capital, country = facts("capital"), facts("country")
    assert {city: land for land, city in capital.items()} == country
    assert facts("continent").keys() == capital.keys()


def test_the_opposite_of_an_opposite_is_the_word_itself() -> None:
    opposite = facts("opposite")
    assert all(opposite[opposite[word]] == word != opposite[word] for word in opposite)


@pytest.mark.parametrize(
    ("question", "known"),
    [
        ("capital", "France Paris, Poland Warsaw, Kenya Nairobi, Canada Ottawa, Peru Lima, Nepal Kathmandu"),
        ("continent", "Egypt Africa, Japan Asia, Portugal Europe, Morocco Africa, Ireland Europe"),
        ("opposite", "hot cold, always never, buy sell, west east, inside outside, weak strong"),
        ("plural", "child children, mouse mice, ox oxen, sheep sheep, knife knives, potato potatoes"),
        ("past", "go went, catch caught, sleep slept, swim swam, tell told, fly flew"),
        ("legs", "dog 4, hen 2, ant 6, snake 0, frog 4, butterfly 6"),
        ("animal", "frog amphibian, lizard reptile, owl bird, bee insect, wolf mammal"),
        ("young", "dog puppy, swan cygnet, frog tadpole, deer fawn, horse foal, kangaroo joey"),
        ("sound", "lion roar, owl hoot, horse neigh, bee buzz, snake hiss"),
        ("kind", "oak tree, zinc metal, tulip flower, drill tool, flute instrument, pear fruit"),
        ("colour", "snow white, coal black, blood red, grass green"),
    ],
)
def test_facts_agree_with_a_list_written_by_hand(question: str, known: str) -> None:
    found = facts(question)
    for pair in known.split(", "):
        thing, answer = pair.split()
        assert found[thing] == answer


def test_every_skill_and_many_answers_stand_in_the_default_rows() -> None:
    prompts = {row["prompt"] for row in builtin_rows(DEFAULT_NUM_ROWS)}
    for pattern in [pattern for pattern, _ in RULES] + list(FACT_WORDINGS.values()):
        assert any(re.fullmatch(pattern, prompt) for prompt in prompts), pattern
    # One answer to everything must not score: no response has a large share.
    answers = Counter(row["response"] for row in builtin_rows(DEFAULT_NUM_ROWS))
    assert answers.most_common(1)[0][1] < DEFAULT_NUM_ROWS * 0.05
