"""Bilevel reinforcement learning on Megatron-Core: an actor, and a critic that writes feedback."""

__version__ = "0.1.0"
