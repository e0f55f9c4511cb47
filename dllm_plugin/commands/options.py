"""Read the options that several commands share from their command lines.

Flags of engine options are made of the options themselves: ``--canvas-length`` is
``canvas_length``, with its sentence and its limits as help. Imports neither torch nor vLLM.
"""

import argparse
import ast
import json
import math
import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from dllm_plugin.config.options import MAX_POSITIONS, OPTIONS, Options
from dllm_plugin.config.validation import (
    Choice,
    Flag,
    Text,
    did_you_mean,
    shown,
)
from dllm_plugin.models.catalogue import CHECKPOINTS

# Options of decoding that every command with an engine takes.
DECODE_OPTIONS = (
    "strategy",
    "policy",
    "threshold",
    "block_length",
    "lora_path",
    "kv_cache_layout",
    "allow_unverified",
)
MODEL = "folder, hub name or short name (default: the bundled model)"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
# Options whose words are a Literal of vLLM's sources: the file, and the Literal's name.
WORDS = {
    "--kv-cache-dtype": ("config/cache.py", "CacheDType"),
    "--quantization": (
        "model_executor/layers/quantization/__init__.py",
        "QuantizationMethods",
    ),
}
DTYPES_HELP = "auto, float32, bfloat16, float16 (default: auto)"
INVALID_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")
# A count as vLLM reads it, which may be left to vLLM.
AMOUNT = re.compile(r"(?i)auto|-1|(?=.*[1-9])\d+(?:(?:\.\d+)?[kmgt])?")
# Options of `vllm serve` that take no value, and those that take several.
WITHOUT_VALUE = re.compile(
    "--(?:help|headless|grpc|numa-bind|cudagraph-metrics|kv-cache-metrics|.+-lb)"
    "|--(?:no|trust|return|enable|exclude|tokens|allow|enforce|use|skip|ray|swa)-.+"
    "|--(?:language|interleave|fully|specialize|async|aggregate|fail|cohere-is)-.+"
    "|--disable-(?!access-log-for).+|--mm-(?:encoder-only|device-do-normalize)"
    "|--(?:jit-monitor-verbose|kv-sharing-fast-prefill|log-error-stack|dcp-q-replicate)"
    "|--(?:long-prefill-token-threshold-adaptive|scheduler-reserve-full-isl)"
    "|--sleep-mode-offload-cudagraph|-ep|-dp[hem]|-h|-O."
)
WITH_SEVERAL = (
    "--allowed-media-domains",
    "--api-key",
    "--collect-detailed-traces",
    "--cpu-offload-params",
    "--cudagraph-capture-sizes",
    "--ignore-patterns",
    "--kv-cache-dtype-skip-layers",
    "--logits-processors",
    "--lora-modules",
    "--lora-target-modules",
    "--numa-bind-cpus",
    "--numa-bind-nodes",
    "--offload-params",
    "--served-model-name",
    "--sleep-preserve-parameter-names",
)
NEGATIVE = re.compile(r"-\d.*")
NEAR = 0.9  # similarity from which a name is a misspelling of another


