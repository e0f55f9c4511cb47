"""Generate the word problems that the bundled model is trained and scored on."""
