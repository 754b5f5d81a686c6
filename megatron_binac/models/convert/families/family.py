"""What the families' configs share, read strictly: a setting that changes the result and is not
known here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_binac.config import ModelConfig, RopeScaling

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
PARTS: dict[str, Any] = {
    "activation": "silu",
    "qkv_bias": False,
    "qk_norm": False,
    "zero_centered_norm": False,
    "scale_embedding": False,
    "moe": None,
}
"""Fields of a model that tell families apart, as Llama has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model_type of Hugging Face."""

    model_type: str
    architecture: str
    """Class name that `transformers` looks up."""
    read: Callable[[Mapping[str, Any]], ModelConfig]
    """Its config as ours. Raises ValueError for what the layers here do not have."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Settings of this family alone, for a model that came from no Hugging Face folder."""
    parts: Mapping[str, Any]
    """What differs from `PARTS`."""

    def holds(self, model: ModelConfig) -> bool:
        """Whether the family has exactly the parts of the model."""
        wanted = {**PARTS, **self.parts}
        for name, value in wanted.items():
            got = getattr(model, name)
            if (got is not None if value == "any" else got == value) is False:
                return False
        return True

    def config(self, model: ModelConfig, dtype: str) -> dict[str, Any]:
        """A config.json for a model that came from no Hugging Face folder."""
        scaling = model.rope_scaling
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
        if scaling is not None:
            rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind != "linear":
                rope["original_max_position_embeddings"] = scaling.original_max_positions
            if scaling.kind == "llama3":
                rope["low_freq_factor"] = scaling.low_freq_factor
                rope["high_freq_factor"] = scaling.high_freq_factor
            if scaling.kind == "yarn":
                rope["beta_fast"], rope["beta_slow"] = scaling.beta_fast, scaling.beta_slow
                if scaling.attention_factor is not None:
                    rope["attention_factor"] = scaling.attention_factor
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": model.vocab_size,
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.ffn_hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.head_width,
            "hidden_act": NAMES[model.activation],
            "max_position_embeddings": model.max_sequence_length,
            "rms_norm_eps": model.norm_eps,
            "tie_word_embeddings": model.tied_head,
            # Both spellings: transformers before and since version 5.
            "rope_theta": model.rope_theta,
            "rope_scaling": None if scaling is None else rope,
            "rope_parameters": rope,
            "torch_dtype": dtype,
            **self.write(model),
        }


def require(config: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Raise ValueError unless a setting is absent or one of those that the layers here have."""
    if name in config and config[name] not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(
            f"config.json has {name} {config[name]!r}, expected {expected}: the layers here do "
            "not have it"
        )


def read_decoder(config: Mapping[str, Any], *, tied: bool = False, **parts: Any) -> ModelConfig:
    """The settings that all families share; `tied` is what a config without a word on it means."""
    missing = [
        name
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                     "num_attention_heads")
        if config.get(name) is None
    ]  # fmt: skip
    if missing:
        raise ValueError(f"config.json has no {', '.join(missing)}; is it a decoder's config?")
    require(config, "pretraining_tp", 1)
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"config.json has hidden_act {activation!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    heads = config["num_attention_heads"]
    width = config.get("head_dim")
    if width is not None and width * heads == config["hidden_size"]:
        width = None
    theta, scaling = _rope(config)
    values: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "max_sequence_length": config.get("max_position_embeddings", 2048),
        "tied_head": config.get("tie_word_embeddings", tied),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "init_std": config.get("initializer_range", 0.02),
        "head_dim": width,
        "vocab_size": config["vocab_size"],
        "activation": ACTIVATIONS[activation],
    }
    return ModelConfig(**{**values, **parts})


def within_window(model: ModelConfig, window: int | None) -> ModelConfig:
    """A model whose attention has a window, on sequences that the window does not touch."""
    if window is None or window >= model.max_sequence_length:
        return model
    return replace(model, max_sequence_length=window)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the stretching, in the spelling before or since transformers 5."""
    rope = config.get("rope_parameters") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta") or 10000.0))
    require(config, "partial_rotary_factor", 1.0, None)
    require(rope, "partial_rotary_factor", 1.0, None)
    rope = {**(config.get("rope_scaling") or {}), **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"config.json has RoPE scaling {kind!r}, expected default, linear, llama3 or yarn: it "
            "changes with the length of a text, or by factors of each pair"
        )
    for name in ("mscale", "mscale_all_dim"):
        require(rope, name, None)
    require(rope, "truncate", True)
    first = rope.get("original_max_position_embeddings")
    first = first or config.get("original_max_position_embeddings")
    factor = rope.get("factor")
    longest = config.get("max_position_embeddings", 2048)
    if kind == "yarn" and factor is None:
        if not first:
            raise ValueError("config.json has YaRN without factor; expected how much it stretches")
        factor = longest / first
    return theta, RopeScaling(
        kind=kind,
        factor=float(factor),
        original_max_positions=int(first or longest),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=rope.get("attention_factor"),
    )
