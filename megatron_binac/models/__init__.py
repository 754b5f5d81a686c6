"""The two policies on Megatron-Core: the only floor that imports `megatron.core` (with the
in-process engine)."""
