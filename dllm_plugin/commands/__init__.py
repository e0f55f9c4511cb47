"""Run the commands of `diffuplug`."""
