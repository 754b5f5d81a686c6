"""Sampling: engines, the tree of turns, and its way into training batches."""
