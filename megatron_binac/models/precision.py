"""Number formats and the layers that compute in them: what is possible here, what is chosen, why.

The one place that decides between Transformer Engine's layers and Megatron-Core's local ones, that
knows what an FP8 recipe needs of the hardware and of the packing, and that tells NVIDIA's apex from
the package of the same name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_binac.config import RoleConfig

logger = logging.getLogger(__name__)

Layers = Literal["te", "local"]

APEX_PARTS = ("fused_adam", "multi_tensor", "fused_norm", "main_grad_fusion")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One number format and what it asks for.

    Source of the numbers: Transformer Engine's recipes `Float8CurrentScaling`,
    `Float8BlockScaling`, `MXFP8BlockScaling` and their GEMMs' shapes.
    """

    dtype: torch.dtype
    """Of weights and of what is not in FP8."""
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    token_multiple: int = 1
    """Tokens that a rank must hold a multiple of, after the sequence-parallel split."""
    least_te: tuple[int, int] | None = None
    """Release of Transformer Engine that has it."""
    least_sm: tuple[int, int] | None = None
    below_sm: tuple[int, int] | None = None
    """Compute capabilities that have it: from the first up to, not including, the second."""


RECIPES: dict[str, Recipe] = {
    "fp32": Recipe(dtype=torch.float32),
    "bf16": Recipe(dtype=torch.bfloat16),
    # E4M3 forward, E5M2 for gradients, one scale a tensor from its own values.
    "fp8_tensorwise": Recipe(
        dtype=torch.bfloat16,
        fp8_format="hybrid",
        fp8_recipe="tensorwise",
        token_multiple=16,
        least_te=(2, 2),
        least_sm=(8, 9),
    ),
    # One scale for 1 x 128 of an activation, 128 x 128 of a weight.
    "fp8_blockwise": Recipe(
        dtype=torch.bfloat16,
        fp8_format="e4m3",
        fp8_recipe="blockwise",
        token_multiple=128,
        least_te=(2, 3),
        least_sm=(9, 0),
        below_sm=(10, 0),
    ),
    # One power-of-two scale for 32 values, in hardware.
    "mxfp8": Recipe(
        dtype=torch.bfloat16,
        fp8_format="e4m3",
        fp8_recipe="mxfp8",
        token_multiple=32,
        least_te=(2, 1),
        least_sm=(10, 0),
    ),
}


# ---- what is there -----------------------------------------------------------------------------


def te_version() -> tuple[int, int] | None:
    """Release of the installed Transformer Engine; None where it is not installed."""
    try:
        text = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def why_no_te() -> str | None:
    """Why Transformer Engine's layers cannot be used here, in one line; None where they can."""
    if te_version() is None:
        return "Transformer Engine is not installed (pip install 'megatron_binac[te]')"
    if not torch.cuda.is_available():
        return "Transformer Engine computes on GPUs alone and there is none"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine does not load: {str(error).splitlines()[0]}"
    return None


def why_not(precision: str) -> str | None:
    """Why a number format cannot be used here, in one line; None where it can."""
    recipe = RECIPES[precision]
    if recipe.fp8_recipe is None:
        return None
    reason = why_no_te()
    if reason is not None:
        return reason
    version = te_version()
    assert version is not None
    assert recipe.least_te is not None
    if version < recipe.least_te:
        return (
            f"it needs Transformer Engine {_dotted(recipe.least_te)}, {_dotted(version)} is "
            "installed"
        )
    return why_not_on(precision, torch.cuda.get_device_capability())


