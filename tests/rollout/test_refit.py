"""Refits: what is packed comes out, what was moved is counted, and other bytes are noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_ranks
from torch import Tensor
from torch.nn import functional as F

from megatron_binac.config import ModelConfig, MoEConfig, ParallelConfig, RoleConfig
from megatron_binac.models import export
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.rollout.refit import (
    BLOCK,
    Checksum,
    Folder,
    copy_seconds,
    pack,
    read_folder,
    send,
    words,
)
from megatron_binac.types import Sampling

VOCAB = 50
MODEL = ModelConfig(
    num_layers=4, hidden_size=32, ffn_hidden_size=48, max_sequence_length=48, init_std=0.2
)


def tensors() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(7, generator=generator).bfloat16()),
        ("c", torch.randn((), generator=generator)),
        ("d", torch.randn(40, 30, generator=generator)),
        ("e", torch.arange(5, dtype=torch.uint8)),
        ("f", torch.randn(4, 6, generator=generator).t()),  # not contiguous
    ]
    return made


@pytest.mark.parametrize("size", [1, 600, 10_000])
def test_what_is_packed_comes_out(size: int) -> None:
    buckets = list(pack(iter(tensors()), size))
    found = [pair for bucket in buckets for pair in bucket.tensors()]
    assert [name for name, _ in found] == ["a", "b", "c", "d", "e", "f"]
    for (_, got), (_, want) in zip(found, tensors(), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    # One tensor a bucket where none is small enough; "d" (4,800 bytes) is alone at 600; else one.
    assert len(buckets) == {1: 6, 600: 4, 10_000: 1}[size]
    assert all(item.offset % 256 == 0 for bucket in buckets for item in bucket.items)


def checksum(pairs: list[tuple[str, Tensor]]) -> str:
    made = Checksum()
    for name, tensor in pairs:
        made.add(name, tensor)
    return made.hex()


def test_a_checksum_knows_every_byte_name_and_shape_and_no_order() -> None:
    want = checksum(tensors())
    assert checksum(tensors()[::-1]) == want
    seen = {want}
    for number in range(6):
        for change in ("byte", "name", "missing", "twice"):
            pairs = tensors()
            name, tensor = pairs[number]
            if change == "byte":
                data = tensor.contiguous().flatten().view(torch.uint8).clone()
                data[-1] ^= 1
                pairs[number] = (name, data.view(tensor.dtype).view(tensor.shape))
            elif change == "name":
                pairs[number] = (name + "x", tensor)
            elif change == "missing":
                del pairs[number]
            else:
                pairs.append(pairs[number])
            seen.add(checksum(pairs))
    assert len(seen) == 1 + 6 * 4
    swapped = tensors()
    swapped[0] = ("a", swapped[0][1].flatten().flip(0).view(3, 5))  # the same numbers elsewhere
    assert checksum(swapped) not in seen
    assert checksum([("a", torch.zeros(2, 3))]) != checksum([("a", torch.zeros(3, 2))])


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 8 * BLOCK, 8 * BLOCK * 3 + 17])
def test_the_weighted_sum_is_that_of_its_description(num_bytes: int) -> None:
    """By numpy's integers, which wrap around as well; in any number of blocks at once."""
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes).astype(np.uint8)
    padded = np.concatenate([data, np.zeros(-num_bytes % 8, np.uint8)]).view(np.uint64)
    place = np.arange(len(padded), dtype=np.uint64)
    with np.errstate(over="ignore"):
        inner = (place % BLOCK * np.uint64(0x5851F42D4C957F2D)) + np.uint64(0x14057B7EF767814F)
        weight = (inner | np.uint64(1)) * (2 * (place // BLOCK) + 1)
        if num_bytes % 8:  # the last word, which is not whole, has a weight of its own
            blocks = -(-(len(padded) - 1) // BLOCK)
            weight[-1] = np.uint64(2 * blocks + 1) * np.uint64(0x9E3779B97F4A7C15)
        want = int((padded * weight).sum(dtype=np.uint64))
    tensor = torch.from_numpy(data)
    assert words(tensor) == want
    assert words(tensor, blocks_at_once=2) == want
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), tensor])[3:]  # no word is aligned
    assert words(shifted) == want


