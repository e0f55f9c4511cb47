"""Run ``diffuplug serve``: check its command line, then serve with vLLM.

Everything of ours is checked before vLLM is imported, which takes seconds. The default is the
bundled model.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from dllm_plugin import default_model
from dllm_plugin.config.options import OPTIONS, Options
from dllm_plugin.config.validation import did_you_mean
from dllm_plugin.decoding.families import FAMILIES

from .models import (
    architecture_of,
    check_decoding,
    check_fits,
    check_folder,
    check_served,
    is_elsewhere,
    read_config,
    resolve,
)
from .offline import BUNDLED_MEMORY, add_adapter, collecting_later, spin_briefly
from .options import (
    DECODE_OPTIONS,
    Parser,
    add_dtype,
    add_flags,
    add_memory_share,
    add_model,
    add_value,
    amount,
    check_spelling,
    check_word,
    flag_of,
    given_options,
    json_or_text,
    take_model,
)

HELP = (
    "Serves a diffusion language model over HTTP. Without MODEL it serves the bundled model "
    "under the name 'diffuplug', with --strategy d2f by its D2F adapter. Every option of "
    "`vllm serve` is taken, too: `diffuplug serve --help=all` lists them."
)
CONFIG, SECTION = "--additional-config", "dllm"
NEAR = 0.8  # of a key that is taken for a misspelling of the section
ENDPOINTS = "diffuplug_api"
# Groups of which vLLM loads everything until ``VLLM_PLUGINS`` is set, which then holds for all.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
# With one of these, what a model's folder holds is vLLM's to know.
OTHER_FORMATS = (
    *("--config-format", "--hf-config-path", "--load-format", "--revision"),
    *("--download-dir", "--hf-overrides", "--hf-token"),
)
# Of vLLM's options those that are whole numbers, and often given.
AMOUNTS = (
    *("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
    *("--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp"),
    "--kv-cache-memory-bytes",
)
FILES = ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs")


def run(arguments: Sequence[str]) -> int:
    """Serve in this process, so that signals and the exit status are the server's own."""
    if any(word.startswith("--help=") for word in arguments):
        return import_server()(arguments)
    command = server_arguments(arguments)
    name_plugins()
    # Editors send up to 14 stop strings; vLLM takes four by default.
    os.environ.setdefault("VLLM_MAX_STOP_STRINGS", "64")
    if os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING") == "WARNING":
        print(
            "diffuplug: starting vLLM (VLLM_LOGGING_LEVEL=INFO shows its log)",
            file=sys.stderr,
        )
    serve = import_server()
    model = command[0] if command and not command[0].startswith("-") else None
    if model is not None and not is_readable(model, command):
        model = None
    return serve(command, model)


def import_server() -> Callable[..., int]:
    """Import vLLM with its server."""
    with collecting_later():
        from .server import serve
    return serve


def name_plugins() -> None:
    """Name our endpoints in ``VLLM_PLUGINS`` unless the user has set it: vLLM loads no others."""
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is None:
        groups = (metadata.entry_points(group=group) for group in PLUGIN_GROUPS)
        others = sorted({plugin.name for group in groups for plugin in group})
        os.environ["VLLM_PLUGINS"] = ",".join([*others, ENDPOINTS])
    elif ENDPOINTS not in chosen.split(","):
        print(
            f"The endpoints of DiffuPlug are off: VLLM_PLUGINS does not name {ENDPOINTS}.",
            file=sys.stderr,
        )


def add_parser(commands: Any) -> None:
    """Add the command, for its help: :func:`server_arguments` reads its options itself."""
    parser = commands.add_parser(
        "serve",
        usage="diffuplug serve [MODEL] [options] [vllm serve options]",
        description=HELP,
    )
    add_model(parser)
    engine = parser.add_argument_group("engine", "Chosen at the start.")
    requests = parser.add_argument_group(
        "decoding", "Defaults of requests, which may set their own."
    )
    debug = parser.add_argument_group("debug", "For tests and measurements.")
    # Those that other commands have come first.
    for name in sorted(OPTIONS, key=_is_rare):
        if OPTIONS[name].request:
            add_flags(requests, [name])
        else:
            add_flags(debug if OPTIONS[name].debug else engine, [name])


