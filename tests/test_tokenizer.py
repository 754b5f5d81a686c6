"""Tokenizers: exact round trips, turn markers that no text can spell, offsets of sampled ids."""

from __future__ import annotations

import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_binac.tasks.base import corpus
from megatron_binac.tasks.checksum import Checksum
from megatron_binac.tokenizer import (
    PAD,
    TURN_PIECES,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)

TEXTS = [
    "Solve 12 + 7.",
    "the answer is wrong",
    "the answer is right",
    "naive caf\u00e9",
    "x_1 = -3",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "words.model"
    return SentencePieceTokenizer.train(TEXTS, path, vocab_size=320)


HARD = [
    "",
    " ",
    "  two  spaces ",
    "line\nline\r\n\ttab",
    "caf\u00e9 \u4f60\u597d \U0001f600 e\u0301",
    "a\u2581b",  # SentencePiece's own sign for a space
    "\u2581",
    " \u2581 \u2581\u2581",
    "nul \0 byte",
    "<|end|><|user|> <unk> <0x41> <|pad|>",
    "\ufffd",
    "12345 007",
]


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back_exactly(tokenizer: SentencePieceTokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_exactly(tokenizer: SentencePieceTokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_text_spells_a_marker(tokenizer: SentencePieceTokenizer):
    markers = {tokenizer.token_id(piece) for piece in (*TURN_PIECES, PAD)}
    assert len(markers) == 5
    for text in ("<|end|>", "x<|user|>y", "".join(TURN_PIECES), PAD, "<|unknown|>"):
        ids = tokenizer.encode(text)
        assert not markers & set(ids)
        assert tokenizer.decode(ids) == text


def test_a_sampled_marker_shows_in_the_text(tokenizer: SentencePieceTokenizer):
    # Silence would let "8<|user|>" pass for the answer "8".
    ids = [*tokenizer.encode("8"), tokenizer.token_id("<|user|>")]
    assert tokenizer.decode(ids) == "8<|user|>"


def test_digits_stand_alone(tokenizer: SentencePieceTokenizer):
    assert len(tokenizer.encode("1207")) == 4


def test_the_same_texts_give_the_same_bytes(tmp_path: Path):
    paths = [tmp_path / f"{i}.model" for i in range(3)]
    SentencePieceTokenizer.train(TEXTS, paths[0], vocab_size=300)
    SentencePieceTokenizer.train(iter(TEXTS[::-1] + TEXTS), paths[1], vocab_size=300)
    SentencePieceTokenizer.train([*TEXTS, "more"], paths[2], vocab_size=300)
    data = [p.read_bytes() for p in paths]
    assert data[0] == data[1] != data[2]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["0.model", "1.model", "2.model"]


def test_the_quickstart_vocabulary_makes_one_token_of_a_digit_and_of_a_verdict(tmp_path: Path):
    texts = list(corpus(Checksum(), 200))
    tokenizer = SentencePieceTokenizer.train(texts, tmp_path / "t.model", vocab_size=320)
    # Few pairs to merge: the vocabulary ends below what was asked.
    assert 270 < tokenizer.vocab_size < 320
    assert len(tokenizer.encode("293362 off")) == 7
    assert len(tokenizer.encode("071140 ok")) == 7
    assert len(tokenizer.encode("74036")) == 5


def test_a_saved_tokenizer_is_the_same(tokenizer: SentencePieceTokenizer):
    again = load_tokenizer(tokenizer.path)
    assert isinstance(again, SentencePieceTokenizer)
    assert again.vocab_size == tokenizer.vocab_size
    assert (again.end_id, again.pad_id) == (tokenizer.end_id, tokenizer.pad_id)
    assert again.encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_wrong_use_is_refused_with_the_fix(tokenizer: SentencePieceTokenizer, tmp_path: Path):
    with pytest.raises(ValueError, match=r"vocab_size is 200, .* need \d+; raise task\.vocab_size"):
        SentencePieceTokenizer.train(TEXTS, tmp_path / "t.model", vocab_size=200)
    with pytest.raises(ValueError, match="no text to train"):
        SentencePieceTokenizer.train(["", "\n"], tmp_path / "t.model", vocab_size=320)
    with pytest.raises(FileNotFoundError, match="there is no tokenizer at"):
        SentencePieceTokenizer(tmp_path / "absent.model")
    (tmp_path / "bad.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"bad.model is not a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "bad.model")
    with pytest.raises(ValueError, match=r"no piece '<\|referee\|>'"):
        tokenizer.token_id("<|referee|>")
    assert not (tmp_path / "t.model").exists()


def test_the_least_vocabulary_is_accepted_and_one_less_is_not(tmp_path: Path):
    # 256 bytes, 2 own pieces, 4 markers, and the characters a, b, c and the space sign.
    SentencePieceTokenizer.train(["abc"], tmp_path / "t.model", vocab_size=266)
    with pytest.raises(ValueError, match="need 266"):
        SentencePieceTokenizer.train(["abc"], tmp_path / "t.model", vocab_size=265)


def slow_offsets(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, int]]:
    """Spans of whole characters, from growing prefixes of the text."""
    ends = [0, *(len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids)))]
    return list(pairwise(ends))


