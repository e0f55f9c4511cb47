"""Read texts with gaps and choose the lengths of the fills."""
