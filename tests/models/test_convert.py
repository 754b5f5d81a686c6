"""Public models in and out: every family against `transformers`, under several layouts, on the CPU.

The models are tiny and random, so that every tensor counts; weights are large enough that a wrong
map, bias, norm, rotary base or router shows in the logits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_ranks import run_ranks

from megatron_binac.config import ParallelConfig, RoleConfig
from megatron_binac.models import checkpoint
from megatron_binac.models.convert import command, folder
from megatron_binac.models.forward import run_schedule
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.types import Sampling, TrainSequence

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")

VOCAB = 150
"""Not a multiple of 128, so that the embedding is padded."""
NEW_TOKENS = 12
ROWS = [
    np.random.default_rng(i).integers(0, VOCAB, n).astype(np.int32)
    for i, n in enumerate((5, 23, 40))
]
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    """What the converted model must have."""
    dtype: str = "float32"

    @property
    def is_mixture(self) -> bool:
        return self.kind == "Qwen3Moe"


CASES = [
    Case(name="llama2", kind="Llama", settings={"num_key_value_heads": 4}),
    Case(
        name="llama3",
        kind="Llama",
        settings={"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
        parts={"tied_head": True, "head_dim": 16, "rope_theta": 500000.0},
    ),
    Case(name="llama_linear", kind="Llama", settings={"rope_parameters": LINEAR}),
    Case(name="smollm2", kind="Llama", settings={"tie_word_embeddings": True}, dtype="bfloat16"),
    Case(name="mistral", kind="Mistral", settings={"sliding_window": None}),
    Case(
        name="qwen2",
        kind="Qwen2",
        settings={"rope_parameters": YARN},
        parts={"qkv_bias": True, "qk_norm": False},
    ),
    Case(
        name="qwen2_tied",
        kind="Qwen2",
        settings={"tie_word_embeddings": True},
        parts={"qkv_bias": True, "tied_head": True},
    ),
    Case(name="qwen3", kind="Qwen3", settings={"head_dim": 12}, parts={"qk_norm": True}),
    Case(
        name="qwen3_moe",
        kind="Qwen3Moe",
        settings={
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        parts={"qk_norm": True},
    ),
    Case(
        name="qwen3_moe_plain",
        kind="Qwen3Moe",
        settings={
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    Case(
        name="gemma",
        kind="Gemma",
        settings={"head_dim": 16, "num_key_value_heads": 2},
        parts={"zero_centered_norm": True, "tied_head": True, "activation": "gelu_tanh"},
    ),
]
LAYOUTS = {
    1: [ParallelConfig()],
    2: [ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(tp=2, sequence_parallel=True)],
}
EXPERTS = [
    ParallelConfig(tp=2, sequence_parallel=True),
    ParallelConfig(tp=2, ep=2, sequence_parallel=True),
    ParallelConfig(pp=2),
]


def make(case: Case) -> Any:
    config = getattr(transformers, f"{case.kind}Config")(**{**SMALL, **case.settings})
    torch.manual_seed(7)
    model = getattr(transformers, f"{case.kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms and biases start as ones and zeros, which hide a wrong map
                p.add_(torch.empty(p.shape).normal_(0.0, 0.2, generator=generator))
            elif ".experts." in name or name.endswith("gate.weight"):
                p.copy_(torch.empty(p.shape).normal_(0.0, 0.2, generator=generator))
    return model.to(getattr(torch, case.dtype))


@dataclass
class Made:
    """A model as transformers saved it, as we converted it, and as we gave it back."""

    case: Case
    theirs: Path
    ours: Path
    back: Path
    logits: list[torch.Tensor]
    """In float32, of the weights as they are stored."""
    answers: list[list[int]]


def greedy(model: Any, prompt: np.ndarray) -> list[int]:
    ids = torch.tensor(prompt[None].astype(np.int64))
    out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    found = {}
    root = tmp_path_factory.mktemp("convert")
    for case in CASES:
        theirs, ours, back = (root / case.name / part for part in ("theirs", "ours", "back"))
        model = make(case)
        model.save_pretrained(theirs, max_shard_size="20KB")
        (theirs / "tokenizer.json").write_text("{}\n")
        command.convert(str(theirs), ours)
        command.convert(str(ours), back)
        # From the file: a model that is cast in memory has rotary frequencies of few digits.
        plain = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
        plain.eval()
        with torch.no_grad():
            logits = [plain(torch.tensor(r[None].astype(np.int64))).logits[0] for r in ROWS]
        answers = [greedy(plain, row) for row in ROWS]
        found[case.name] = Made(case, theirs, ours, back, logits, answers)
    return found


def role_of(ours: Path, parallel: ParallelConfig) -> RoleConfig:
    model = folder.describe(ours).model
    return RoleConfig(model=model, parallel=parallel, train=False)


def load(ours: Path, parallel: ParallelConfig) -> MegatronLearner:
    role = role_of(ours, parallel)
    groups = build_groups("actor", parallel, 1)
    learner = MegatronLearner(
        "actor",
        role,
        groups,
        vocab_size=role.model.vocab_size,
        seed=3,
        num_steps=1,
        temperature=1.0,
    )
    checkpoint.load_learner(ours / folder.WEIGHTS, learner, weights_only=True)
    return learner


def our_logits(learner: MegatronLearner, rows: list[np.ndarray]) -> list[torch.Tensor] | None:
    """float32 [L, V] of each row from the training path; on the last stage only."""
    sequences = [TrainSequence(ids=r, mask=np.arange(len(r)) >= 1) for r in rows]
    batches = learner.plan(sequences)
    engine = MegatronEngine(learner, max_sequences=8)

    def score(hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        if learner.config.parallel.sequence_parallel:
            parts = [torch.empty_like(hidden) for _ in range(learner.config.parallel.tp)]
            dist.all_gather(parts, hidden.contiguous(), group=learner.groups.collection.tp)
            hidden = torch.cat(parts)
        hidden = hidden.squeeze(1)
        logits = engine._logits(hidden, np.arange(len(hidden)))
        assert logits is not None
        return logits

    for chunk in learner.chunks:
        chunk.eval()
    outputs = run_schedule(learner.groups, learner.model, batches, None, score)
    if not learner.groups.is_last_stage:
        return None
    found: list[Any] = [None] * len(rows)
    for batch, logits in zip(batches, outputs, strict=True):
        for at, start in zip(batch.indices, batch.bounds, strict=False):
            found[int(at)] = logits[start : start + len(rows[int(at)])]
    return found


def in_ranks(paths: dict[str, Path], layouts: dict[str, list[ParallelConfig]]) -> dict[str, Any]:
    """Logits and greedy answers of each model under each layout, as the last rank has them."""
    start_distributed()
    torch.set_num_threads(1)
    found = {}
    for name, path in paths.items():
        for parallel in layouts[name]:
            learner = load(path, parallel)
            with torch.no_grad():
                logits = our_logits(learner, ROWS)
            engine = MegatronEngine(learner, max_sequences=8)
            sampling = Sampling(greedy=True, max_tokens=NEW_TOKENS, stop_id=-1)
            done = engine.generate(ROWS, [0] * len(ROWS), sampling)
            if dist.get_rank() == dist.get_world_size() - 1:
                key = f"{name} tp{parallel.tp} pp{parallel.pp} ep{parallel.ep}"
                key += " sp" if parallel.sequence_parallel else ""
                assert logits is not None
                found[key] = ([x.numpy() for x in logits], [c.ids.tolist() for c in done])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_logits_and_greedy_answers_are_those_of_transformers(
    made: dict[str, Made], world: int
) -> None:
    paths = {name: m.ours for name, m in made.items()}
    layouts = {
        name: EXPERTS if world == 2 and m.case.is_mixture else LAYOUTS[world]
        for name, m in made.items()
    }
    found = run_ranks(world, in_ranks, paths, layouts)[-1]
    assert len(found) == sum(len(layouts[name]) for name in paths)
    for key, (logits, answers) in found.items():
        want = made[key.split()[0]]
        for ours, theirs in zip(logits, want.logits, strict=True):
            assert theirs.std() > 0.3, key  # a model that says something
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4, rtol=0, err_msg=key)
        assert answers == want.answers, key


def test_a_converted_model_has_the_parts_of_its_family(made: dict[str, Made]) -> None:
    for m in made.values():
        description = folder.describe(m.ours)
        for name, value in m.case.parts.items():
            assert getattr(description.model, name) == value, (m.case.name, name)
        assert description.model.vocab_size == VOCAB
    assert folder.describe(made["smollm2"].ours).family == "llama"
    assert folder.describe(made["qwen3_moe"].ours).family == "qwen3_moe"
    scaling = folder.describe(made["llama3"].ours).model.rope_scaling
    assert scaling is not None and (scaling.kind, scaling.original_max_positions) == ("llama3", 16)


def test_a_round_trip_gives_every_file_back_byte_for_byte(made: dict[str, Made]) -> None:
    for m in made.values():
        names = sorted(p.name for p in m.theirs.iterdir())
        assert names == sorted(p.name for p in m.back.iterdir()), m.case.name
        assert sum(name.endswith(".safetensors") for name in names) > 1, names
        for name in names:
            left, right = (m.theirs / name).read_bytes(), (m.back / name).read_bytes()
            assert left == right, (m.case.name, name)


def test_transformers_loads_what_comes_back_and_says_the_same(made: dict[str, Made]) -> None:
    for m in made.values():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            m.back, output_loading_info=True, dtype=torch.float32
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], (m.case.name, info)
        assert [greedy(model.eval(), row) for row in ROWS] == m.answers, m.case.name
