"""Run the commands of `diffuplug`: `cli` parses options; each command has a module or folder."""
