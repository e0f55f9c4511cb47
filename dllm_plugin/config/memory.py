"""Compute the memory of a step, which the engine reserves and `doctor` prints."""

# Rows of which float32 copies are made at once.
CHUNK_ROWS = 256


def peak_bytes(rows: int, slots: int, vocab: int, shard: int, logit_bytes: int) -> int:
    """Return the bytes that sampling takes in a full step.

    Float32 copies have CHUNK_ROWS rows at most: the copy, the tempered and filtered copy, and
    what top-p sorts (values, int64 indices, probabilities, mask and result).

    Args:
        rows: logits rows of the step.
        slots: requests at most, each with a row in the tables of biases.
        vocab: columns of whole rows.
        shard: columns of this rank's rows.
        logit_bytes: bytes of a logit.
    """
    chunk = min(rows, CHUNK_ROWS)
    copies = 8 * chunk * vocab * 4
    gathered = chunk * vocab * logit_bytes if shard < vocab else 0
    return rows * shard * logit_bytes + copies + gathered + (slots + 1) * vocab * 4
