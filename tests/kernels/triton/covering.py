"""Few cases out of a product of many: every pair or triple of values occurs in one of them at least."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

# An axis and the place of one of its values.
Value = tuple[str, int]


def covering_cases(
    axes: Mapping[str, Sequence[object]], closely: Sequence[str] = (), seed: int = 0
) -> list[dict[str, object]]:
    """Cases in which every two values of different axes meet, and every three values of the axes named `closely`.

    Greedy: a case begins with values that have not met and is completed by those that meet most for the first time.
    """
    draw = random.Random(seed)
    groups = [*combinations(axes, 2), *combinations(closely, 3)]
    unmet = {meeting for group in groups for meeting in _meetings(axes, group)}
    cases = []
    while unmet:
        case = dict(min(unmet, key=sorted))
        for axis in draw.sample(list(axes), len(axes)):
            if axis in case:
                continue
            own = [group for group in groups if axis in group]
            places = draw.sample(range(len(axes[axis])), len(axes[axis]))
            met = {place: len(unmet & _met({**case, axis: place}, own)) for place in places}
            case[axis] = max(places, key=met.__getitem__)
        unmet -= _met(case, groups)
        cases.append({axis: axes[axis][case[axis]] for axis in axes})
    return cases


def _meetings(axes: Mapping[str, Sequence[object]], group: Sequence[str]) -> Iterator[frozenset[Value]]:
    for places in product(*(range(len(axes[axis])) for axis in group)):
        yield frozenset(zip(group, places, strict=True))


def _met(case: Mapping[str, int], groups: Sequence[Sequence[str]]) -> set[frozenset[Value]]:
    """What meets in a case that may lack some axes."""
    return {frozenset((axis, case[axis]) for axis in group) for group in groups if all(a in case for a in group)}
