"""Run ``diffuplug watch``: show in a terminal which positions each forward decides."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from dllm_plugin.config.options import REQUEST_PREFIX
from dllm_plugin.config.request.arguments import FRAMES

from .generate import summary
from .models import check_length
from .offline import (
    engine_options,
    num_forwards,
    start_engine,
    stop_engine,
    stream_answer,
)
from .options import add_max_tokens, add_model_options, add_verbose, flag_of, given

if TYPE_CHECKING:
    from rich.text import Text
    from vllm import LLM

EXAMPLE = (
    "Omar has 7 pencils. Anna has 48 pencils and hands them all to Omar. "
    "Omar sells 26 pencils at the market. How many pencils does Omar have now?"
)
OF_ENGINE = (
    *("strategy", "lora_path", "kv_cache_layout"),
    *("gpu_memory_utilization", "verbose", "dtype", "allow_unverified"),
)
UNCERTAIN = (205, 60, 60)
CERTAIN = (60, 170, 80)


@dataclass
class Shown:
    """Contents of the screen: text that is final, and the canvas after it.

    canvas  token and confidence of each position; None for a mask
    """

    text: str = ""
    canvas: list[tuple[str, float | None] | None] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0


def add_parser(commands: Any) -> None:
    """Add the parser of `diffuplug watch`."""
    parser = commands.add_parser("watch")
    parser.add_argument(
        "prompt", nargs="?", default=EXAMPLE, help="default: a word problem"
    )
    words = "a running `diffuplug serve` (default: an engine of its own)"
    parser.add_argument("--url", help=words)
    parser.add_argument("--api-key", help="of the server")
    add_model_options(parser)
    add_max_tokens(parser, 128)
    add_verbose(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show an answer while it forms, or print it if standard output is no terminal."""
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "diffuplug watch needs the package rich: pip install rich"
        ) from error
    if args.url:
        for name in OF_ENGINE:
            given = getattr(args, name)
            if given not in (None, False) and (name, given) != ("dtype", "auto"):
                raise ValueError(
                    f"{flag_of(name)} has no effect with --url, whose server has its own: "
                    "leave it out"
                )
        show(from_server(args), sys.stdout, lambda line: print(line, file=sys.stderr))
        return 0
    if args.api_key is not None:
        raise ValueError(
            "--api-key is that of a server: give its --url, or leave it out"
        )
    options = engine_options(args)
    check_length("--max-tokens", args.max_tokens, options["model"])
    from .phases import screen

    with screen(args.verbose) as started:
        llm = start_engine(options, started.log)
        started.end("ready")
        show(from_engine(llm, args), started.out, started.note)
        stop_engine(llm)
    return 0


def show(states: Iterator[Shown], out: TextIO, note: Callable[[str], None]) -> None:
    """Draw each state over the one before; `note` gets what the answer took."""
    from rich.console import Console
    from rich.live import Live

    shown = Shown()
    console = Console(file=out, highlight=False)
    live = Live(
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    start = time.perf_counter()
    if console.is_terminal:
        with live:
            for shown in states:
                live.update(drawn(shown), refresh=True)
    else:
        *_, shown = states
        print(shown.text, file=out, flush=True)
    note(summary(shown.tokens, shown.forwards, time.perf_counter() - start))


def drawn(shown: Shown) -> "Text":
    """Format final text as it is, decided tokens in a colour, and masks as dots."""
    from rich.text import Text

    text = Text(shown.text)
    for entry in shown.canvas:
        if entry is None:
            text.append("\N{MIDDLE DOT}", style="dim")
        else:
            part, confidence = entry
            text.append(part, style="" if confidence is None else colour(confidence))
    return text


def colour(confidence: float) -> str:
    """Return a colour between that of no and that of full confidence, as rich names it."""
    mixed = []
    for low, high in zip(UNCERTAIN, CERTAIN, strict=True):
        mixed.append(str(round(low + confidence * (high - low))))
    return f"rgb({','.join(mixed)})"


def from_engine(llm: "LLM", args: argparse.Namespace) -> Iterator[Shown]:
    """Decode with an engine of this process."""
    from vllm import SamplingParams

    from dllm_plugin.config.carriers import NO_TOKEN, unpack_snapshot

    tokenizer, shown = llm.get_tokenizer(), Shown()
    sampling = SamplingParams(
        max_tokens=args.max_tokens, temperature=0, extra_args={FRAMES: 1}
    )
    for output in stream_answer(llm, args.prompt, None, sampling):
        piece = output.outputs[0]
        shown.text += piece.text
        shown.tokens += len(piece.token_ids)
        snapshot = unpack_snapshot(output)
        if snapshot is not None:
            shown.canvas, shown.forwards = [], snapshot.forward
            open_from = max(0, snapshot.final - snapshot.start)
            pairs = zip(snapshot.ids, snapshot.confidences, strict=True)
            for token_id, confidence in list(pairs)[open_from:]:
                decided = token_id != NO_TOKEN
                entry = (tokenizer.decode([token_id]), confidence) if decided else None
                shown.canvas.append(entry)
        if output.finished:
            shown.canvas, shown.forwards = [], num_forwards(output)
        yield shown


def from_server(args: argparse.Namespace) -> Iterator[Shown]:
    """Read the frames of a running server."""
    from openai import OpenAI, OpenAIError

    extra: dict[str, Any] = {"diffusion": {"frames": True}}
    for name, value in given(args, ("threshold", "policy", "block_length")).items():
        extra.setdefault("vllm_xargs", {})[REQUEST_PREFIX + name] = value
    shown = Shown()
    positions = dict[int, tuple[str, float | None]]()
    try:
        base = f"{args.url.rstrip('/').removesuffix('/v1')}/v1"
        client = OpenAI(base_url=base, api_key=args.api_key or "none", max_retries=0)
        stream = client.chat.completions.create(
            model=args.model or client.models.list().data[0].id,
            messages=[{"role": "user", "content": args.prompt}],
            max_tokens=args.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in stream:
            for choice in chunk.choices:
                shown.text += choice.delta.content or ""
                if frame := (choice.model_extra or {}).get("diffusion"):
                    _apply(frame, positions, shown)
            metrics = (chunk.model_extra or {}).get("metrics") or {}
            if took := metrics.get("diffusion"):
                shown.canvas, shown.tokens = [], took["tokens"]
                shown.forwards = took["forwards"]
            yield shown
    except OpenAIError as error:
        raise ValueError(f"--url {args.url}: {_sentence(error)}") from error


def _apply(
    frame: dict[str, Any], positions: dict[int, tuple[str, float | None]], shown: Shown
) -> None:
    """Update the canvas to a frame. The last event of a choice holds counts, not a frame."""
    if "set" not in frame:
        return
    for position in frame["unset"]:
        positions.pop(position, None)
    for position, text, confidence in frame["set"]:
        positions[position] = (text, confidence)
    end = frame["start"] + frame["length"]
    shown.canvas = [positions.get(position) for position in range(frame["final"], end)]
    shown.forwards = frame["forward"]


def _sentence(error: Exception) -> str:
    body = getattr(error, "body", None)
    message = body.get("message") if isinstance(body, dict) else body
    return str(message or error)
