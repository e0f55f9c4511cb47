"""Copy logits rows into rows that are kept per request slot."""
