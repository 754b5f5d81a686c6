"""Text to token ids and back. Turn markers are ids that no text can spell.

Ids go from here to the engine and from the engine to the loss; sampled ids are decoded for graders
and never encoded again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

USER, ACTOR, CRITIC, END = "<|user|>", "<|actor|>", "<|critic|>", "<|end|>"
TURN_PIECES = (USER, ACTOR, CRITIC, END)
PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
SPACE = "\u2581"
"""SentencePiece's sign for a space, which a text may hold as well."""


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    vocab_size: int
    """Number of ids; the model may pad its embedding above it."""
    end_id: int
    """Ends a turn."""
    pad_id: int
    """Fills up a batch; never sampled, never a target."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Characters that spell a turn marker are text, not the marker."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of any ids; markers show as their own characters, broken UTF-8 as U+FFFD."""
        ...

    def token_id(self, piece: str) -> int:
        """Id of a turn marker; ValueError where the vocabulary has no such piece."""
        ...

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Characters [start, end) of `decode(ids)` by id; ids that share one overlap."""
        ...


class SentencePieceTokenizer:
    """A SentencePiece model: bytes for rare characters, single digits, an exact round trip.

    Example: ``SentencePieceTokenizer.train(texts, "run/tokenizer.model", vocab_size=320)``
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Load a model file; FileNotFoundError or ValueError where it is missing or not one."""
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"there is no tokenizer at {path}; give the path of a SentencePiece .model file, "
                "or set task.tokenizer to null to train one"
            )
        self.path = Path(path)
        self._processor = _load_sentencepiece(self.path.read_bytes(), self.path)
        self.vocab_size: int = self._processor.get_piece_size()
        self._bytes: list[bytes] = [self._bytes_of(i) for i in range(self.vocab_size)]
        self.end_id = self.token_id(END)
        self.pad_id: int = self._processor.pad_id()
        if self.pad_id < 0:
            raise ValueError(
                f"{path} has no padding id; train it with SentencePieceTokenizer.train"
            )
        self._space_sign = [self._processor.piece_to_id(f"<0x{b:02X}>") for b in SPACE.encode()]

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        path: str | os.PathLike[str],
        *,
        vocab_size: int,
        specials: Sequence[str] = TURN_PIECES,
    ) -> SentencePieceTokenizer:
        """Train a BPE vocabulary on `texts`, write it to `path` and load it.

        The same texts give the same file, byte for byte. Where they hold too few pairs to merge,
        the vocabulary stays smaller than asked. ValueError where it cannot hold their characters.
        """
        # Sorted and without doubles: the order in which texts came must not show in the model.
        sentences = sorted({line for text in texts for line in text.splitlines() if line})
        if not sentences:
            raise ValueError("got no text to train a tokenizer on; check the task's train split")
        # 256 bytes, padding, unknown and the specials take their place before any character does.
        characters = {c for line in sentences for c in line} | {SPACE}
        least = 256 + 2 + len(specials) + len(characters)
        if vocab_size < least:
            raise ValueError(
                f"vocab_size is {vocab_size}, but bytes, markers and the {len(characters)} "
                f"characters of the texts need {least}; raise task.vocab_size"
            )
        model = _train_sentencepiece(sentences, vocab_size, specials)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_bytes(model)
        partial.replace(target)
        return cls(target)

    def encode(self, text: str) -> list[int]:
        parts = text.split(SPACE)
        ids: list[int] = []
        for i, part in enumerate(parts):
            # Taken by itself: the library would read the sign as the space that it stands for.
            ids += self._space_sign if i else []
            ids += self._processor.encode(part) if part else []
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", errors="replace")

    def token_id(self, piece: str) -> int:
        found: int = self._processor.piece_to_id(piece)
        if self._processor.id_to_piece(found) != piece:
            raise ValueError(
                f"the vocabulary of {self.path} has no piece {piece!r}; "
                f"train it with specials={TURN_PIECES}"
            )
        return found

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        return _byte_offsets([self._bytes[i] for i in ids])

    def _bytes_of(self, token: int) -> bytes:
        piece: str = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return piece.encode()
        return piece.replace(SPACE, " ").encode()


class HuggingFaceTokenizer:
    """The `tokenizer.json` of a local model folder.

    Example: ``HuggingFaceTokenizer("llama", markers={"<|user|>": "<|reserved_0|>", ...})``
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        markers: Mapping[str, str] | None = None,
        pad: str | None = None,
    ) -> None:
        """Load a folder; ValueError where a turn marker has no token.

        `markers` names a special token of the vocabulary for each of `TURN_PIECES` that it lacks;
        reserved tokens do well. `pad` names the padding token, by default the end marker's.
        """
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ImportError(
                "a Hugging Face tokenizer needs the package tokenizers; "
                "pip install 'megatron_binac[tasks]'"
            ) from error
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no {path}; give a folder that holds a tokenizer.json"
            )
        self.path = path
        self._backend: Any = Backend.from_file(str(path))
        self._markers = {piece: (markers or {}).get(piece, piece) for piece in TURN_PIECES}
        special = {
            t.content for t in self._backend.get_added_tokens_decoder().values() if t.special
        }
        missing = sorted(p for p, token in self._markers.items() if token not in special)
        if missing:
            raise ValueError(
                f"{path} has no special token for {missing}; "
                f"pass markers={{piece: token}} with tokens among {sorted(special)[:8]} ..."
            )
        if len(set(self._markers.values())) < len(self._markers):
            raise ValueError(f"two turn markers share a token: {self._markers}; give each its own")
        # Special tokens that a text spells are plain text to us.
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self.end_id = self.token_id(END)
        self.pad_id = self.end_id if pad is None else self._id(pad)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_id(self, piece: str) -> int:
        return self._id(self._markers.get(piece, piece))

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        # By growing prefixes, since decoders differ: quadratic, for turns and not for documents.
        ends = [len(self.decode(ids[: i + 1]).rstrip("\ufffd")) for i in range(len(ids))]
        total = len(self.decode(ids))
        spans, start = [], 0
        for end in ends:
            # A token inside a character of several bytes shares that character.
            spans.append((start, max(end, min(start + 1, total))))
            start = max(start, end)
        return spans

    def _id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(f"the vocabulary of {self.path} has no token {token!r}")
        return found


