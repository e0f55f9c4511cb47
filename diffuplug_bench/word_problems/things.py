"""Write the story of word problems that is used most: a collection grows, shrinks and is shared.

The story is an opening, some events and a question. Functions take (draft, name, other, item).
"""

from collections.abc import Callable

from diffuplug_bench.word_problems.stories import ITEMS, NAMES, Draft

BOXES = (("bags", "bag"), ("baskets", "basket"), ("boxes", "box"), ("jars", "jar"))
SHARERS = (("friends", "friend"), ("children", "child"), ("cousins", "cousin"))


def _open_plain(d: Draft, name: str, other: str, item: str) -> None:
    d.value = d.rng.randint(5, 70)
    a = d.value
    d.say(
        f"{name} has {a} {item}.",
        f"{name} starts with {a} {item}.",
        f"There are {a} {item} on the table of {name}.",
        f"In the morning {name} has {a} {item}.",
    )


def _open_boxes(d: Draft, name: str, other: str, item: str) -> None:
    k, m = d.rng.randint(2, 9), d.rng.randint(2, 12)
    boxes, box = d.rng.choice(BOXES)
    d.say(
        f"{name} has {k} {boxes} with {m} {item} in each {box}.",
        f"{name} has {k} {boxes} of {item}. Each {box} holds {m} {item}.",
        f"{name} owns {k} full {boxes}, and there are {m} {item} in every {box}.",
    )
    d.work(k, "*", m, f"At first {name} has {{}} {item} in the {boxes}.")


def _open_compare(d: Draft, name: str, other: str, item: str) -> None:
    a = d.rng.randint(3, 30)
    if d.rng.random() < 0.5:
        k = d.rng.randint(2, 5)
        d.say(
            f"{other} has {a} {item}. {name} has {k} times as many.",
            f"{name} has {k} times as many {item} as {other}, who has {a}.",
        )
        d.work(a, "*", k, f"At first {name} has {{}} {item}, more than {other}.")
    else:
        b = d.rng.randint(2, 30)
        d.say(
            f"{other} has {a} {item}. {name} has {b} more than that.",
            f"{name} has {b} more {item} than {other}, who has {a}.",
        )
        d.work(a, "+", b, f"At first {name} has {{}} {item}, more than {other}.")


def _open_pool(d: Draft, name: str, other: str, item: str) -> None:
    a, b = d.rng.randint(3, 60), d.rng.randint(3, 60)
    d.say(
        f"{name} has {a} {item} and {other} has {b}. {other} gives all of them to {name}.",
        f"{name} has {a} {item}. {other} has {b} {item} and hands them all to {name}.",
    )
    d.work(a, "+", b, f"With the {item} from {other}, {name} has {{}} {item}.")


def _gain(d: Draft, name: str, other: str, item: str) -> None:
    b = d.rng.randint(2, 40)
    d.say(
        f"{name} buys {b} more {item}.",
        f"Then {name} finds {b} more {item} at home.",
        f"{other} gives {name} {b} more {item}.",
        f"The next day {name} gets another {b} {item}.",
    )
    d.work(d.value, "+", b, f"After that {name} has {{}} {item}.")


def _lose(d: Draft, name: str, other: str, item: str) -> None:
    b = d.rng.randint(2, min(40, d.value - 2))
    d.say(
        f"{name} gives {b} {item} to {other}.",
        f"Then {name} loses {b} of the {item}.",
        f"{name} sells {b} {item} at the market.",
        f"The next day {name} uses up {b} {item}.",
    )
    d.work(d.value, "-", b, f"Now {name} has {{}} {item} left.")


def _gain_packs(d: Draft, name: str, other: str, item: str) -> None:
    before, k, m = d.value, d.rng.randint(2, 6), d.rng.randint(2, 9)
    boxes, box = d.rng.choice(BOXES)
    d.say(
        f"{name} buys {k} {boxes} with {m} {item} in each {box}.",
        f"{other} brings {name} {k} more {boxes} of {m} {item} each.",
    )
    new = d.work(k, "*", m, f"The new {boxes} hold {{}} {item}.")
    d.work(before, "+", new, f"After that {name} has {{}} {item}.")


