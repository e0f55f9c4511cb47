"""Check options and requests, refuse what cannot be honoured, fill in what was left open."""
