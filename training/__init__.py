"""Train the bundled model; not part of the wheel."""
