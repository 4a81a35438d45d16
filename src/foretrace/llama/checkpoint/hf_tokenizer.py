"""The tokenizer files of a Hugging Face checkpoint, made from ``tokenizer.model``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretrace.llama.checkpoint.files import to_json
from foretrace.llama.tokenizer import BOS, EOS, SPACE, UNK, Piece, Tokenizer

# What `chat.dialog_tokens` does, for servers that format chats themselves. Their tokenizers find control tokens in
# text, so these are refused too.
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- for tag in ['[INST]', '[/INST]', '<<SYS>>', '<</SYS>>', '<s>', '</s>', '<unk>'] -%}"
    "{%- if tag in message['content'] -%}"
    "{{ raise_exception('special tags are not allowed as part of the prompt') }}"
    "{%- endif -%}{%- endfor -%}{%- endfor -%}"
    "{%- for message in turns -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] not in ['user', 'assistant'] -%}"
    "{{ raise_exception('roles must be (system) user assistant user assistant ...') }}"
    "{%- endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{ bos_token + '[INST] ' + ((system if loop.first else '') + message['content']) | trim + ' [/INST]' }}"
    "{%- else -%}"
    "{{ ' ' + message['content'] | trim + ' ' + eos_token }}"
    "{%- endif -%}{%- endfor -%}"
)


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, bytes]:
    """Content by file name: ``tokenizer.model``, ``tokenizer.json``, and the two small ones beside them.

    Args:
        tokenizer: to be written.
        context: the model's longest sequence.
    """
    pieces = tokenizer.pieces()
    names = {"unk_token": pieces[UNK].text, "bos_token": pieces[BOS].text, "eos_token": pieces[EOS].text}
    config = {
        # Of transformers 5, LlamaTokenizer would put no space in front of text that begins with one.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": True,
        "clean_up_tokenization_spaces": False,
        "legacy": True,  # a space in front of text behind a control token too, as Meta's code has
        "padding_side": "left",
        "pad_token": pieces[UNK].text,
        "sp_model_kwargs": {},
        "added_tokens_decoder": {str(token): _added_token(piece.text) for token, piece in enumerate(pieces[: EOS + 1])},
        "chat_template": CHAT_TEMPLATE,
        **names,
    }
    return {
        "tokenizer.model": tokenizer.model,
        "tokenizer.json": to_json(_fast(pieces)),
        "tokenizer_config.json": to_json(config),
        "special_tokens_map.json": to_json({**names, "pad_token": pieces[UNK].text}),
    }


def _added_token(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **flags, "special": True}


def _fast(pieces: Sequence[Piece]) -> dict[str, Any]:
    """The document of the ``tokenizers`` library."""
    bos = pieces[BOS].text
    start, a, b = ({"SpecialToken": {"id": bos, "type_id": 0}}, *({"Sequence": {"id": i, "type_id": 0}} for i in "AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, **_added_token(pieces[token].text)} for token in (UNK, BOS, EOS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, a],
            "pair": [start, a, {"SpecialToken": {"id": bos, "type_id": 1}}, b],
            "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": pieces[UNK].text,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece.text: token for token, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges(pieces)],
        },
    }


def merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Pairs in the order in which BPE merges them: SentencePiece keeps their results alone, with a score.

    Of one result all ways to make it are given, since which of them the text offers is not known.
    """
    normal = {piece.text: token for token, piece in enumerate(pieces) if piece.kind == "normal"}
    found: list[tuple[float, int, int, str, str]] = []
    for whole, token in normal.items():
        for at in range(1, len(whole)):
            left, right = whole[:at], whole[at:]
            if left in normal and right in normal:
                found.append((-pieces[token].score, normal[left], normal[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
