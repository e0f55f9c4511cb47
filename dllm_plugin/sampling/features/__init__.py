"""Apply what requests ask of a step: one file a feature."""
