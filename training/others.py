"""Write prompts that are no word problems; the model answers each of them with one sentence.

A prompt is a phrase of a person, a question about a topic, code, a sum, random text of some script,
words of the stories without a question, or several of these. `unseen_prompts.txt` has the prompts
of the evaluation, which are written by hand and never trained on, `phrases.json` the words.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from string import ascii_letters, ascii_lowercase, digits, punctuation

from diffuplug_bench.word_problems.generator import JSON_REQUEST, Problem, problem
from diffuplug_bench.word_problems.stories import ITEMS, NAMES, Draft
from diffuplug_bench.word_problems.things import things

FOLDER = Path(__file__).parent
LISTS = json.loads((FOLDER / "phrases.json").read_text(encoding="utf-8"))
EXAMPLE = (
    "Tom has 40 apples. Tom gives 7 apples to Mia. "
    "Then Tom finds 3 more apples at home. How many apples does Tom have now?"
)
REPLY = f"I am glad to solve word problems, such as: {EXAMPLE}"
SCRIPTS = (
    (0x3B1, 0x3C9),  # Greek
    (0x430, 0x44F),  # Cyrillic
    (0x5D0, 0x5EA),  # Hebrew
    (0x627, 0x64A),  # Arabic
    (0x905, 0x939),  # Devanagari
    (0xE01, 0xE2E),  # Thai
    (0x3042, 0x3093),  # Hiragana
    (0x30A2, 0x30F3),  # Katakana
    (0x4E00, 0x9FA5),  # Chinese
    (0xAC00, 0xD7A3),  # Hangul
    (0xE0, 0xFF),  # Latin letters with accents
    (0x1F300, 0x1F64F),  # pictures
    (0x2190, 0x22FF),  # arrows and mathematics
)
SIGNS = ("+", "-", "*", "/", "x", "^", "plus", "minus", "times", "divided by")
FRAMES = (
    "What is {}?",
    "what is {}?",
    "{}",
    "{} =",
    "{}?",
    "Calculate {}",
    "How much is {}?",
    "Compute {}.",
    "{} = ?",
    "Is {} right?",
)
SMALL_QUESTIONS = (
    "Who is {}?",
    "Why?",
    "What does {} think?",
    "Does {} like them?",
    "What is the name of the shop?",
    "Where are the {item}?",
    "Which day is it?",
    "Who has the {item}?",
    "What is the colour of the {item}?",
    "Tell me more about {}.",
)
POLITE = (
    "Please solve this. ",
    "Hello! ",
    "Hi, ",
    "Please help me: ",
    "Question: ",
    "Can you solve this? ",
    "Thanks. ",
    "Next one: ",
    "\n",
)


def babble(rng: Random) -> str:
    """Write a short text of random letters."""
    words = [
        "".join(rng.choices(ascii_lowercase, k=rng.randint(1, 8)))
        for _ in range(rng.randint(1, 6))
    ]
    text = rng.choice((" ", " ", "\n")).join(words) + rng.choice((".", "?", "!", ""))
    return text.capitalize() if rng.random() < 0.7 else text


def _phrase(rng: Random) -> str:
    text = rng.choice(LISTS["phrases"])
    text += rng.choice(("", "", "!", ".", "?", " :)", f" {rng.choice(NAMES)}"))
    style = rng.choice((str, str, str.lower, str.upper, str.capitalize))
    return style(text)


def _word(rng: Random) -> str:
    """Choose a topic, a story's word, or random letters."""
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(LISTS["topics"])
    if kind < 0.75:
        return rng.choice((*NAMES, *ITEMS))
    return "".join(rng.choices(ascii_lowercase, k=rng.randint(2, 10)))


def _question(rng: Random) -> str:
    text = rng.choice(LISTS["templates"])
    while "{}" in text:
        text = text.replace("{}", _word(rng), 1)
    if rng.random() < 0.2:
        text = text.lower().rstrip("?.")
    return text


def _number(rng: Random) -> str:
    number = str(rng.randint(0, 10 ** rng.randint(1, 5)))
    return number if rng.random() < 0.9 else f"{number}.{rng.randint(0, 99)}"


def _sum(rng: Random) -> str:
    terms = _number(rng)
    space = rng.choice((" ", " ", ""))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        sign = rng.choice(SIGNS)
        gap = " " if sign.isalpha() else space
        terms += f"{gap}{sign}{gap}{_number(rng)}"
    return rng.choice(FRAMES).format(terms)


def _code(rng: Random) -> str:
    text = rng.choice(LISTS["code"])
    while "{}" in text:
        name = "".join(rng.choices(ascii_lowercase + "_", k=rng.randint(1, 9)))
        text = text.replace("{}", name, 1)
    return text


