"""Propose a token and its confidence from each logits row, in one read of the logits."""
