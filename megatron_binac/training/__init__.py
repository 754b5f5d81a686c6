"""The loop, what is measured in it, and the composition root."""
