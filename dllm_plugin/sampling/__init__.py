"""Turn logits into committed tokens: which rows become logits, and all that follows the forward.

One step goes through `canvas_rows` or `masked_rows` (which row serves which position), the features
that its requests use (`features/ordered.py`), `proposer` (a token and its confidence per row),
and `decider` (a score per position, what is unmasked and committed), in this order.
"""
