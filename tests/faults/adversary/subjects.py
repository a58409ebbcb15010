"""All cases, from the tables; and of each subject some that are drawn."""

import random

from tests.faults.adversary import places, processes, run_folder, strangers, texts
from tests.faults.adversary.judge import Case

_TABLES = (run_folder, places, strangers, texts, processes)


def all_cases(seed: int) -> list[Case]:
    """In the order of the tables. seed: decides positions of damage, where a table leaves them open."""
    found = [case for table in _TABLES for case in table.cases(random.Random(seed))]
    titles = [case.title for case in found]
    assert len(set(titles)) == len(titles), [title for title in titles if titles.count(title) > 1]
    return found


def drawn(cases: list[Case], num_each: int, seed: int) -> list[Case]:
    """At most so many of each subject."""
    chosen = set[str]()
    for subject in dict.fromkeys(case.subject for case in cases):
        titles = [case.title for case in cases if case.subject == subject]
        chosen.update(random.Random(seed).sample(titles, min(num_each, len(titles))))
    return [case for case in cases if case.title in chosen]
