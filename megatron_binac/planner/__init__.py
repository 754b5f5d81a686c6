"""Does it fit, and how fast: bytes, FLOPs, step times and layouts from a recipe alone. No torch."""