def load_tokenizer(path: str | os.PathLike[str]) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """The tokenizer at `path`: a folder with a tokenizer.json, or a SentencePiece model file."""
    return HuggingFaceTokenizer(path) if Path(path).is_dir() else SentencePieceTokenizer(path)


def _train_sentencepiece(
    sentences: Sequence[str], vocab_size: int, specials: Sequence[str]
) -> bytes:
    """The bytes of a BPE model whose decode(encode(text)) is text."""
    import sentencepiece

    model = BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            # Control symbols are never made from text, unlike user-defined ones.
            control_symbols=list(specials),
            pad_id=0,
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            pad_piece=PAD,
            unk_piece=UNKNOWN,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            character_coverage=1.0,
            split_digits=True,
            max_sentence_length=1 << 20,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Few words have few pairs to merge, and the library wants to be told their number.
        found = re.search(r"Vocabulary size too high .* a value <= (\d+)", str(error))
        if found is None or int(found[1]) >= vocab_size:
            raise
        return _train_sentencepiece(sentences, int(found[1]), specials)
    return model.getvalue()


def _load_sentencepiece(model: bytes, path: Path) -> Any:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    return processor


def _byte_offsets(pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """Characters of the joint text that each piece of bytes lies in."""
    data = b"".join(pieces)
    start_of_byte: list[int] = []
    position = num_characters = 0
    while position < len(data):
        # One decoding step at a time, as "replace" counts broken bytes in its own way.
        length = next(
            (n for n in range(1, 5) if _is_character(data[position : position + n])), None
        )
        if length is None:
            length = _broken_length(data[position : position + 4])
        start_of_byte += [num_characters] * length
        num_characters += 1
        position += length
    start_of_byte.append(num_characters)
    spans, position = [], 0
    for piece in pieces:
        end = position + len(piece)
        last = start_of_byte[end - 1] + 1 if piece else start_of_byte[position]
        spans.append((start_of_byte[position], last))
        position = end
    return spans


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def _broken_length(data: bytes) -> int:
    """Bytes that one U+FFFD stands for at the start of `data`."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return max(1, error.end - error.start)
    return len(data)
