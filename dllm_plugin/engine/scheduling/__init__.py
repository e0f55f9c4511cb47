"""Schedule canvases: one scheduler a strategy, and what schedulers report."""
