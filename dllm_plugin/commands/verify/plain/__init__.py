"""Hold plain-torch models and decode loops: a second opinion that imports nothing else of ours."""
