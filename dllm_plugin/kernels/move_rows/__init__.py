"""Move logits rows into rows kept per slot."""
