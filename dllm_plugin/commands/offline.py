"""Start engines for commands, stop them, and read their results."""

import argparse
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_plugin import default_model
from dllm_plugin.decoding.families import ADAPTED_STRATEGIES

from .interrupts import StartError
from .models import check_decoding, check_model
from .options import DECODE_OPTIONS, check_word, given, given_options

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.entrypoints.llm import ChatCompletionMessageParam

# vLLM reserves a share of all memory by default. A model of a few megabytes needs far less, and on
# a CPU vLLM does not start unless that share is free.
BUNDLED_MEMORY = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2}


# How often threads check for work before they sleep: libgomp's default if threads outnumber cores.
# Its usual 300,000 occupy a core that another process could use, after each of the many short
# operations of a small model.
SPIN_COUNT = "1000"


def spin_briefly() -> None:
    """Let threads of the bundled model share cores, unless the user says how they wait.

    Read when torch is loaded, here and in processes that are started from here.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


# Options of vLLM's engine that commands take under their own names.
ENGINE_NAMES = (
    "dtype",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_model_len",
    "quantization",
    "tensor_parallel_size",
)


def engine_options(
    args: argparse.Namespace, check: Callable[[str], None] = check_model
) -> dict[str, Any]:
    """Return keyword arguments for ``vllm.LLM`` from the model and decode options of a command.

    The bundled model gets its adapter if it decodes with it. Raises ValueError for a wrong decode
    option, before anything heavy is imported.

    Args:
        check: raises ValueError for a model that the command cannot take.
    """
    dllm = given_options(args, DECODE_OPTIONS)
    engine = given(args, ENGINE_NAMES)
    if "quantization" in engine:
        check_word("--quantization", engine["quantization"])
    if args.model is not None:
        check(args.model)
        check_decoding(args.model, dllm)
        return {"model": args.model, "additional_config": {"dllm": dllm}, **engine}
    add_adapter(dllm)
    options = bundled_options(dllm) | engine
    check_decoding(options["model"], dllm)
    return options


def add_adapter(dllm: dict[str, Any]) -> None:
    """Add the bundled adapter if the options decode with it: by D2F, or by widths."""
    strategy = dllm.get("strategy", "auto")
    by_widths = dllm.get("adaptive", "off") != "off"
    if strategy in ADAPTED_STRATEGIES or (by_widths and strategy == "auto"):
        dllm.setdefault("lora_path", default_model.adapter_path())


def bundled_options(dllm: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for the bundled model; nothing is downloaded."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return {
        "model": default_model.path(),
        "additional_config": {"dllm": dllm},
        **BUNDLED_MEMORY,
    }


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Collect no garbage meanwhile: a fourth of the time that imports of vLLM and torch take.

    A start collects a dozen times, and then walks nothing of what was imported here.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def missing_device() -> str | None:
    """Describe the device that the installed vLLM needs and does not find; None if it finds one."""
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_unspecified():
        return None
    return (
        f"vLLM {vllm.__version__} finds no device that it is built for: does `nvidia-smi` list a "
        "GPU? For CPUs, install the CPU build (DIFFUPLUG_DEVICE=cpu make install)"
    )


def start_engine(options: dict[str, Any], log: Path | None = None) -> "LLM":
    """Start an engine. Raises StartError if it does not start, with the cause from its log."""
    gc.collect()  # what a stopped engine left would be frozen below
    try:
        # Not while it starts: processes that it forks would never collect either.
        with collecting_later():
            from vllm import LLM
        if missing := missing_device():
            raise StartError(missing)
        return LLM(**options)
    except (AssertionError, RuntimeError) as error:
        from .phases import BINDING, why_not_started

        if isinstance(error, AssertionError) and BINDING not in str(error):
            raise
        raise StartError(why_not_started(error, log)) from error


def stop_engine(llm: "LLM") -> None:
    """Stop an engine and give back its memory and threads, which the next engine needs."""
    llm.llm_engine.engine_core.shutdown()
    gc.unfreeze()


def stream_answer(
    llm: "LLM", prompt: str, chat: bool | None, sampling: "SamplingParams"
) -> "Iterator[RequestOutput]":
    """Answer one prompt; yield its new text whenever there is some.

    `chat` says whether the chat template is applied; None applies it if there is one.
    """
    from vllm import RequestOutput
    from vllm.renderers import ChatParams
    from vllm.sampling_params import RequestOutputKind

    renderer, engine = llm.renderer, llm.llm_engine
    if chat is None:
        chat = getattr(llm.get_tokenizer(), "chat_template", None) is not None
    if chat:
        params = ChatParams(
            chat_template_kwargs={"add_generation_prompt": True, "tokenize": False}
        )
        # The template writes the first token itself.
        tokens = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
        _, (rendered,) = renderer.render_chat([conversation(prompt)], params, tokens)
    else:
        (rendered,) = renderer.render_cmpl([{"prompt": prompt}])
    sampling.output_kind = RequestOutputKind.DELTA
    engine.add_request("0", rendered, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            yield output


def conversation(question: str) -> "list[ChatCompletionMessageParam]":
    """Return a chat of one user message."""
    return [{"role": "user", "content": question}]


def prompt_of(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a question in the chat template; without one, those of its text."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(text))
    chat = tokenizer.apply_chat_template(
        conversation(text), add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(chat, add_special_tokens=False))


def num_forwards(output: "RequestOutput") -> int:
    """Count the denoising forwards of a finished request: each is one entry of the histogram."""
    metrics = output.outputs[0].spec_decode_metrics
    assert metrics is not None, "the scheduler fills it for every request"
    return sum(metrics.histogram)


def one_sentence(error: Exception) -> str:
    """Return an error's message; of pydantic's errors the first problem and the field it is in."""
    from pydantic import ValidationError

    text, where = str(error), ""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        text, where = first["msg"], ".".join(map(str, first["loc"]))
    # Checks that vLLM or we wrote name the field themselves; checks of types do not.
    checked = text.removeprefix("Value error, ")
    if checked == text and where:
        checked = f"{where}: {text}"
    return " ".join(checked.split())
