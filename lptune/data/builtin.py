"""A small instruction set, generated here, so that every recipe runs without a download.

A transformer of half a million random weights must learn something visible in two minutes on a CPU. In that
time it can learn *composition*: a fact that it saw in three wordings, it soon knows in a fourth; an order
(days, letters, numbers) that it learned from some pairs holds for the others; it can copy the n-th word of a
list, whatever the words are. So a row is one wording x one thing x one question about it. A held-out row is
an unseen combination of seen parts. Facts that no other row teaches would only measure the size of the set.

All facts are true and have one answer, a word or two, so that "answered exactly" means something.
`builtin_rows` chooses among all rows by `random.Random(seed).random()` alone, the one part of Python's
generator that is documented to give the same numbers in every version.
"""

import random
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, permutations

from lptune.base.errors import UserError

DEFAULT_NUM_ROWS = 4000
"""Rows of `data.source: builtin`."""

Rows = Iterator[tuple[str, str]]

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
LIST_WORDS = (
    "apple", "river", "chair", "cloud", "stone", "bread", "music", "garden", "window", "paper", "tiger",
    "candle", "bridge", "forest", "spoon", "pencil", "mirror", "basket", "planet", "button", "lemon",
    "castle", "engine", "shadow",
)  # fmt: skip

# country: (capital, continent)
COUNTRIES = {
    "France": ("Paris", "Europe"), "Italy": ("Rome", "Europe"), "Spain": ("Madrid", "Europe"),
    "Portugal": ("Lisbon", "Europe"), "Germany": ("Berlin", "Europe"), "Austria": ("Vienna", "Europe"),
    "Poland": ("Warsaw", "Europe"), "Greece": ("Athens", "Europe"), "Norway": ("Oslo", "Europe"),
    "Sweden": ("Stockholm", "Europe"), "Finland": ("Helsinki", "Europe"), "Ireland": ("Dublin", "Europe"),
    "Japan": ("Tokyo", "Asia"), "China": ("Beijing", "Asia"), "India": ("New Delhi", "Asia"),
    "Nepal": ("Kathmandu", "Asia"), "Thailand": ("Bangkok", "Asia"), "Vietnam": ("Hanoi", "Asia"),
    "Egypt": ("Cairo", "Africa"), "Kenya": ("Nairobi", "Africa"), "Ghana": ("Accra", "Africa"),
    "Morocco": ("Rabat", "Africa"), "Senegal": ("Dakar", "Africa"), "Uganda": ("Kampala", "Africa"),
    "Canada": ("Ottawa", "North America"), "Cuba": ("Havana", "North America"),
    "Nicaragua": ("Managua", "North America"), "Argentina": ("Buenos Aires", "South America"),
    "Peru": ("Lima", "South America"), "Ecuador": ("Quito", "South America"),
}  # fmt: skip

# animal: (kind, number of legs, name of its young, name of its sound); None where there is no one good answer
ANIMALS: dict[str, tuple[str, int | None, str | None, str | None]] = {
    "dog": ("mammal", 4, "puppy", "bark"),
    "cat": ("mammal", 4, "kitten", "meow"),
    "cow": ("mammal", 4, "calf", "moo"),
    "sheep": ("mammal", 4, "lamb", "bleat"),
    "pig": ("mammal", 4, "piglet", "oink"),
    "horse": ("mammal", 4, "foal", "neigh"),
    "lion": ("mammal", 4, "cub", "roar"),
    "wolf": ("mammal", 4, "pup", "howl"),
    "mouse": ("mammal", 4, "pup", "squeak"),
    "deer": ("mammal", 4, "fawn", None),
    "kangaroo": ("mammal", None, "joey", None),
    "duck": ("bird", 2, "duckling", "quack"),
    "goose": ("bird", 2, "gosling", "honk"),
    "hen": ("bird", 2, "chick", "cluck"),
    "owl": ("bird", 2, "owlet", "hoot"),
    "swan": ("bird", 2, "cygnet", None),
    "eagle": ("bird", 2, "eaglet", None),
    "frog": ("amphibian", 4, "tadpole", "croak"),
    "bee": ("insect", 6, "larva", "buzz"),
    "ant": ("insect", 6, "larva", None),
    "butterfly": ("insect", 6, "caterpillar", None),
    "snake": ("reptile", 0, None, "hiss"),
    "lizard": ("reptile", 4, None, None),
}
BY_SIZE = ("ant", "bee", "mouse", "cat", "wolf", "lion", "horse", "elephant", "blue whale")

