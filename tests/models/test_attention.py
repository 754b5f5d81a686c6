"""What core attention does beside attending: rotary embeddings."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from megatron_binac.models import cpu
from megatron_binac.models.attention import PackedParams, RotaryByPosition, Turn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_turned_as_megatron_turns_them(dtype: torch.dtype) -> None:
    cpu.enable()
    torch.manual_seed(0)
    with cpu.region():
        inner = RotaryEmbedding(
            8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=object()
        )
    ours = RotaryByPosition(inner, 16, dtype, in_core=True)
    theirs = RotaryByPosition(inner, 16, dtype, in_core=False)
    positions_T = torch.tensor([0, 1, 2, 0, 15, 7])
    packed = PackedParams.of(positions_T, [0, 3, 6])
    theirs.get_rotary_seq_len(None, None, None, None, packed)
    assert packed.turns is None
    angles = theirs(6)
    ours.get_rotary_seq_len(None, None, None, None, packed)
    assert ours(6) is None and packed.turns is not None

    vectors = torch.randn(6, 3, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn_like(vectors)
    expected = _apply_rotary_pos_emb_bshd(vectors[:, None], angles).squeeze(1)
    turned = Turn.apply(vectors, *packed.turns)
    bound = 1e-6 if dtype == torch.float32 else 0.05  # bfloat16: one rounding less here
    assert turned.dtype == dtype
    assert torch.allclose(turned, expected, atol=bound)
    assert torch.equal(turned[0], vectors[0]) and not torch.allclose(turned[1], vectors[1])
    (one,) = torch.autograd.grad(turned, vectors, weight)
    (other,) = torch.autograd.grad(expected, vectors, weight)
    assert torch.allclose(one, other, atol=bound)