def _is_rare(name: str) -> bool:
    """Return whether only `serve` has an option of decoding."""
    return OPTIONS[name].request and name not in DECODE_OPTIONS


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `vllm serve` that ``diffuplug serve ARGUMENTS`` stands for.

    Raises ValueError for a wrong option of ours, a model that is not there and a taken port.
    """
    options, rest = split_options(arguments)
    check_spelling(rest, [flag_of(name) for name in OPTIONS])
    given, rest = take_config(rest)
    model, rest = take_model(rest)
    if model is not None:
        model = resolve(model)
    config = given or {}
    section = config.get(SECTION, {})
    if not isinstance(section, dict):
        raise ValueError(
            f"{CONFIG}: {SECTION!r} must be a JSON object, got {section!r}"
        )
    check_sections(config, section, options)
    section = section | options
    Options.from_user(section)
    file = config_file(rest)
    if section and "additional-config" in file:
        raise ValueError(
            f"{', '.join(map(flag_of, section))} would replace additional-config of the "
            "file: give all of them in one place"
        )
    if model is None and "model" not in file:
        model = default_model.path()
        rest += bundled_arguments(rest)
        if given is None:
            add_adapter(section)
        check_decoding(model, section)
    elif model is not None and is_readable(model, rest):
        check_served(model, section)
        check_decoding(model, section)
    if model is not None and is_readable(model, rest):
        check_own(model, rest)
    check_values(rest)
    check_named_files(rest)
    check_port(rest)
    if section:
        config[SECTION] = section
    if config:
        rest += [CONFIG, json.dumps(config)]
    return [*([] if model is None else [model]), *rest]


def check_sections(
    config: dict[str, Any], section: dict[str, Any], options: dict[str, Any]
) -> None:
    """Raise ValueError for a misspelt name of our section, and an option with two values."""
    for key in config:
        question = did_you_mean(key.lower(), [SECTION], cutoff=NEAR)
        # "llm" is as near as a misspelling, and a name that another plugin may have.
        if key not in (SECTION, "llm") and question:
            raise ValueError(f"{CONFIG} has no section {key!r}{question}")
    for name, value in options.items():
        if section.get(name, value) != value:
            raise ValueError(
                f"{name} is given twice: {value!r} by {flag_of(name)} and "
                f"{section[name]!r} in {CONFIG}: leave one of them out"
            )


def split_options(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split our options, checked, from the arguments of vLLM."""
    parser = Parser(prog="diffuplug serve", add_help=False, allow_abbrev=False)
    add_flags(parser)
    args, rest = parser.parse_known_args([_dashed(word) for word in arguments])
    return given_options(args, OPTIONS), rest


def _dashed(word: str) -> str:
    """Return a flag with dashes for underscores, as vLLM reads flags, and other words as is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name, dot, path = name.partition(".")
    return name.replace("_", "-") + dot + path + equals + value


def take_config(arguments: list[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Split ``--additional-config``, in any of vLLM's spellings, from the arguments."""
    config: dict[str, Any] | None = None
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        option, *path = name.split(".")
        if option != CONFIG or name.endswith("+"):
            rest.append(word)
            continue
        if not equals:
            value = next(words, "")
        config = {} if config is None else config
        more = json_or_text(value) if path else _json_object(value)
        for key in reversed(path):
            more = {key: more}
        _merge(config, more)
    return config, rest


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{CONFIG} is no JSON: {error}, in {text}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{CONFIG} must be a JSON object, got {text}")
    return found