class Parser(argparse.ArgumentParser):
    """Parse a command line, and end with one sentence and status 2 if it is wrong."""

    def parse(self, arguments: Sequence[str], command: str = "") -> argparse.Namespace:
        """Parse a command line; `command`: the argument that chooses a subparser."""
        args, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                self.error(f"{word!r} is one argument too many")
            known = self.options_of(getattr(args, command, ""))
            self.error(f"there is no option {word}{did_you_mean(word, known)}")
        named = getattr(args, "model_option", None)
        if named is not None:
            if args.model not in (None, named):
                self.error(f"two models are named: {args.model} and {named}")
            args.model = named
        return args

    def error(self, message: str) -> NoReturn:
        """Print one sentence in place of argparse's usage, and exit."""
        choice = INVALID_CHOICE.search(message)
        if choice is not None:
            word, known = choice.groups()
            message += did_you_mean(word, re.findall(r"'([^']*)'", known))
        print(f"diffuplug: error: {message}", file=sys.stderr)
        sys.exit(2)

    def options_of(self, command: str) -> list[str]:
        """Return the options of a command of this parser."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices[command]._option_string_actions)
        return list(self._option_string_actions)


def text_of(flag: str, file: str | Path) -> str:
    """Read the text of a file that a flag names; ValueError if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {file} is no text in UTF-8") from None


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def add_flags(parser: Any, names: Iterable[str] = OPTIONS) -> None:
    """Add a flag for each of these options; its value is None unless it is given."""
    for name in names:
        check, kind = OPTIONS[name].check, dict[str, Any]()
        if isinstance(check, Flag):
            kind["action"] = argparse.BooleanOptionalAction
        elif isinstance(check, Choice | Text):
            kind["metavar"] = "X"
        else:  # the check refuses wrong values
            kind |= {"metavar": "X", "type": json_or_text}
        doc = OPTIONS[name].doc.rstrip(".")
        words = f"{doc} ({check.limits()})".replace("`", "")
        parser.add_argument(flag_of(name), default=None, help=words, **kind)


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options of these names that a command line gives."""
    values = {}
    for name in names:
        if (value := getattr(args, name, None)) is not None:
            values[name] = value
    return values


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options that a command line gives, checked. Raises ValueError."""
    options = given(args, names)
    Options.from_user(options)
    return options


def check_spelling(arguments: Sequence[str], known: Iterable[str]) -> None:
    """Raise ValueError for the first argument that is a misspelling of one of our flags."""
    flags = list(known)
    for argument in arguments:
        word = argument.partition("=")[0].partition(".")[0]
        if not word.startswith("--") or word in flags:
            continue
        alike = [flag for flag in flags if abs(len(flag) - len(word)) <= 2]
        question = did_you_mean(word, alike, cutoff=NEAR)
        if question:
            raise ValueError(f"there is no option {word}{question}")


