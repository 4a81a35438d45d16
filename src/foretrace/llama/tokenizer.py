"""`Tokenizer`: SentencePiece BPE with Llama's settings: text to token ids and back.

Control tokens have ids only: no text becomes one of them, ``"<s>"`` is three ordinary characters.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from foretrace.llama.checkpoint.files import write_file
from foretrace.trace.reading import FormatError

UNK, BOS, EOS = 0, 1, 2
PAD = -1  # no token: padding is told apart by its place, never by an id that may also be predicted
SPACE = "▁"  # what SentencePiece writes for a space
_TELLTALE = " A  b\uff3b\ufb01 \u3000"  # spaces, and characters that normal forms replace
_LONGEST_LINE_BYTES = 1 << 20
_EACH_BYTE = "foretrace.each-byte"


@dataclass(frozen=True)
class Piece:
    """What an id stands for.

    Attributes:
        text: with `SPACE` for spaces; ``"<0x0A>"`` for a byte.
        score: the higher, the earlier it is merged.
        kind: ``"unknown"``, ``"control"``, ``"byte"`` or ``"normal"``.
    """

    text: str
    score: float
    kind: str


class Tokenizer:
    """A SentencePiece model.

    Args:
        model: the content of a ``tokenizer.model``.
        name: what errors call it.

    Raises:
        FormatError: if it is no such model, is cut off, or differs from Llama's in control tokens or
            normalization.
    """

    def __init__(self, model: bytes, name: str = "tokenizer") -> None:
        self.model = model
        self._processor = SentencePieceProcessor()
        try:
            is_loaded = bool(model) and self._processor.LoadFromSerializedProto(model)
        except RuntimeError:
            is_loaded = False
        if not is_loaded:
            raise FormatError(name, "is no SentencePiece model, or cut off", "take the tokenizer.model of the model")
        ids = (self._processor.unk_id(), self._processor.bos_id(), self._processor.eos_id())
        if ids != (UNK, BOS, EOS):
            raise FormatError(
                name, f"has unk, bos and eos at {ids}", f"Llama's are {(UNK, BOS, EOS)}: take its tokenizer.model"
            )
        if self._processor.normalize(_TELLTALE) != SPACE + _TELLTALE.replace(" ", SPACE):
            # So does a file that lost its end, where the settings of normalization stand.
            problem = "changes text before cutting it into pieces, which Llama's does not, or is cut off"
            raise FormatError(name, problem, "take its tokenizer.model")

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read a ``tokenizer.model``.

        Raises:
            FormatError: as above, or if it cannot be read.
        """
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise FormatError(str(path), error.strerror or str(error), "name a tokenizer.model") from None
        return cls(model, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Tokenizer:
        """Learn merges as Llama's were: BPE, bytes for what is not covered, digits one by one, no normalization.

        Args:
            texts: learned from line by line.
            vocabulary: tokens, of which 3 are for control and 256 are bytes.

        Raises:
            ValueError: if the texts have too many characters, or too few words, for that vocabulary.
        """
        written = io.BytesIO()
        try:
            SentencePieceTrainer.train(
                sentence_iterator=_lines(texts),
                model_writer=written,
                model_type="bpe",
                vocab_size=vocabulary,
                character_coverage=1.0 if vocabulary >= 4096 else 0.9995,  # few tokens: rare characters stay bytes
                byte_fallback=True,
                split_digits=True,
                allow_whitespace_only_pieces=True,
                remove_extra_whitespaces=False,
                normalization_rule_name="identity",
                unk_surface=" \u2047 ",
                max_sentence_length=_LONGEST_LINE_BYTES,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).rpartition("] ")[2] or str(error)
            raise ValueError(f"no tokenizer of {vocabulary} tokens can be made of these texts: {reason}") from None
        return cls(written.getvalue())

    def save(self, path: Path | str) -> None:
        """Write a ``tokenizer.model``, whole or not at all."""
        write_file(Path(path), self.model)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._processor.get_piece_size()

    def pieces(self) -> list[Piece]:
        """What each id stands for, in order."""
        processor = self._processor
        kinds = {"unknown": processor.is_unknown, "control": processor.is_control, "byte": processor.is_byte}
        found = []
        for token in range(self.size):
            kind = next((name for name, holds in kinds.items() if holds(token)), "normal")
            found.append(Piece(processor.id_to_piece(token), processor.get_score(token), kind))
        return found

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of a text, with the id of its begin or end around them if wanted.

        Raises:
            ValueError: if the text holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"character {error.start} of the text is half of a surrogate pair") from None
        return [*[BOS] * bos, *self._processor.encode(text), *[EOS] * eos]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; control tokens have none.

        Raises:
            ValueError: if an id is none of this tokenizer's.
        """
        self._check(tokens)
        return self._processor.decode(list(tokens))

    def stream(self, *, is_continuation: bool = False) -> TextStream:
        """Decode token by token.

        Args:
            is_continuation: a space at the begin belongs to the text.
        """
        return TextStream(self, is_continuation)

    def _check(self, tokens: Sequence[int]) -> None:
        wrong = next((token for token in tokens if not 0 <= token < self.size), None)
        if wrong is not None:
            raise ValueError(f"token {wrong} is none of the tokenizer's {self.size}")


class TextStream:
    """Decodes tokens as they come; no character is given before all its bytes are there.

    What `add` and `finish` give makes up what `Tokenizer.decode` gives for all tokens together.
    """

    def __init__(self, tokenizer: Tokenizer, is_continuation: bool) -> None:
        self._tokenizer = tokenizer
        self._processor = tokenizer._processor
        self._bytes = codecs.getincrementaldecoder("utf-8")(_EACH_BYTE)
        self._is_begin = not is_continuation

    def add(self, token: int) -> str:
        """The text that this token completes; empty if it is a part of a character.

        Raises:
            ValueError: if the id is none of the tokenizer's.
        """
        self._tokenizer._check([token])
        if self._processor.is_control(token):
            # Bytes of a character do not go on behind a control token.
            return self._take("", is_end=True)
        piece = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            self._is_begin = False
            return self._bytes.decode(bytes([int(piece[3:5], 16)]))
        if self._processor.is_unknown(token):
            return self._take(self._processor.decode([token]), is_end=True)
        if self._is_begin:
            piece = piece.removeprefix(SPACE)
            self._is_begin = False
        return self._take(piece.replace(SPACE, " "), is_end=True)

    def finish(self) -> str:
        """What is left of a character that was not completed."""
        return self._take("", is_end=True)

    def _take(self, text: str, *, is_end: bool) -> str:
        self._is_begin = self._is_begin and not text
        return self._bytes.decode(b"", final=is_end) + text


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (line for line in text.split("\n") if line)


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """A replacement character for each byte that is part of none, as SentencePiece does."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\N{REPLACEMENT CHARACTER}" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _each_byte)
