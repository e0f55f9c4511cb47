"""Read what lies on disk: weights, adapters, special tokens, what a checkpoint was trained for."""
