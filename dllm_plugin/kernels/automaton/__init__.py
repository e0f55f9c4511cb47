"""Find the likeliest text of a token automaton for a canvas, or sample one."""
