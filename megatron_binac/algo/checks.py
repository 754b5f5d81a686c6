"""What tensors have to be before anything is computed from them: no number comes of a wrong one.

Shapes: T tokens, S sequences.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["float", "integer", "bool"]
_FIX = {"float": ".float()", "integer": ".long()", "bool": ".to(torch.bool)"}


def check_kinds(kind: Kind, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor, given by its argument's name, that is of another kind.

    Rewards of 0 and 1 come as integers easily, and the mean of integers is cut off.
    """
    for name, tensor in tensors.items():
        is_bool = tensor.dtype == torch.bool
        found: Kind = "bool" if is_bool else "float" if tensor.is_floating_point() else "integer"
        if found != kind or tensor.is_complex():
            raise ValueError(f"{name} is {tensor.dtype}, expected {kind}: pass {name}{_FIX[kind]}")


def check_borders(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens [S+1] rises from 0 to T without a step down.

    Borders on a GPU are only looked at for their kind and shape: more would wait for the device.
    """
    check_kinds("integer", cu_seqlens=cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"cu_seqlens has the shape {tuple(cu_seqlens.shape)}, expected [S+1]: the borders of "
            "S sequences, [0] for none"
        )
    if cu_seqlens.device.type != "cpu":
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != num_tokens:
        raise ValueError(
            f"got cu_seqlens from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}; expected 0 to "
            f"{num_tokens}, the number of tokens"
        )
    falls = torch.nonzero(cu_seqlens.diff() < 0)
    if falls.numel():
        at = int(falls[0])
        raise ValueError(
            f"cu_seqlens falls from {int(cu_seqlens[at])} to {int(cu_seqlens[at + 1])} at border "
            f"{at + 1}; expected borders in ascending order"
        )


def check_spread(value_S: Tensor, cu_seqlens: Tensor, mask_T: Tensor) -> None:
    """Raise ValueError for arguments of `spread_to_tokens` that do not fit together."""
    check_kinds("bool", mask=mask_T)
    check_kinds("float", value=value_S)
    if mask_T.dim() != 1:
        raise ValueError(f"mask has the shape {tuple(mask_T.shape)}, expected a flat [T]")
    check_borders(cu_seqlens, mask_T.numel())
    if value_S.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(
            f"value has the shape {tuple(value_S.shape)}, expected [{cu_seqlens.numel() - 1}], one "
            "for each sequence of cu_seqlens"
        )


def check_group(reward_N: Tensor, group_N: Tensor, valid_N: Tensor) -> None:
    """Raise ValueError for rewards, groups and validity that do not fit together."""
    if reward_N.dim() != 1 or not reward_N.shape == group_N.shape == valid_N.shape:
        raise ValueError(
            f"reward, group and valid must be flat and of one length, got {tuple(reward_N.shape)}, "
            f"{tuple(group_N.shape)}, {tuple(valid_N.shape)}"
        )
    check_kinds("bool", valid=valid_N)
    check_kinds("float", reward=reward_N)
    check_kinds("integer", group=group_N)


def check_gae(
    reward_T: Tensor,
    value_T: Tensor,
    cu_seqlens: Tensor,
    mask_T: Tensor,
    gamma: float,
    lam: float,
) -> None:
    """Raise ValueError for arguments of `gae` that do not fit together."""
    if not 0.0 <= gamma <= 1.0 or not 0.0 <= lam <= 1.0:
        raise ValueError(f"got gamma {gamma}, lam {lam}; expected both from 0 to 1")
    check_kinds("float", reward=reward_T, value=value_T)
    check_kinds("bool", mask=mask_T)
    if reward_T.dim() != 1 or not reward_T.shape == value_T.shape == mask_T.shape:
        raise ValueError(
            f"reward, value and mask must be flat and of one length, got {tuple(reward_T.shape)}, "
            f"{tuple(value_T.shape)}, {tuple(mask_T.shape)}"
        )
    check_borders(cu_seqlens, reward_T.numel())
