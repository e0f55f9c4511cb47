"""Read checkpoints on disk: weights, adapters, special tokens, what a model was trained for."""