def test_offsets_of_plain_text(tokenizer: SentencePieceTokenizer):
    ids = tokenizer.encode("the answer is 12")
    spans = tokenizer.offsets(ids)
    assert spans == slow_offsets(tokenizer, ids)
    text = tokenizer.decode(ids)
    assert "".join(text[a:b] for a, b in spans) == text


def test_bytes_of_one_character_share_its_place(tokenizer: SentencePieceTokenizer):
    ids = tokenizer.encode("a\u4f60b")  # three bytes that the vocabulary does not hold
    assert tokenizer.offsets(ids) == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]


def test_offsets_of_broken_bytes(tokenizer: SentencePieceTokenizer):
    def byte(value: int) -> int:
        return next(i for i in range(tokenizer.vocab_size) if tokenizer._bytes[i] == bytes([value]))

    # E4 BD is the start of a character, then "a" breaks it off; FF begins none.
    ids = [byte(0xE4), byte(0xBD), *tokenizer.encode("a"), byte(0xFF)]
    assert tokenizer.decode(ids) == "\ufffda\ufffd"
    assert tokenizer.offsets(ids) == [(0, 1), (0, 1), (1, 2), (2, 3)]


def test_offsets_of_any_ids_cover_the_text_in_order(tokenizer: SentencePieceTokenizer):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        spans, text = tokenizer.offsets(ids), tokenizer.decode(ids)
        assert len(spans) == len(ids)
        assert all(a < b for a, b in spans)
        assert [a for a, _ in spans] == sorted(a for a, _ in spans)
        assert {i for a, b in spans for i in range(a, b)} == set(range(len(text)))


def write_hugging_face_folder(folder: Path, specials: list[str]) -> Path:
    """A byte-level tokenizer.json as language models ship it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tasks`")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    # Models ship settings that would spoil a prompt.
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token=specials[0], pad_id=0)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


RESERVED = ["<|bos|>", "<|r0|>", "<|r1|>", "<|r2|>", "<|end|>"]
MARKERS = {"<|user|>": "<|r0|>", "<|actor|>": "<|r1|>", "<|critic|>": "<|r2|>"}


def test_a_hugging_face_folder(tmp_path: Path):
    folder = write_hugging_face_folder(tmp_path / "model", RESERVED)
    tokenizer = HuggingFaceTokenizer(folder, markers=MARKERS, pad="<|bos|>")
    assert (tokenizer.token_id("<|user|>"), tokenizer.end_id, tokenizer.pad_id) == (1, 4, 0)
    for text in HARD:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(range(5))
    spelled = tokenizer.encode("<|r0|><|end|>")
    assert not set(spelled) & set(range(5)) and tokenizer.decode(spelled) == "<|r0|><|end|>"
    assert tokenizer.decode([*tokenizer.encode("8"), 1]) == "8<|r0|>"
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer.vocab_size == len(data["model"]["vocab"])
    ids = tokenizer.encode("the answer is 12")
    assert tokenizer.offsets(ids) == slow_offsets(tokenizer, ids)
    assert tokenizer.offsets(tokenizer.encode("a\u4f60b")) == [
        (0, 1),
        (1, 2),
        (1, 2),
        (1, 2),
        (2, 3),
    ]


def test_hugging_face_markers_must_be_special_tokens_of_their_own(tmp_path: Path):
    folder = write_hugging_face_folder(tmp_path / "model", RESERVED)
    with pytest.raises(ValueError, match=r"no special token for \['<\|actor\|>'.*markers="):
        load_tokenizer(folder)
    with pytest.raises(ValueError, match="two turn markers share a token"):
        HuggingFaceTokenizer(folder, markers={**MARKERS, "<|user|>": "<|r1|>"})
    # "a" is a token, but any text can spell it.
    with pytest.raises(ValueError, match=r"no special token for \['<\|user\|>'\]"):
        HuggingFaceTokenizer(folder, markers={**MARKERS, "<|user|>": "a"})
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'megatron_binac\[hf\]'"):
        HuggingFaceTokenizer(tmp_path)
