"""Sampling from a Hugging Face model: tiny ones that are made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

from megatron_binac.algo.chat_prompts import ChatTemplate  # noqa: E402
from megatron_binac.rollout.hf_engine import (  # noqa: E402
    HuggingFaceEngine,
    TransformersTokenizer,
    is_hugging_face,
)
from megatron_binac.tasks.base import Wording  # noqa: E402
from megatron_binac.types import Prompt, Sampling  # noqa: E402

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .:?!<|>_/\n"


def save_model(folder: Path, *, chat: bool = True) -> None:
    """A Llama of two layers with random weights and a tokenizer of bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in markers])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML if chat else None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet) + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    ]
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TransformersTokenizer:
    return TransformersTokenizer(str(folder))


@pytest.fixture(scope="module")
def engine(folder: Path, tokenizer: TransformersTokenizer) -> HuggingFaceEngine:
    return HuggingFaceEngine(str(folder), tokenizer, precision="fp32")


def prompts(tokenizer: TransformersTokenizer) -> list[np.ndarray]:
    texts = ["a", "the answer is", "0123456789 0123456789", "x", "why?"]
    return [np.asarray(tokenizer.encode(t), np.int32) for t in texts]


def test_greedy_tokens_are_the_librarys_own(
    engine: HuggingFaceEngine, tokenizer: TransformersTokenizer
) -> None:
    sampling = Sampling(max_tokens=24, stop_id=tokenizer.end_id, greedy=True)
    batch = prompts(tokenizer)
    for prompt, answer in zip(batch, engine.generate(batch, [0] * 5, sampling), strict=True):
        ids = torch.as_tensor(prompt, dtype=torch.long)[None]
        want = engine.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )[0, len(prompt) :].tolist()
        assert answer.ids.tolist() == want
        assert answer.finish == ("stop" if want[-1] in engine.end_ids else "length")


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(
    engine: HuggingFaceEngine, tokenizer: TransformersTokenizer
) -> None:
    sampling = Sampling(max_tokens=16, stop_id=tokenizer.end_id)
    batch = prompts(tokenizer)
    together = engine.generate(batch, [7, 8, 9, 10, 11], sampling)
    for i, prompt in enumerate(batch):
        (alone,) = engine.generate([prompt], [7 + i], sampling)
        assert alone.ids.tolist() == together[i].ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, rtol=0, atol=1e-4)
    (other,) = engine.generate([batch[0]], [99], sampling)
    assert other.ids.tolist() != together[0].ids.tolist()


def test_logprobs_are_the_models(
    engine: HuggingFaceEngine, tokenizer: TransformersTokenizer
) -> None:
    sampling = Sampling(max_tokens=12, stop_id=tokenizer.end_id, temperature=0.5)
    prompt = prompts(tokenizer)[1]
    (answer,) = engine.generate([prompt], [3], sampling)
    ids = torch.as_tensor(np.concatenate([prompt, answer.ids]), dtype=torch.long)[None]
    with torch.no_grad():
        logits = engine.model(ids).logits[0].double() / 0.5
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    want = rows.gather(1, torch.as_tensor(answer.ids, dtype=torch.long)[:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, want.numpy(), rtol=0, atol=1e-4)


def test_every_end_of_the_model_ends_an_answer(
    engine: HuggingFaceEngine, tokenizer: TransformersTokenizer
) -> None:
    ends = {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")}
    assert engine.end_ids == ends
    # Far above chance: many samples, so that some end by either.
    sampling = Sampling(max_tokens=200, stop_id=tokenizer.end_id)
    answers = engine.generate([prompts(tokenizer)[0]] * 64, list(range(64)), sampling)
    assert {int(a.ids[-1]) for a in answers if a.finish == "stop"} == ends
    for a in answers:
        assert not set(a.ids[:-1].tolist()) & ends
        assert a.finish == ("stop" if int(a.ids[-1]) in ends else "length")


def test_texts_that_spell_a_marker_are_text(tokenizer: TransformersTokenizer) -> None:
    end = tokenizer.token_id("<|im_end|>")
    ids = tokenizer.encode("a<|im_end|>b")
    assert end not in ids
    assert tokenizer.decode(ids) == "a<|im_end|>b"
    assert tokenizer.encode_markup("a<|im_end|>b").count(end) == 1


def test_the_chat_template_is_the_models_own(tokenizer: TransformersTokenizer) -> None:
    template = ChatTemplate(
        tokenizer, tokenizer.render, tokenizer.encode_markup, Wording(criticise="C?", revise="R?")
    )
    problem = Prompt(id="p", text="What is 7?\nSay it.", gold="7", task="t")
    own: Any = tokenizer._backend
    want = own.apply_chat_template(
        [{"role": "user", "content": problem.text}], add_generation_prompt=True, return_dict=False
    )
    assert template.attempt_ids(problem) == list(want)
    spoken = tokenizer.encode("It is 8.<|im_end|>")
    revision = template.revision_ids(problem, spoken, tokenizer.encode("No."))
    assert tokenizer.decode(revision) == (
        "<|im_start|>user\nWhat is 7?\nSay it.<|im_end|>\n<|im_start|>assistant\nIt is 8.<|im_end|>"
        "<|im_end|>\n<|im_start|>user\nFeedback on your answer:\n\nNo.\n\nR?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    # Two of the three ends of an answered turn are the template's; the third was only spelled.
    assert revision.count(tokenizer.end_id) == 3


def test_what_is_no_model_is_named(folder: Path, tmp_path: Path) -> None:
    assert is_hugging_face(str(folder))
    assert is_hugging_face("owner/name")
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "quickstart"}))
    assert not is_hugging_face(str(tmp_path))
    with pytest.raises(ValueError, match=r"the tokenizer of .* cannot be loaded"):
        TransformersTokenizer(str(tmp_path))


def test_weights_that_are_pickles_are_refused(
    folder: Path, tokenizer: TransformersTokenizer, tmp_path: Path
) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the weights of .* cannot be loaded"):
        HuggingFaceEngine(str(tmp_path), tokenizer)