def _merge(config: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the entries of an object to another; objects within are merged."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value


def config_file(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options of the file that ``--config`` names, with dashes; none without."""
    path = value_of(arguments, "--config")
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must map options to values")
    return {str(name).replace("_", "-"): value for name, value in found.items()}


def is_readable(model: str, arguments: Sequence[str]) -> bool:
    """Return whether a model is a folder, or a name on the hub, that vLLM reads as such."""
    if is_elsewhere(model):
        return False
    return all(value_of(arguments, option) is None for option in OTHER_FORMATS)


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of an option among the arguments, "" for none; None: not given."""
    found = None
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.partition(".")[0] == option:
            found = value if equals else "".join(arguments[i + 1 : i + 2])
    return found


def bundled_arguments(given: Sequence[str]) -> list[str]:
    """Return what the bundled model takes besides, and prepare the process for it."""
    added = {"--served-model-name": "diffuplug"}
    added |= {flag_of(name): str(value) for name, value in BUNDLED_MEMORY.items()}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    spin_briefly()
    arguments = []
    for option, value in added.items():
        if value_of(given, option) is None:
            arguments += [option, value]
    return arguments


def check_own(model: str, arguments: list[str]) -> None:
    """Raise ValueError for options of vLLM that a model of ours cannot have."""
    config = read_config(model)
    if architecture_of(config) not in FAMILIES:
        return  # plugins may quantise other models in ways of their own
    length = value_of(arguments, "--max-model-len") or ""
    if length.isdecimal():
        check_fits("--max-model-len", int(length), config)
    for option in ("--quantization", "-q"):
        word = value_of(arguments, option)
        if word and word != "None":
            check_word("--quantization", word)


def check_values(arguments: list[str]) -> None:
    """End with one sentence if an option of vLLM has a value that it never takes."""
    parser = Parser(prog="diffuplug serve", add_help=False, allow_abbrev=False)
    add_dtype(parser)
    add_memory_share(parser)
    for option in AMOUNTS:
        add_value(parser, option, "N", "", type=amount)
    for option in ("--port", "--host", "--uds", "--tokenizer", *FILES):
        add_value(parser, option, "X", "")  # none goes without a value
    parser.parse_known_args(arguments)
    if word := value_of(arguments, "--kv-cache-dtype"):
        check_word("--kv-cache-dtype", word)


def check_named_files(arguments: Sequence[str]) -> None:
    """Raise ValueError if a file or folder that vLLM will read is not there."""
    for option in FILES:
        if (name := value_of(arguments, option)) and not Path(name).is_file():
            raise ValueError(f"{option} {name} is no file")
    template = value_of(arguments, "--chat-template") or ""
    # It may be the template itself, or the name of one that vLLM has: template_chatml.jinja.
    is_file = template.endswith(".jinja") and not template.startswith("template_")
    is_path = ("/" in template or is_file) and not {*"{}\n"} & {*template}
    if is_path and not Path(template).is_file():
        raise ValueError(f"--chat-template {template} is no file")
    tokenizer = value_of(arguments, "--tokenizer")
    if tokenizer == "":
        raise ValueError("--tokenizer is empty: name a folder, or leave it out")
    check_folder(tokenizer or "")
    socket_folder = Path(value_of(arguments, "--uds") or "").parent
    if not socket_folder.is_dir():
        raise ValueError(f"there is no folder {socket_folder} for --uds")


def check_port(arguments: Sequence[str]) -> None:
    """Raise ValueError if somebody listens where the server would."""
    elsewhere = ("--uds", "--headless", "--config", "--grpc")
    if any(value_of(arguments, option) is not None for option in elsewhere):
        return
    port = value_of(arguments, "--port") or "8000"
    host = value_of(arguments, "--host")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--port must be a number from 0 to 65535, got {port!r}")
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", int(port)))
        except OSError as error:
            raise ValueError(
                f"the server cannot listen at {host or 'localhost'}:{port}: "
                f"{error.strerror}; choose another --port or --host"
            ) from None
