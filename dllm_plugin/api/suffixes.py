"""Place the suffix of a completion request after a gap."""

from typing import Any

from pydantic import model_validator
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from dllm_plugin.api.request_fields import Encoder
from dllm_plugin.config.decode import DecodeConfig
from dllm_plugin.config.options import FILL
from dllm_plugin.config.request.checks import check_length, no_template
from dllm_plugin.infilling.gaps import AUTO, Gapped
from dllm_plugin.infilling.lengths import canvas_positions, lengths_of, room_for_gaps


class FillRequest(CompletionRequest):
    """Describe a completion request whose prompt may be empty if it has a suffix."""

    @model_validator(mode="before")
    @classmethod
    def allow_empty_prompt(cls, body: Any) -> Any:
        """Replace an empty text by no token ids, which vLLM's check of prompts takes."""
        if isinstance(body, dict) and body.get("suffix") and body.get("prompt") == "":
            return body | {"prompt": []}
        return body


def place_suffix(
    request: CompletionRequest,
    suffix: str,
    asked: Any,
    encode: Encoder,
    config: DecodeConfig,
) -> list[Gapped]:
    """Return the prompt with each gap that is to be tried, and the suffix after it.

    Args:
        asked: lengths of the gap; None: `auto`.
    Raises:
        ValueError: naming what the request cannot have beside a suffix.
    """
    if refusal := no_template(config, "suffix"):
        raise ValueError(refusal)
    text = request.prompt or ""
    if not isinstance(text, str):
        raise ValueError(
            f"suffix needs one prompt of text, got a list of {len(text)}: send a string."
        )
    for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise ValueError(f"{name} cannot be combined with suffix.")
    if request.max_tokens is None:
        raise ValueError("suffix needs max_tokens, which bounds its gap: give it.")
    tail = encode(suffix)
    if config.family.suffix_ends:
        tail = [*tail, encode.tokenizer.eos_token_id]
    prompt = encode.first(text, special=request.add_special_tokens)
    room = room_for_gaps(config.canvas_length, encode.context - len(prompt), tail)
    fewest = max(request.min_tokens or 0, 1)
    lengths = lengths_of(
        AUTO if asked is None else asked, request.max_tokens, fewest, room
    )
    check_length(config, lengths[-1])
    choices = [
        Gapped([text, length, suffix], prompt, [[FILL] * length, tail])
        for length in lengths
    ]
    check_length(config, canvas_positions(choices))
    return choices