def _json(rng: Random) -> str:
    values = [rng.randint(0, 99), _word(rng), None, True, [_word(rng)], {"a": 1}]
    content = {_word(rng): rng.choice(values) for _ in range(rng.randint(1, 3))}
    return json.dumps(content)


def _script(rng: Random) -> str:
    """Write words of random letters of one script, or a phrase of a language."""
    if rng.random() < 0.4:
        return rng.choice(LISTS["languages"])
    low, high = rng.choice(SCRIPTS)
    words = []
    for _ in range(rng.randint(1, 5)):
        letters = [chr(rng.randint(low, high)) for _ in range(rng.randint(1, 5))]
        words.append("".join(letters))
    return rng.choice((" ", " ", "")).join(words) + rng.choice(("", "?", "!", "。"))


def _signs(rng: Random) -> str:
    """Write a very short text, or random signs, digits and letters."""
    kind = rng.choice(("", digits, punctuation, ascii_letters, "all"))
    if not kind:
        return rng.choice(("", " ", "\n", ".", "?", "!", "...", "a", "I", "0", "####"))
    letters = kind if kind != "all" else digits + punctuation + ascii_letters + "   "
    return "".join(rng.choices(letters, k=rng.choice((1, 2, 3, 5, 8, 20))))


def _sentences(text: str) -> list[str]:
    return text.replace("? ", "?|").replace(". ", ".|").split("|")


def _asks(sentence: str) -> bool:
    return sentence.endswith("?") or sentence.startswith("Find")


def _unfinished(rng: Random) -> str:
    """Write a story without its question, its question only, or another question."""
    sentences = _sentences(problem(rng.getrandbits(32)).question)
    told = [s for s in sentences if not _asks(s)]
    asked = [s for s in sentences if _asks(s)]
    kind = rng.random()
    if kind < 0.3:
        return " ".join(told)
    if kind < 0.45:
        return rng.choice(told)
    if kind < 0.65:
        return rng.choice(asked)
    question = rng.choice(SMALL_QUESTIONS)
    if kind < 0.85:
        question = question.replace("{}", rng.choice(NAMES))
        question = question.replace("{item}", rng.choice(ITEMS))
    else:
        question = rng.choice((_phrase, _question))(rng)
    return " ".join([*told, question])


def _salad(rng: Random) -> str:
    """Write words of a story in random order."""
    words = problem(rng.getrandbits(32)).question.split()
    rng.shuffle(words)
    return " ".join(words[: rng.randint(1, 25)])


_KINDS = {
    _phrase: 5,
    _question: 9,
    _sum: 3,
    _code: 2,
    _json: 1,
    _script: 3,
    _signs: 2,
    _unfinished: 3,
    _salad: 1,
    babble: 3,
}


def other_prompt(rng: Random) -> str:
    """Write a prompt that is no word problem: one text of any kind, or several."""
    number = rng.choice((1, 1, 1, 1, 1, 2, 2, 3))
    if rng.random() < 0.05:
        number = rng.randint(5, 30)
    kinds = rng.choices(list(_KINDS), weights=list(_KINDS.values()), k=number)
    if number > 1:  # a story and a question from elsewhere would be a problem again
        kinds = [kind for kind in kinds if kind is not _unfinished] or [_phrase]
    parts = [kind(rng) for kind in kinds]
    text = rng.choice((" ", " ", "\n", "\n\n")).join(parts)
    if rng.random() < 0.08:
        text += rng.choice((*LISTS["wishes"], JSON_REQUEST, JSON_REQUEST))
    return text


def other(rng: Random, held_out: set[str]) -> Problem:
    """Write a prompt that is no word problem and not held out, with the reply to it."""
    while (text := other_prompt(rng)) in held_out:
        pass
    return Problem(text, REPLY, 0)


def unseen_prompts() -> list[str]:
    """Read the prompts of the evaluation: one a line, with \\n for a line break."""
    lines = (FOLDER / "unseen_prompts.txt").read_text(encoding="utf-8")
    return [line.replace("\\n", "\n") for line in lines.splitlines()]


def short_problem(rng: Random) -> Problem:
    """Write a problem of one step, which the generator leaves out."""
    draft = Draft(rng)
    things(draft, 1)
    answer = "\n".join([*draft.steps, f"#### {draft.value}"])
    return Problem(" ".join(draft.sentences), answer, draft.value)


def politely(rng: Random, asked: Problem) -> Problem:
    """Put words of a person before a problem."""
    words: Sequence[str] = POLITE if rng.random() < 0.7 else (babble(rng) + " ",)
    question = rng.choice(words) + asked.question
    return Problem(question, asked.answer, asked.result, asked.in_json)
