"""Llama 2's chat format, token for token as Meta's code has it (meta-llama/llama, llama/generation.py).

Turns are told apart by the ids of begin and end tokens, which no text can make. The marks of instructions are plain
text, so text that holds them is refused: it could pass for somebody else's turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foretrace.llama.tokenizer import Tokenizer

Role = Literal["system", "user", "assistant"]
TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
_BEGIN, _END = TAGS[:2]
_BEGIN_SYSTEM, _END_SYSTEM = "<<SYS>>\n", "\n<</SYS>>\n\n"


@dataclass(frozen=True)
class Message:
    """Something that was said.

    Attributes:
        role: who said it.
        content: what was said.
    """

    role: Role
    content: str


class InjectionError(ValueError):
    """A message holds a mark of the chat format.

    Attributes:
        message: its place in the dialog, from 0.
        tag: the mark.
    """

    def __init__(self, message: int, tag: str) -> None:
        super().__init__(f"message {message} holds {tag}, which marks turns: take it out, or write it in another way")
        self.message, self.tag = message, tag


def dialog_tokens(tokenizer: Tokenizer, dialog: Sequence[Message]) -> list[int]:
    """The prompt for the answer to the last message of a dialog.

    Args:
        tokenizer: Llama's.
        dialog: a system message if wanted, then user and assistant by turns, the user last.

    Raises:
        InjectionError: if a message holds one of `TAGS`.
        ValueError: if roles have another order.
    """
    check_dialog(dialog)
    merged = _with_system(dialog)
    tokens: list[int] = []
    for user, answer in zip(merged[:-1:2], merged[1::2], strict=True):
        text = f"{_BEGIN} {user.content.strip()} {_END} {answer.content.strip()} "
        tokens += tokenizer.encode(text, bos=True, eos=True)
    return tokens + tokenizer.encode(f"{_BEGIN} {merged[-1].content.strip()} {_END}", bos=True)


def check_dialog(dialog: Sequence[Message]) -> None:
    """Refuse a dialog that `dialog_tokens` has no tokens for.

    Raises:
        InjectionError: if a message holds one of `TAGS`.
        ValueError: if roles have another order.
    """
    for place, message in enumerate(dialog):
        tag = next((tag for tag in TAGS if tag in message.content), None)
        if tag is not None:
            raise InjectionError(place, tag)
    roles = [message.role for message in dialog]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if len(turns) % 2 == 0 or any(role != ("user", "assistant")[at % 2] for at, role in enumerate(turns)):
        raise ValueError(f"roles are {', '.join(roles) or 'none'}: they must be (system) user assistant ... user")


def _with_system(dialog: Sequence[Message]) -> list[Message]:
    """The system's message as a part of the user's first one."""
    if dialog[0].role != "system":
        return list(dialog)
    system, first, *rest = dialog
    return [Message("user", f"{_BEGIN_SYSTEM}{system.content}{_END_SYSTEM}{first.content}"), *rest]
