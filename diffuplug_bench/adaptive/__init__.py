"""Time floating canvases, by width and by load."""