def test_a_version_on_the_disk_is_whole_and_the_one_before_is_dropped(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="weights on a disk are files of safetensors")
    folder = Folder(tmp_path)
    for version in (3, 4):
        report = folder.write(iter(tensors()), version=version, bucket_bytes=600)
    found = dict(read_folder(folder.path(4)))
    assert found.keys() == dict(tensors()).keys()
    assert checksum(list(found.items())) == report.checksum == checksum(tensors())
    assert report.num_bytes == sum(t.numel() * t.element_size() for _, t in tensors())
    assert (report.version, report.num_tensors) == (4, 6)
    assert [p.name for p in tmp_path.iterdir()] == ["version_00000004"]


# ---- from a learner under any layout to an engine of its own ------------------------------------


class Llama:
    """A second implementation of the model, from its description alone: greedy, no cache."""

    def __init__(self, model: ModelConfig) -> None:
        self.model, self.weights, self.version = model, dict[str, Tensor](), -1

    def load(self, pairs: Iterator[tuple[str, Tensor]]) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in pairs}

    def __call__(self, ids: list[int]) -> Tensor:
        """Logits [V] of the next token."""
        m, w = self.model, self.weights
        heads, groups = m.num_attention_heads, m.num_query_groups
        width = m.hidden_size // heads
        x = w["model.embed_tokens.weight"][ids]
        frequency = m.rope_theta ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(len(ids))[:, None] * torch.cat([frequency, frequency])

        def turn(t: Tensor) -> Tensor:  # [T, heads, D]
            first, second = t.chunk(2, -1)
            other = torch.cat([-second, first], -1)
            return t * angle.cos()[:, None] + other * angle.sin()[:, None]

        for layer in range(m.num_layers):
            at = f"model.layers.{layer}."
            h = F.rms_norm(x, (m.hidden_size,), w[at + "input_layernorm.weight"], m.norm_eps)
            q, k, v = (h @ w[f"{at}self_attn.{n}_proj.weight"].t() for n in "qkv")
            q = turn(q.view(len(ids), heads, width)).transpose(0, 1)
            k = turn(k.view(len(ids), groups, width)).transpose(0, 1)
            v = v.view(len(ids), groups, width).transpose(0, 1)
            k, v = (t.repeat_interleave(heads // groups, 0) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(0, 1).flatten(1)
            x = x + mixed @ w[at + "self_attn.o_proj.weight"].t()
            name = at + "post_attention_layernorm.weight"
            h = F.rms_norm(x, (m.hidden_size,), w[name], m.norm_eps)
            gate, up = (h @ w[f"{at}mlp.{n}_proj.weight"].t() for n in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].t()
        x = F.rms_norm(x[-1], (m.hidden_size,), w["model.norm.weight"], m.norm_eps)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return x @ head.t()

    def greedy(self, prompt: np.ndarray, num: int) -> list[int]:
        ids = [int(i) for i in prompt]
        for _ in range(num):
            ids.append(int(self(ids).argmax()))
        return ids[len(prompt) :]


LAYOUTS = {
    "dp": ParallelConfig(),
    "tp": ParallelConfig(tp=2),
    "sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp": ParallelConfig(pp=2),
    "vpp": ParallelConfig(pp=2, vpp=2),
}


def learner(parallel: ParallelConfig, model: ModelConfig) -> MegatronLearner:
    config = RoleConfig(model=model, parallel=parallel)
    groups = build_groups("actor", parallel, 1)
    return MegatronLearner(
        "actor", config, groups, vocab_size=VOCAB, seed=1, num_steps=10, temperature=1.0
    )


def refitted(*, tied: bool) -> dict[str, Any]:
    """Two refits of an engine from a learner under each layout."""
    from dataclasses import replace

    start_distributed()
    model = replace(MODEL, tied_head=tied)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, VOCAB, n).astype(np.int32) for n in (3, 9, 14)]
    out: dict[str, Any] = {}
    for name, parallel in LAYOUTS.items():
        if dist.get_world_size() % (parallel.tp * parallel.pp):
            continue
        made, engine = learner(parallel, model), Llama(model)
        own = MegatronEngine(made, max_sequences=8)
        found = []
        for version in (1, 2):
            report = send(
                export.hugging_face(made),
                lambda bucket, engine=engine: engine.load(bucket.tensors()),
                version=version,
                bucket_bytes=4_000,
            )
            sampling = Sampling(max_tokens=16, stop_id=VOCAB, temperature=1.0, greedy=True)
            answers = own.generate(prompts, [0, 0, 0], sampling)
            found.append(
                {
                    "own": [a.ids.tolist() for a in answers],
                    "engine": [engine.greedy(p, 16) for p in prompts],
                    "checksum": report.checksum,
                    "bytes": report.num_bytes,
                    "seconds": report.seconds,
                }
            )
            with torch.no_grad():
                for p in made.parameters():
                    if p.dim() > 1:  # all signs turned round would be the same model
                        p.copy_(5.0 * p * p.abs())
        listed = [(n, s) for n, _, s in export.metadata(made)]
        real = [(n, tuple(t.shape)) for n, t in export.hugging_face(made)]
        assert dict(real)["model.embed_tokens.weight"] == (VOCAB, model.hidden_size)
        out[name] = {"found": found, "same_list": listed == real}
    return out


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_tokens_of_an_engine_are_the_learners_own_under_every_layout(tied: bool) -> None:
    """New weights answer after each refit, by version and checksum, no pads (case 32)."""
    alone = run_ranks(1, _refitted, tied)[0]
    ranks = run_ranks(2, _refitted, tied)
    assert set(ranks[0]) == set(LAYOUTS)
    want = alone["dp"]["found"]
    for got in (alone, *ranks):
        for layout in got.values():
            assert layout["same_list"]
            for one, two in zip(layout["found"], want, strict=True):
                assert one["engine"] == one["own"] == two["own"]
                # One version of all replicas, whatever the layout it came from.
                assert one["checksum"] == two["checksum"]
                assert one["bytes"] == two["bytes"]
    assert want[0]["checksum"] != want[1]["checksum"]
    assert want[0]["own"] != want[1]["own"]


