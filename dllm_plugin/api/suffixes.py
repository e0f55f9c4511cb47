"""Put the suffix of a completion request behind a gap."""

from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from dllm_plugin.api.request_fields import Encoder
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.template import check_length, no_template
from dllm_plugin.infilling.gaps import AUTO, Gapped
from dllm_plugin.infilling.lengths import lengths_of


def place_suffix(
    request: CompletionRequest,
    suffix: str,
    asked: Any,
    encode: Encoder,
    config: DecodeConfig,
) -> list[Gapped]:
    """Return the prompt with each gap that is to be tried, and the suffix behind it.

    Args:
        asked: lengths of the gap; None: `auto`.
    Raises:
        ValueError: naming what the request cannot have beside a suffix.
    """
    if refusal := no_template(config, "suffix"):
        raise ValueError(refusal)
    if not isinstance(request.prompt, str):
        kind = f"a list of {len(request.prompt)}" if request.prompt else "none"
        raise ValueError(f"suffix needs one prompt of text, got {kind}: send a string.")
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise ValueError(f"{name} cannot be combined with suffix.")
    if request.max_tokens is None:
        raise ValueError("suffix needs max_tokens, which bounds its gap: give it.")
    tail = encode(suffix)
    if config.family.suffix_ends:
        tail = [*tail, encode.tokenizer.eos_token_id]
    starts = encode.first if request.add_special_tokens else encode
    prompt = starts(request.prompt)
    room = min(config.canvas_length, encode.context - len(prompt)) - len(tail)
    fewest = max(request.min_tokens or 0, 1)
    lengths = lengths_of(
        AUTO if asked is None else asked, request.max_tokens, fewest, room
    )
    check_length(config, lengths[-1] + len(tail))
    return [
        Gapped([request.prompt, length, suffix], prompt, [[FILL] * length, tail])
        for length in lengths
    ]