THINGS = {
    "fruit": ("apple", "banana", "lemon", "pear", "cherry", "peach"),
    "vegetable": ("carrot", "onion", "cabbage", "potato", "leek"),
    "tree": ("oak", "birch", "pine", "willow", "maple"),
    "flower": ("rose", "tulip", "daisy", "lily", "daffodil"),
    "tool": ("hammer", "screwdriver", "drill", "wrench", "chisel"),
    "instrument": ("violin", "piano", "flute", "trumpet", "guitar"),
    "vehicle": ("car", "bus", "truck", "bicycle", "tram"),
    "metal": ("iron", "copper", "gold", "silver", "zinc"),
    "colour": ("red", "blue", "green", "purple", "brown"),
}
COLOURS = {
    "snow": "white", "milk": "white", "grass": "green", "a leaf in summer": "green",
    "a ripe banana": "yellow", "a ripe lemon": "yellow", "blood": "red", "a ripe strawberry": "red",
    "a ripe tomato": "red", "coal": "black", "a raven": "black", "the clear sky at noon": "blue",
    "an elephant": "grey", "a ripe orange": "orange", "a carrot": "orange", "a ripe chestnut": "brown",
}  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("old", "young"),
    ("rich", "poor"), ("happy", "sad"), ("light", "dark"), ("hard", "soft"), ("wet", "dry"),
    ("full", "empty"), ("open", "closed"), ("early", "late"), ("near", "far"), ("high", "low"),
    ("strong", "weak"), ("clean", "dirty"), ("loud", "quiet"), ("thick", "thin"), ("up", "down"),
    ("left", "right"), ("inside", "outside"), ("first", "last"), ("day", "night"), ("summer", "winter"),
    ("north", "south"), ("east", "west"), ("love", "hate"), ("win", "lose"), ("buy", "sell"),
    ("push", "pull"), ("begin", "end"), ("question", "answer"), ("friend", "enemy"), ("always", "never"),
    ("true", "false"),
)  # fmt: skip
PLURALS = {
    "child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth", "goose": "geese", "man": "men",
    "woman": "women", "ox": "oxen", "wolf": "wolves", "leaf": "leaves", "knife": "knives", "wife": "wives",
    "baby": "babies", "city": "cities", "story": "stories", "box": "boxes", "bus": "buses", "fox": "foxes",
    "dish": "dishes", "sheep": "sheep", "person": "people", "potato": "potatoes", "dog": "dogs",
    "house": "houses",
}  # fmt: skip
PAST_TENSES = {
    "go": "went", "see": "saw", "eat": "ate", "come": "came", "give": "gave", "take": "took",
    "write": "wrote", "speak": "spoke", "run": "ran", "sing": "sang", "swim": "swam", "begin": "began",
    "buy": "bought", "bring": "brought", "think": "thought", "teach": "taught", "catch": "caught",
    "sleep": "slept", "keep": "kept", "feel": "felt", "find": "found", "know": "knew", "grow": "grew",
    "fly": "flew", "make": "made", "tell": "told",
}  # fmt: skip