def why_not_on(precision: str, capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability does not have a number format; None where it does."""
    recipe = RECIPES[precision]
    low, high = recipe.least_sm, recipe.below_sm
    if (low is not None and capability < low) or (high is not None and capability >= high):
        assert low is not None
        end = "or newer" if high is None else f"to below {_sm(high)}"
        return f"it needs {_sm(low)} {end}, this GPU is {_sm(capability)}"
    return None


def apex_kind() -> Literal["nvidia", "other"] | None:
    """Whose `apex` is installed; None where there is none. Nothing of it is run."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = [Path(place) for place in spec.submodule_search_locations or []]
    theirs = ("multi_tensor_apply", "normalization")
    return "nvidia" if any((f / name).is_dir() for f in folders for name in theirs) else "other"


def apex_parts() -> dict[str, bool]:
    """Which of the parts that Megatron-Core uses NVIDIA's apex was built with."""
    if apex_kind() != "nvidia":
        return dict.fromkeys(APEX_PARTS, False)
    return {
        "fused_adam": _has("apex.optimizers", "FusedAdam") and _has("amp_C", "multi_tensor_adam"),
        "multi_tensor": _has("apex.multi_tensor_apply", "multi_tensor_applier")
        and _has("amp_C", "multi_tensor_l2norm", "multi_tensor_scale"),
        "fused_norm": _has("apex.normalization.fused_layer_norm", "FusedLayerNormAffineFunction"),
        "main_grad_fusion": _has("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"),
    }


def _has(module: str, *names: str) -> bool:
    try:
        found = importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return all(hasattr(found, name) for name in names)


def refuse_wrong_apex() -> None:
    """Raise ImportError where `apex` is not NVIDIA's: Megatron-Core takes any package of that name
    for it and fails later, without a word of this."""
    if apex_kind() == "other":
        raise ImportError(
            "the installed package `apex` is not NVIDIA's but a web toolkit of the same name; "
            "pip uninstall apex (NVIDIA's is built from its sources, and optional)"
        )


# ---- what is chosen ----------------------------------------------------------------------------


def choose_layers(role: RoleConfig) -> tuple[Layers, str]:
    """Transformer Engine's layers where they can be used, else local ones; and why.

    Raises ValueError where the role demands what is not possible here: `require_te`, an FP8
    precision.
    """
    reason = why_no_te()
    if reason is None and role.precision == "fp32":
        reason = "its fused attention has no fp32"
    if role.require_te and reason is not None:
        raise ValueError(f"require_te is on, but {reason}; set require_te=false for local layers")
    missing = why_not(role.precision)
    if missing is None and RECIPES[role.precision].fp8_recipe is not None:
        missing = reason
    if missing is not None:
        raise ValueError(
            f"precision is {role.precision!r}, but {missing}; use precision=bf16 (or fp32 on a CPU)"
        )
    if reason is not None:
        return "local", reason
    return "te", f"Transformer Engine {_dotted(te_version() or (0, 0))}"


def options(role: RoleConfig) -> dict[str, Any]:
    """Keywords of Megatron-Core's `TransformerConfig` that follow from the precision."""
    recipe = RECIPES[role.precision]
    fields: dict[str, Any] = {
        "params_dtype": recipe.dtype,
        "pipeline_dtype": recipe.dtype,
        "bf16": recipe.dtype == torch.bfloat16,
        # A weight's gradient is added to its float32 `main_grad` within the GEMM, or after it. The
        # head is Megatron-Core's own layer also beside Transformer Engine's, and asks for apex.
        "gradient_accumulation_fusion": apex_parts()["main_grad_fusion"],
    }
    if recipe.fp8_recipe is None:
        return fields
    fields |= {
        "fp8": recipe.fp8_format,
        "fp8_recipe": recipe.fp8_recipe,
        "fp8_param": False,  # weights stay whole: they are published, saved and compared
        "moe_router_padding_for_quantization": role.model.moe is not None,
    }
    if role.bf16_edge_layers:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": role.bf16_edge_layers,
            "num_layers_at_end_in_bf16": role.bf16_edge_layers,
        }
    return fields


def token_multiple(role: RoleConfig) -> int:
    """Tokens that each rank's part of a packed row must be a multiple of."""
    return RECIPES[role.precision].token_multiple


_said: set[str] = set()


def log_choice(role_name: str, layers: Layers, why: str) -> None:
    """Say once per role what its layers are."""
    say_once(f"{role_name}: {'Transformer Engine' if layers == 'te' else 'local'} layers ({why})")


def say_once(text: str) -> None:
    """A line of the log, however often it is said."""
    if text not in _said:
        _said.add(text)
        logger.info(text)


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
