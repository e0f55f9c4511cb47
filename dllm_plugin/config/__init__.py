"""Check options, and fill in what was left open: what an engine and a request run with."""
