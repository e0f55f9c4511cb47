"""Split canvases into a decided run, a window of masks and a rest."""