def builtin_rows(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """`num_rows` rows {"prompt": ..., "response": ...}, each prompt once; a function of the arguments alone.

    A smaller set from the same seed is the beginning of a larger one. Raises UserError for less than one row
    and for more than `max_num_rows()`.
    """
    rows = _all_rows()
    if not 1 <= num_rows <= len(rows):
        raise UserError(
            f"builtin data: has 1 to {len(rows)} rows, {num_rows} were asked for; ask for fewer or use a file"
        )
    draw = random.Random(seed).random
    shuffled = sorted(rows, key=lambda _: draw())
    return [{"prompt": prompt, "response": response} for prompt, response in shuffled[:num_rows]]


def max_num_rows() -> int:
    """Number of distinct prompts, which is the largest number of rows."""
    return len(_all_rows())


@cache
def _all_rows() -> tuple[tuple[str, str], ...]:
    skills = (
        _countries, _animals, _sizes, _things, _opposites, _grammar,
        _days, _months, _alphabet, _number_order, _sums, _lists,
    )  # fmt: skip
    return tuple(row for skill in skills for row in skill())


def _worded(wordings: tuple[str, ...], answer: str | int, **parts: str | int) -> Rows:
    for wording in wordings:
        yield wording.format(**parts), str(answer)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _countries() -> Rows:
    capital_of = (
        "What is the capital of {country}?", "Which city is the capital of {country}?",
        "Name the capital of {country}.", "Tell me the capital city of {country}.",
        "{country} has which capital?",
    )  # fmt: skip
    country_of = (
        "Which country has the capital {capital}?", "{capital} is the capital of which country?",
        "Name the country whose capital is {capital}.", "In which country is {capital}?",
        "{capital} lies in which country?",
    )  # fmt: skip
    continent_of = (
        "On which continent is {country}?", "Which continent is {country} in?",
        "Name the continent of {country}.", "{country} lies on which continent?",
        "Tell me the continent of {country}.",
    )  # fmt: skip
    for country, (capital, continent) in COUNTRIES.items():
        yield from _worded(capital_of, capital, country=country)
        yield from _worded(country_of, country, capital=capital)
        yield from _worded(continent_of, continent, country=country)


def _animals() -> Rows:
    wordings = (
        ("What kind of animal is {animal}?", "Which class of animals does {animal} belong to?",
         "Name the kind of animal that {animal} is.", "Tell me what kind of animal {animal} is."),
        ("How many legs does {animal} have?", "What number of legs does {animal} have?",
         "Give the number of legs of {animal}.", "Tell me how many legs {animal} has."),
        ("What is the young of {animal} called?", "What do you call the young of {animal}?",
         "Name the young of {animal}.", "Tell me what the young of {animal} is called."),
        ("What is the sound of {animal} called?", "What do you call the sound of {animal}?",
         "Name the sound of {animal}.", "Tell me what the sound of {animal} is called."),
    )  # fmt: skip
    for animal, facts in ANIMALS.items():
        for wordings_of_fact, fact in zip(wordings, facts, strict=True):
            if fact is not None:
                yield from _worded(wordings_of_fact, fact, animal=_with_article(animal))


def _sizes() -> Rows:
    for a, b in permutations(BY_SIZE, 2):
        small, big = sorted((a, b), key=BY_SIZE.index)
        parts = {"a": _with_article(a), "b": _with_article(b)}
        yield from _worded(("Which is bigger, {a} or {b}?", "What is bigger: {a} or {b}?"), big, **parts)
        yield from _worded(("Which is smaller, {a} or {b}?", "What is smaller: {a} or {b}?"), small, **parts)


def _things() -> Rows:
    kind_of = (
        'What kind of thing is "{thing}"?', 'Which kind of thing does "{thing}" name?',
        'Name the kind of thing that "{thing}" is.', 'Tell me what kind of thing "{thing}" is.',
    )  # fmt: skip
    colour_of = (
        "What colour is {thing}?", "Which colour does {thing} have?", "Name the colour of {thing}.",
        "Tell me the colour of {thing}.",
    )  # fmt: skip
    for kind, things in THINGS.items():
        for thing in things:
            yield from _worded(kind_of, kind, thing=thing)
    for thing, colour in COLOURS.items():
        yield from _worded(colour_of, colour, thing=thing)


def _opposites() -> Rows:
    wordings = (
        'What is the opposite of "{word}"?', 'Give the opposite of "{word}".',
        'Which word means the opposite of "{word}"?', 'Tell me the opposite of "{word}".',
        'Name a word that is the opposite of "{word}".',
    )  # fmt: skip
    for one, other in OPPOSITES:
        yield from _worded(wordings, other, word=one)
        yield from _worded(wordings, one, word=other)


def _grammar() -> Rows:
    plural = (
        'What is the plural of "{word}"?', 'Give the plural of "{word}".',
        'Write "{word}" in the plural.', 'Tell me the plural form of "{word}".',
    )  # fmt: skip
    past = (
        'What is the past tense of "{word}"?', 'Give the past tense of "{word}".',
        'Write "{word}" in the past tense.', 'Tell me the past form of "{word}".',
    )  # fmt: skip
    for word, answer in PLURALS.items():
        yield from _worded(plural, answer, word=word)
    for word, answer in PAST_TENSES.items():
        yield from _worded(past, answer, word=word)


def _days() -> Rows:
    wordings = {
        1: ("What day comes after {day}?", "Which day follows {day}?", "Name the day after {day}.",
            "If today is {day}, what day is tomorrow?"),
        -1: ("What day comes before {day}?", "Which day precedes {day}?", "Name the day before {day}.",
             "If today is {day}, what day was yesterday?"),
    }  # fmt: skip
    far = (
        "What day is {count} days {side} {day}?", "Which day comes {count} days {side} {day}?",
        "Name the day {count} days {side} {day}.",
    )  # fmt: skip
    for i, day in enumerate(DAYS):
        for step, wordings_of_step in wordings.items():
            yield from _worded(wordings_of_step, DAYS[(i + step) % 7], day=day)
            side = "after" if step > 0 else "before"
            for count, name in ((2, "two"), (3, "three")):
                yield from _worded(far, DAYS[(i + step * count) % 7], day=day, count=name, side=side)


def _months() -> Rows:
    number = (
        "Which month of the year is {month}, as a number?",
        "What number is {month} among the months of the year?", "Give the number of the month {month}.",
    )  # fmt: skip
    month = (
        "Which month is number {number}?", "What is month number {number} of the year?",
        "Name month number {number}.",
    )  # fmt: skip
    neighbour = (
        "What month comes {side} {month}?", "Which month comes right {side} {month}?",
        "Name the month {side} {month}.",
    )  # fmt: skip
    for a, b in permutations(MONTHS, 2):
        early, late = sorted((a, b), key=MONTHS.index)
        yield from _worded(("Which month comes earlier in the year, {a} or {b}?",), early, a=a, b=b)
        yield from _worded(("Which month comes later in the year, {a} or {b}?",), late, a=a, b=b)
    for i, name in enumerate(MONTHS):
        yield from _worded(number, i + 1, month=name)
        yield from _worded(month, name, number=i + 1)
        yield from _worded(neighbour, MONTHS[(i + 1) % 12], month=name, side="after")
        yield from _worded(neighbour, MONTHS[(i - 1) % 12], month=name, side="before")


def _alphabet() -> Rows:
    wordings = (
        "Which letter comes {side} {letter}?", "What letter comes right {side} {letter} in the alphabet?",
        "Name the letter {side} {letter}.",
    )  # fmt: skip
    for before, after in pairwise(LETTERS):
        yield from _worded(wordings, after, letter=before, side="after")
        yield from _worded(wordings, before, letter=after, side="before")
    for a, b in permutations(LETTERS, 2):
        if abs(LETTERS.index(a) - LETTERS.index(b)) > 6:
            continue  # distant pairs are easy and would be an eighth of all rows
        yield from _worded(("Which letter comes first in the alphabet, {a} or {b}?",), min(a, b), a=a, b=b)


def _number_order() -> Rows:
    for a, b in permutations(range(1, 17), 2):
        yield from _worded(("Which number is larger, {a} or {b}?",), max(a, b), a=a, b=b)
        yield from _worded(("Which number is smaller, {a} or {b}?",), min(a, b), a=a, b=b)


def _sums() -> Rows:
    for a in range(1, 11):
        for b in range(1, 11):
            yield from _worded(
                ("What is {a} plus {b}?", "Add {a} and {b}.", "Calculate {a} + {b}."), a + b, a=a, b=b
            )
            if b <= a:
                yield from _worded(
                    ("What is {a} minus {b}?", "Subtract {b} from {a}.", "Calculate {a} - {b}."),
                    a - b,
                    a=a,
                    b=b,
                )


def _lists() -> Rows:
    places = {"first": 0, "second": 1, "last": -1}
    n = len(LIST_WORDS)
    for i in range(n):
        for near, far in ((1, 5), (2, 9), (3, 14), (4, 10), (7, 12), (11, 6)):
            words = [LIST_WORDS[j % n] for j in (i, i + near, i + far)]
            for place, index in places.items():
                wordings = (
                    "What is the {place} word of this list: {words}?",
                    "Name the {place} word: {words}.",
                )
                yield from _worded(wordings, words[index], place=place, words=", ".join(words))