def _refitted(tied: bool) -> dict[str, Any]:
    return refitted(tied=tied)


def experts() -> dict[str, str]:
    """Checksums of a model with experts, under each layout that can hold it."""
    from dataclasses import replace

    start_distributed()
    model = replace(
        MODEL, num_layers=2, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
    )
    layouts = {
        "dp": ParallelConfig(),
        "tp": ParallelConfig(tp=2, sequence_parallel=True),
        "ep": ParallelConfig(tp=2, ep=2, sequence_parallel=True),
    }
    out = {}
    for name, parallel in layouts.items():
        if dist.get_world_size() % parallel.tp == 0:
            pairs = list(export.hugging_face(learner(parallel, model)))
            assert len({n for n, _ in pairs}) == len(pairs) == 3 + 2 * (7 + 4 * 3)
            out[name] = checksum(pairs)
    return out


@pytest.mark.slow
def test_experts_come_out_of_the_rank_that_holds_them() -> None:
    (alone,) = run_ranks(1, experts)
    for got in run_ranks(2, experts):
        assert set(got) == {"dp", "tp", "ep"}
        assert set(got.values()) == {alone["dp"]}


def test_a_refit_says_what_it_moved_beside_a_plain_copy() -> None:
    start_distributed()
    made, engine = learner(ParallelConfig(), MODEL), Llama(MODEL)
    report = send(
        export.hugging_face(made), lambda bucket: engine.load(bucket.tensors()), version=7
    )
    row = report.row()
    want = sum(t.numel() * 4 for _, t in export.hugging_face(made))
    assert row["num_bytes"] == want
    assert row["version"] == 7
    assert row["seconds"] > 0
    assert copy_seconds(int(row["num_bytes"]), torch.device("cpu")) > 0
