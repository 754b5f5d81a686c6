"""Text to token ids and back. Turn markers are ids that no text can spell.

Ids go from here to the engine and from the engine to the loss; sampled ids are decoded for graders
and never encoded again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
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
    """The `tokenizer.json` of a local model folder, with its chat template where it has one.

    A chat model needs no turn markers: its prompts are made by `algo.chat_prompts`, and what it
    calls the end of a text ends a turn.

    Example: ``HuggingFaceTokenizer("llama", markers={"<|user|>": "<|reserved_0|>", ...})``
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        markers: Mapping[str, str] | None = None,
        pad: str | None = None,
    ) -> None:
        """Load a folder; ValueError where a turn marker has no token and there is no template.

        `markers` names a special token of the vocabulary for each of `TURN_PIECES` that it lacks;
        reserved tokens do well. `pad` names the padding token, by default the model's own, else the
        one that ends a turn.
        """
        self.folder = Path(folder)
        self.path = self.folder / "tokenizer.json"
        self._backend: Any = _load_tokenizers(self.path)
        self._about = _read_json(self.folder / "tokenizer_config.json")
        self._template = _chat_template(self.folder, self._about)
        self._markers = {piece: (markers or {}).get(piece, piece) for piece in TURN_PIECES}
        special = {
            t.content for t in self._backend.get_added_tokens_decoder().values() if t.special
        }
        missing = sorted(p for p, token in self._markers.items() if token not in special)
        self.is_chat = bool(missing) and markers is None and self._template is not None
        """Turns are made by the chat template, not by markers."""
        if missing and not self.is_chat:
            raise ValueError(
                f"{self.path} has no special token for {missing}; "
                f"pass markers={{piece: token}} with tokens among {sorted(special)[:8]} ..."
            )
        if self.is_chat:
            end = _content(self._about.get("eos_token"))
            if end is None:
                raise ValueError(
                    f"{self.folder} has a chat template and no eos_token in tokenizer_config.json; "
                    "name the token that ends a turn there"
                )
            self._markers = {END: end}
        elif len(set(self._markers.values())) < len(self._markers):
            raise ValueError(f"two turn markers share a token: {self._markers}; give each its own")
        # Special tokens that a text spells are plain text to us.
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self.end_id = self.token_id(END)
        pad = pad or _content(self._about.get("pad_token"))
        self.pad_id = self.end_id if pad is None else self._id(pad)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_id(self, piece: str) -> int:
        return self._id(self._markers.get(piece, piece))

    def encode_markup(self, text: str) -> list[int]:
        """Ids of a piece of the chat template: what spells a special token is that token."""
        return self._markup.encode(text, add_special_tokens=False).ids

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation in the model's chat template, up to where its answer begins.

        Messages are {"role": ..., "content": ...}. ValueError where there is no template or it
        refuses them. A template that asks for today's date is given none: a run that is resumed on
        another day must ask the same.
        """
        if self._template is None:
            raise ValueError(f"{self.folder} has no chat template")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: _content(self._about.get(name)) for name in names}
        tokens = {name: token for name, token in tokens.items() if token is not None}
        return _render(self._template, messages, tokens)

    @cached_property
    def _markup(self) -> Any:
        backend = _load_tokenizers(self.path)
        backend.no_padding()
        backend.no_truncation()
        return backend

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


def _load_tokenizers(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise ImportError(
            "a Hugging Face tokenizer needs the package tokenizers; "
            "pip install 'megatron_binac[hf]'"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; give a folder that holds a tokenizer.json")
    return Backend.from_file(str(path))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """The text of a special token, which a config has as a string or as an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def _chat_template(folder: Path, about: Mapping[str, Any]) -> str | None:
    """The template of a folder: a file of its own, or a field of tokenizer_config.json."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    found = about.get("chat_template")
    if isinstance(found, list):  # several by name
        return next((t["template"] for t in found if t["name"] == "default"), None)
    return found


def _render(template: str, messages: Sequence[Mapping[str, str]], tokens: dict[str, str]) -> str:
    """Fill in a chat template, which may compute and loop but reach nothing else."""
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            "a chat template needs the package jinja2; pip install 'megatron_binac[hf]'"
        ) from error

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    given = {"messages": [dict(m) for m in messages], "add_generation_prompt": True, **tokens}
    try:
        return environment.from_string(template).render(**given)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error


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
