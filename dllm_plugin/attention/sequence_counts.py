"""Count the attention sequences of a step: what buffers with one entry per sequence must hold.

A sequence is a run of queries with keys of its own, as variable-length attention takes it. Each
query segment is one, so a step can have more sequences than requests.
"""

from dllm_plugin.config.decode import DecodeConfig


def sequences_per_canvas(config: DecodeConfig) -> int:
    """Return how many sequences a canvas has in a CUDA graph.

    There is one per block slot, and one for the positions behind the last block slot. Under full
    attention all positions see the same keys.
    """
    if config.method.full_attention:
        return 1
    return config.block_slots + 1


def max_sequences(config: DecodeConfig, max_num_reqs: int, max_num_tokens: int) -> int:
    """Return an upper bound on the sequences of any step.

    A captured graph holds every sequence of a canvas, empty or not, for each request of the padded
    batch. In all other steps each sequence has a query of its own
    (:func:`dllm_plugin.attention.sequences.batch_sequences` leaves empty ones out), so there are at
    most as many sequences as tokens: a prompt or a resumed text of n blocks is n sequences, and
    blocks may be one token long. Where canvases float the device alone knows which are empty.
    """
    if config.method.floats:
        return max_num_reqs * sequences_per_canvas(config) + max_num_tokens
    return max(max_num_reqs * sequences_per_canvas(config), max_num_tokens)
