"""Know how much context vLLM's warm-up of GPUs needs."""

# It decodes canvases behind a prompt that is a position longer, at most so many tokens of them
# (vLLM's default of max_tokens), and one position that is no canvas.
LONGER_PROMPT, TOKENS, SINGLE = 1, 16, 1


def warm_up_context(canvas_length: int) -> int:
    """Return the shortest context in which a canvas can be warmed up."""
    return 2 * canvas_length + LONGER_PROMPT + TOKENS + SINGLE
