"""Answer requests whose decoding is watched: snapshots, frames, traces, spans."""
