"""How many attention rows a step can have: what buffers of one entry per row must hold."""

from dllm_plugin.config.decode import DecodeConfig


def rows_per_canvas(config: DecodeConfig) -> int:
    """Rows of a canvas in a CUDA graph: one per block slot, and one for what lies behind them."""
    return config.block_slots + 1


def most_rows(config: DecodeConfig, max_num_reqs: int, max_num_tokens: int) -> int:
    """An upper bound on the rows of any step.

    A captured graph holds every row of a canvas, empty or not, for each request of the padded
    batch. In all other steps each row has a query of its own (:func:`batch_rows` leaves empty ones
    out), so there are at most as many rows as tokens: a prompt or a resumed text of n blocks is n
    rows, and blocks may be one token long.
    """
    return max(max_num_reqs * rows_per_canvas(config), max_num_tokens)
