"""Draw rows of logits whose order no rounding changes."""

import numpy as np


def rows_far_apart(
    vocab: int, mask: int, size: int = 241, gap: float = 3e-5
) -> np.ndarray:
    """Rows whose confidences, margins and entropies are far apart, so that float32 can order them.

    Some have the mask id on top, some are exactly certain.
    """
    rng = np.random.default_rng(5)
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    while len(kept) < size - 5:
        p = rng.dirichlet(np.full(vocab, rng.choice([0.03, 0.1, 0.3])))
        p = np.maximum(p, 1e-6)
        allowed = np.delete(p, mask) / np.delete(p, mask).sum()
        top = np.sort(allowed)
        numbers = np.array(
            [top[-1], top[-1] - top[-2], (allowed * np.log(allowed + 1e-10)).sum()]
        )
        far = all(np.abs(numbers - other).min() > gap for _, other in kept)
        clear = np.abs(numbers[0] - np.array([0.3, 0.5, 0.6, 0.9, 1.0])).min() > gap
        if far and clear and numbers[1] > gap:
            kept.append((np.log(p), numbers))
    certain = np.full((5, vocab), -np.inf)
    certain[np.arange(5), [0, 3, 6, 9, 12]] = 0.0
    return np.concatenate([[row for row, _ in kept], certain]).astype(np.float32)
