"""Weights of public models in and out: Hugging Face folders and GGUF files <-> checkpoints of ours.

`families` reads a family's config, one small file each; `mapping` says which tensors become which;
`torch_dist`, `hugging_face` and `gguf` read and write files piece by piece; `command` puts them
together.
"""
