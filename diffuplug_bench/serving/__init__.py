"""Time whole requests, in the engine and over HTTP."""
