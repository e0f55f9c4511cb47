"""Turn logits into committed tokens: everything that runs behind the forward."""