def _hand_out(d: Draft, name: str, other: str, item: str) -> None:
    before = d.value
    k = d.rng.randint(2, min(6, (before - 2) // 2))
    m = d.rng.randint(2, min(9, (before - 1) // k))
    who, one = d.rng.choice(SHARERS)
    d.say(
        f"{name} gives {m} {item} to each of {k} {who}.",
        f"Then {k} {who} come and each {one} takes {m} {item}.",
    )
    gone = d.work(k, "*", m, f"The {k} {who} get {{}} {item}.")
    d.work(before, "-", gone, f"Now {name} has {{}} {item} left.")


def _grow(d: Draft, name: str, other: str, item: str) -> None:
    k, word = d.rng.choice(((2, "twice"), (3, "three times")))
    d.say(
        f"A week later {name} has {word} as many {item}.",
        f"One month later the number of {item} is {word} as large.",
    )
    d.work(d.value, "*", k, f"Later {name} has {{}} {item}.")


_OPENINGS = (_open_boxes, _open_compare, _open_pool)


def _event(d: Draft, room: int, name: str, other: str, item: str) -> None:
    fits: list[Callable[[Draft, str, str, str], None]] = (
        [_gain] if d.value <= 110 else []
    )
    if d.value >= 6:
        fits += [_lose]
    if d.value <= 50:
        fits += [_grow]
    if room >= 2:
        fits += [_gain_packs] if d.value <= 90 else []
        fits += [_hand_out] if d.value >= 8 else []
    d.rng.choice(fits)(d, name, other, item)


def _end_left(d: Draft, name: str, item: str) -> None:
    d.say(
        f"How many {item} does {name} have now?",
        f"How many {item} are there in the end?",
        f"Find the number of {item} that {name} has now.",
    )


def _end_share(d: Draft, name: str, item: str) -> bool:
    k = d.divisor()
    if k is None:
        return False
    who, one = d.rng.choice((*SHARERS, *BOXES))
    verb = "shares" if (who, one) in SHARERS else "puts"
    way = "equally among" if verb == "shares" else "equally into"
    d.say(
        f"{name} {verb} all {item} {way} {k} {who}. How many {item} go to each {one}?",
        f"In the end {name} {verb} them {way} {k} {who}. How many {item} does each {one} get?",
    )
    d.work(d.value, "/", k, f"So each {one} gets {{}} {item}.")
    return True


def _end_sell(d: Draft, name: str, item: str) -> bool:
    if d.value > 60:
        return False
    p = d.rng.randint(2, 9)
    d.say(
        f"{name} sells all {item} for {p} dollars each. How many dollars does {name} get?",
        f"Each one is worth {p} dollars. How many dollars are all the {item} worth?",
    )
    d.work(d.value, "*", p, f"So the {item} bring {{}} dollars.")
    return True


def _end_goal(d: Draft, name: str, item: str) -> bool:
    goal = d.value + d.rng.randint(3, 60)
    d.say(
        f"{name} wants to have {goal} {item}. How many more {item} does {name} need?",
        f"How many {item} are missing if {name} needs {goal}?",
    )
    d.work(goal, "-", d.value, f"So {name} needs {{}} more {item}.")
    return True


def things(d: Draft, ops: int) -> None:
    """Write about a collection of items, in `ops` arithmetic steps."""
    name, other = d.rng.sample(NAMES, 2)
    item = d.rng.choice(ITEMS)
    opening = d.rng.choice((_open_plain, *_OPENINGS)) if ops > 2 else _open_plain
    if ops == 2 and d.rng.random() < 0.6:
        opening = d.rng.choice(_OPENINGS)
    opening(d, name, other, item)
    ending = d.rng.random() < 0.6
    while len(d.steps) < ops - ending:
        _event(d, ops - ending - len(d.steps), name, other, item)
    if not ending:
        _end_left(d, name, item)
    elif not d.rng.choice((_end_share, _end_share, _end_sell, _end_goal))(
        d, name, item
    ):
        _end_goal(d, name, item)