def take_model(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split the model from arguments of `vllm serve`: ``--model``, or a word that no option takes.

    Raises ValueError if they name two.
    """
    models, rest = [], []
    free, taken = 0, 0  # values that the last option may take, and has
    words = deque(arguments)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        if name == "--model":
            if not equals:
                value = words.popleft() if words else ""
            models.append(value)
        elif word.startswith("-") and not NEGATIVE.fullmatch(word):
            taken, free = 0, len(words) if name in WITH_SEVERAL else 1
            if equals or WITHOUT_VALUE.fullmatch(name):
                free = 0
            rest.append(word)
        elif taken < free and not (taken and _ends_as_model(word, words)):
            taken += 1
            rest.append(word)
        else:
            models.append(word)
    if len(set(models)) > 1:
        raise ValueError(f"two models are named: {models[0]} and {models[1]}")
    return (models[0] if models else None), rest


def _ends_as_model(word: str, following: Sequence[str]) -> bool:
    """Return whether a word is the last one before an option, and names a model."""
    if following and not following[0].startswith("-"):
        return False
    hub = (found.hub for found in CHECKPOINTS.values())
    is_folder = (Path(word).expanduser() / "config.json").is_file()
    return is_folder or word in CHECKPOINTS or word in hub


def json_or_text(text: str) -> Any:
    """Return what a text means as JSON; the text if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts an engine, and whose argument is no model."""
    parser.add_argument("--model", metavar="M", help=MODEL)
    add_engine_options(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that starts an engine, but its model."""
    engine = parser.add_argument_group("engine")
    add_dtype(engine)
    add_memory_share(engine)
    add_decode_options(parser)


def add_memory_share(parser: Any) -> None:
    """Add the option that a CPU with little free memory needs."""
    words = "as in vLLM; on a CPU, the share of its memory"
    add_value(parser, "--gpu-memory-utilization", "SHARE", words, type=share)


def add_dtype(parser: Any) -> None:
    """Add the option that chooses the dtype of weights and forwards."""
    add_value(parser, "--dtype", "D", DTYPES_HELP, default="auto", choices=DTYPES)


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    """Add the decode options that a command takes."""
    group = parser.add_argument_group("decoding", "Defaults follow from the model.")
    add_flags(group, DECODE_OPTIONS)


def add_model(parser: Any) -> None:
    """Add the model of a command, as its argument and as ``--model``."""
    parser.add_argument("model", nargs="?", help=MODEL)
    words = "the same, as an option"
    add_value(parser, "--model", "MODEL", words, dest="model_option")


def add_sampling(parser: argparse.ArgumentParser) -> Any:
    """Add sampling parameters of one request; return their group."""
    group = parser.add_argument_group("sampling")
    words = "0 is greedy (default: 0)"
    add_value(group, "--temperature", "T", words, type=temperature, default=0.0)
    add_value(group, "--seed", "N", "of random numbers", type=seed)
    return group


def add_max_tokens(parser: Any, default: int) -> None:
    """Add the option that limits an answer."""
    words = f"tokens of the answer at most (default: {default})"
    add_count(parser, "--max-tokens", words, default=default)


def add_count(parser: Any, flag: str, words: str, **options: Any) -> None:
    """Add an option that is a whole number of at least 1."""
    add_value(parser, flag, "N", words, type=positive, **options)


def add_value(parser: Any, flag: str, metavar: str, words: str, **options: Any) -> None:
    """Add an option with a value; `words` are its help."""
    parser.add_argument(flag, metavar=metavar, help=words, **options)


def add_switch(parser: Any, flag: str, words: str) -> None:
    """Add an option without a value."""
    parser.add_argument(flag, action="store_true", help=words)


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows vLLM's log."""
    words = "show vLLM's log (default: a file, named when something fails)"
    parser.add_argument("-v", "--verbose", action="store_true", help=words)


def check_word(option: str, word: str, known: Sequence[str] | None = None) -> None:
    """Raise ValueError for a word of an option that the installed vLLM does not know."""
    known = words_of(option) if known is None else known
    if known and word not in known:
        raise ValueError(
            f"{option} {word} is unknown to vLLM{did_you_mean(word, known)}; known: "
            f"{', '.join(known)}"
        )


def words_of(option: str) -> tuple[str, ...]:
    """Return what vLLM's sources name as an option's words; importing them would take seconds."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return ()
    file, name = WORDS[option]
    source = (Path(vllm.origin).parent / file).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != name:
            continue
        if isinstance(node.value, ast.Subscript):
            names: tuple[str, ...] = ast.literal_eval(node.value.slice)
            return names
    return ()


def positive(text: str) -> int:
    """Return a whole number of at least 1. Raises ArgumentTypeError for smaller numbers."""
    return _whole(text, 1, MAX_POSITIONS)


def seed(text: str) -> int:
    """Return a number that seeds a request. Raises ArgumentTypeError for others."""
    return _whole(text, -(2**63), 2**63 - 1)


def _whole(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if low <= value <= high:
        return value
    raise argparse.ArgumentTypeError(
        f"must be a whole number from {low} to {high}, got {shown(text)}"
    )


def amount(text: str) -> str:
    """Return what vLLM may read as a whole number. Raises ArgumentTypeError for other texts."""
    if AMOUNT.fullmatch(text.strip().replace("_", "").removeprefix("+")):
        return text
    raise argparse.ArgumentTypeError(
        f"must be a whole number of at least 1, such as 4096 or 32k, got {shown(text)}"
    )


def number(text: str) -> float:
    """Return a number. Raises ArgumentTypeError for other texts."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from error


def temperature(text: str) -> float:
    """Return a number of at least 0. Raises ArgumentTypeError for others."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value


def share(text: str) -> float:
    """Return a number above 0 and at most 1. Raises ArgumentTypeError for others."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value
