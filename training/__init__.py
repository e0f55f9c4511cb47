"""Train the bundled model: ``python -m training.train``, from the repository root."""
