"""Score the bundled model: `command` runs ``diffuplug eval``, `every_policy` ``eval --all``."""
