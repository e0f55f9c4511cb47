"""Write the stories of word problems about a shop, work, pages of a book, a bus and a trip.

Each story writes question sentences and worked steps into a Draft; `ops` is the number of
arithmetic steps (2 to 4). `things.py` holds the story that is used most.
"""

import random

NAMES = (
    "Anna",
    "Ben",
    "Ella",
    "Emma",
    "Ivan",
    "Jack",
    "Kofi",
    "Leo",
    "Lily",
    "Max",
    "Maya",
    "Mia",
    "Nora",
    "Omar",
    "Sam",
    "Tom",
)
ITEMS = (
    "apples",
    "balls",
    "books",
    "buttons",
    "candles",
    "cards",
    "coins",
    "cookies",
    "cups",
    "eggs",
    "flowers",
    "oranges",
    "pencils",
    "shells",
    "stamps",
    "toys",
)


class Draft:
    """Collect the text of one problem.

    sentences  of the question
    steps      lines of the worked answer
    value      running total
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.value = 0

    def say(self, *forms: str) -> None:
        """Add one sentence to the question, in one of several wordings."""
        self.sentences.append(self.rng.choice(forms))

    def work(self, a: int, op: str, b: int, line: str) -> int:
        """Add the step `a op b` and set `value`; ``{}`` in `line` becomes the equation."""
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]
        if op == "/" and value * b != a:
            raise ValueError(f"{a} / {b} is not exact")
        self.steps.append(line.format(f"{a} {op} {b} = {value}"))
        self.value = value
        return value

    def divisor(self, low: int = 2, high: int = 9) -> int | None:
        """Choose a divisor of `value` whose quotient is at least 2; None if there is none."""
        fits = [
            k
            for k in range(low, high + 1)
            if self.value % k == 0 and self.value // k >= 2
        ]
        return self.rng.choice(fits) if fits else None


def shop(d: Draft, ops: int) -> None:
    """Write about buying two kinds of things; with 4 steps also about the change."""
    name = d.rng.choice(NAMES)
    first, second = d.rng.sample(ITEMS, 2)
    k1, p1 = d.rng.randint(2, 9), d.rng.randint(2, 9)
    k2, p2 = d.rng.randint(2, 9), d.rng.randint(2, 9)
    if ops == 2:
        d.say(
            f"{name} buys {k1} {first} for {p1} dollars each and a lamp for {k2 + p2} dollars.",
            f"At the shop {name} pays {p1} dollars for each of {k1} {first} and {k2 + p2} dollars "
            "for a lamp.",
        )
        d.work(k1, "*", p1, f"The {first} cost {{}} dollars.")
        d.work(d.value, "+", k2 + p2, f"With the lamp {name} pays {{}} dollars.")
    else:
        d.say(
            f"{name} buys {k1} {first} for {p1} dollars each and {k2} {second} for {p2} dollars "
            "each.",
            f"At the shop {name} takes {k1} {first} at {p1} dollars each and {k2} {second} at "
            f"{p2} dollars each.",
        )
        one = d.work(k1, "*", p1, f"The {first} cost {{}} dollars.")
        two = d.work(k2, "*", p2, f"The {second} cost {{}} dollars.")
        d.work(one, "+", two, f"In total {name} pays {{}} dollars.")
    if ops < 4:
        d.say(
            f"How many dollars does {name} pay?",
            "How many dollars does it cost in total?",
        )
        return
    bill = next(b for b in (20, 50, 100, 200) if b > d.value)
    d.say(
        f"{name} pays with {bill} dollars. How many dollars does {name} get back?",
        f"How many dollars are left if {name} had {bill} dollars?",
    )
    d.work(bill, "-", d.value, f"So {name} has {{}} dollars left.")


def work(d: Draft, ops: int) -> None:
    """Write about earning by the hour, spending, saving and sharing."""
    name, other = d.rng.sample(NAMES, 2)
    wage, hours = d.rng.randint(5, 15), d.rng.randint(2, 9)
    d.say(
        f"{name} earns {wage} dollars an hour and works {hours} hours.",
        f"{name} works {hours} hours for {wage} dollars an hour.",
    )
    d.work(wage, "*", hours, f"The work brings {{}} dollars to {name}.")
    if ops >= 3:
        had = d.rng.randint(5, 60)
        d.say(
            f"{name} had {had} dollars before that.",
            f"{other} gives {name} {had} dollars more.",
        )
        d.work(d.value, "+", had, f"In total {name} has {{}} dollars.")
    if ops == 4:
        spent = d.rng.randint(2, min(50, d.value - 3))
        d.say(
            f"{name} spends {spent} dollars on food.",
            f"Then {name} pays {spent} dollars for a lamp.",
        )
        d.work(d.value, "-", spent, f"Then {name} has {{}} dollars left.")
    weeks = d.divisor()
    if weeks is not None and d.rng.random() < 0.6:
        d.say(
            f"The money is for {weeks} weeks, the same each week. How many dollars are there for "
            "each week?",
        )
        d.work(d.value, "/", weeks, "So there are {} dollars for each week.")
        return
    goal = d.value + d.rng.randint(3, 60)
    d.say(f"A bike costs {goal} dollars. How many more dollars does {name} need?")
    d.work(goal, "-", d.value, f"So {name} needs {{}} more dollars.")


def pages(d: Draft, ops: int) -> None:
    """Write about reading a book over some days."""
    name = d.rng.choice(NAMES)
    p, days = d.rng.randint(4, 15), d.rng.randint(2, 7)
    rest, later = d.rng.randint(2, 9), d.rng.randint(2, 9)
    extra = d.rng.randint(3, 20) if ops == 4 else 0
    total = p * days + extra + rest * later
    d.say(
        f"A book has {total} pages. {name} reads {p} pages a day for {days} days.",
        f"{name} reads a book of {total} pages, {p} pages each day for {days} days.",
    )
    read = d.work(p, "*", days, f"In {days} days {name} reads {{}} pages.")
    if ops == 4:
        d.say(
            f"The next day {name} reads {extra} pages.",
            f"Then {name} reads {extra} more pages.",
        )
        read = d.work(read, "+", extra, f"In total {name} reads {{}} pages.")
    d.work(total, "-", read, "Then there are {} pages left.")
    if ops == 2:
        d.say(
            "How many pages are left?",
            f"How many pages does {name} still need to read?",
        )
        return
    d.say(
        f"The other pages take {later} days, the same number each day. How many pages is that a "
        "day?",
        f"How many pages a day does {name} need to read to be done in {later} more days?",
    )
    d.work(d.value, "/", later, f"So {name} reads {{}} pages a day.")


def bus(d: Draft, ops: int) -> None:
    """Write about people who get on and off a bus."""
    ride = d.rng.choice(("bus", "train", "boat"))
    d.value = d.rng.randint(10, 60)
    d.say(
        f"A {ride} starts with {d.value} people.",
        f"There are {d.value} people on a {ride}.",
    )
    stops = ("first", "second", "third", "last")
    for stop in stops[:ops]:
        if d.value < 12 or d.rng.random() < 0.5:
            b = d.rng.randint(2, 30)
            d.say(
                f"At the {stop} stop {b} people get on.",
                f"At the {stop} stop {b} more come on.",
            )
            d.work(d.value, "+", b, f"After the {stop} stop there are {{}} people.")
        else:
            b = d.rng.randint(2, min(30, d.value - 3))
            d.say(
                f"At the {stop} stop {b} people get off.",
                f"At the {stop} stop {b} of them go.",
            )
            d.work(d.value, "-", b, f"After the {stop} stop there are {{}} people.")
    d.say(
        f"How many people are on the {ride} now?",
        "How many people are there in the end?",
    )


def trip(d: Draft, ops: int) -> None:
    """Write about classes that go on a trip in equally full buses."""
    k, m = d.rng.randint(2, 6), d.rng.randint(8, 24)
    buses = d.rng.randint(2, 6)
    d.say(
        f"There are {k} classes with {m} children each on a trip.",
        f"A school has {k} classes of {m} children, and all go on a trip.",
    )
    d.work(k, "*", m, "On the trip there are {} children.")
    if ops == 4:
        sick = d.rng.randint(2, 9)
        d.say(
            f"But {sick} children are sick and stay at home.",
            f"{sick} children can not come.",
        )
        d.work(d.value, "-", sick, "At the start {} children come along.")
    grown = d.rng.randint(2, 9)
    if ops > 2:
        grown += -(d.value + grown) % buses
    d.say(f"{grown} teachers come too.", f"They take {grown} teachers with them.")
    d.work(d.value, "+", grown, "With the teachers there are {} people.")
    if ops == 2:
        d.say("How many people go on the trip?", "How many people are there in total?")
        return
    d.say(
        f"They go in {buses} buses, the same number in each. How many people are in each bus?"
    )
    d.work(d.value, "/", buses, "So each bus takes {} people.")
