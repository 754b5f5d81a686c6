"""Bilevel reinforcement learning of an actor and a critic that writes feedback, on Megatron-Core."""

__version__ = "0.1.0"
