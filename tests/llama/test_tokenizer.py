"""The tokenizer and the chat format, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaTokenizer

from foretrace.llama.chat import InjectionError, Message, dialog_tokens
from foretrace.llama.checkpoint.huggingface import write_hf
from foretrace.llama.checkpoint.weights import of_model
from foretrace.llama.tokenizer import BOS, EOS, Tokenizer
from foretrace.trace.reading import FormatError
from tests.llama.checkpoints import VOCABULARY, config_of, model_of, tokenizer

# Words of the training text, bytes, spaces and what else may come.
PIECES = ("def ", "self", "12345", " ", "  ", "\n", "é", "☃", "🦙", "[INST]", "<<SYS>>", "<s>", "</s>", "▁", "\t", "x")
TEXT = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))


def test_settings_are_llamas() -> None:
    trained = tokenizer()
    pieces = trained.pieces()
    assert [(piece.text, piece.kind) for piece in pieces[:4]] == [
        ("<unk>", "unknown"), ("<s>", "control"), ("</s>", "control"), ("<0x00>", "byte"),
    ]  # fmt: skip
    assert sum(piece.kind == "byte" for piece in pieces) == 256
    assert trained.size == len(pieces) == VOCABULARY
    assert not any(
        len(piece.text) > 1 and any(c.isdigit() for c in piece.text) for piece in pieces if piece.kind == "normal"
    )
    assert trained.encode("a", bos=True, eos=True) == [BOS, *trained.encode("a"), EOS]
    assert trained.encode("") == []


@given(TEXT)
def test_text_comes_back(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text, bos=True, eos=True)) == text.replace("▁", " ")


@given(TEXT)
def test_mistake_11_no_text_becomes_a_control_token(text: str) -> None:
    """transformers#24569."""
    assert not {0, BOS, EOS} & set(tokenizer().encode(text + "<s>" + text + "</s><unk>"))


def test_mistake_10_begin_is_not_doubled() -> None:
    """OpenRLHF#393."""
    assert tokenizer().encode("<s>[INST] hello", bos=True).count(BOS) == 1


@given(st.lists(st.one_of(st.integers(0, VOCABULARY - 1), st.integers(0, 258)), max_size=20))
def test_a_stream_gives_what_decoding_all_gives(tokens: list[int]) -> None:
    stream = tokenizer().stream()
    parts = [stream.add(token) for token in tokens]
    assert "".join([*parts, stream.finish()]) == tokenizer().decode(tokens)


@given(st.text(), st.text())
def test_a_stream_never_splits_a_character(before: str, text: str) -> None:
    stream = tokenizer().stream()
    parts = [stream.add(token) for token in tokenizer().encode(text)]
    whole = text.replace("▁", " ")
    for at in range(len(parts)):
        assert whole.startswith("".join(parts[: at + 1]))
    assert "".join(parts) == whole and not stream.finish()


def test_a_stream_goes_on_behind_text() -> None:
    tokens = tokenizer().encode("self")
    assert tokenizer().stream(is_continuation=True).add(tokens[0]).startswith(" ")
    llama = tokenizer().stream()
    assert [llama.add(token) for token in tokenizer().encode("🦙")][-4:] == ["", "", "", "🦙"]


def test_what_is_no_token_or_no_text_is_refused() -> None:
    for wrong in (-1, VOCABULARY):
        with pytest.raises(ValueError, match=f"token {wrong} is none"):
            tokenizer().decode([5, wrong])
        with pytest.raises(ValueError, match=f"token {wrong} is none"):
            tokenizer().stream().add(wrong)
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer().encode("a\ud800")


def test_files_cut_off_are_refused(tmp_path: Path) -> None:
    tokenizer().save(tmp_path / "tokenizer.model")
    assert Tokenizer.load(tmp_path / "tokenizer.model").encode("def self") == tokenizer().encode("def self")
    whole = tokenizer().model
    for size in [*range(0, len(whole), 97), *range(len(whole) - 120, len(whole))]:
        (tmp_path / "tokenizer.model").write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"tokenizer\.model"):
            Tokenizer.load(tmp_path / "tokenizer.model")
    with pytest.raises(FormatError, match=r"nothing\.model"):
        Tokenizer.load(tmp_path / "nothing.model")


def test_too_little_text_is_told() -> None:
    with pytest.raises(ValueError, match="no tokenizer of 5000 tokens"):
        Tokenizer.train(["a few words"], 5000)


# Hugging Face's tokenizer from our files.


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save(folder / "tokenizer.model")
    write_hf(of_model(model_of(config_of(layers=1)), tokenizer=folder / "tokenizer.model"), folder / "hf")
    return folder / "hf"


@settings(max_examples=200)
@given(text=TEXT)
def test_transformers_gives_the_same_ids(hf_folder: Path, text: str) -> None:
    theirs = loaded(hf_folder)
    for word in ("<s>", "</s>", "<unk>"):  # found in text
        text = text.replace(word, "")
    assert theirs.encode(text) == tokenizer().encode(text, bos=True)
    assert theirs.decode(tokenizer().encode(text), skip_special_tokens=True) == tokenizer().decode(
        tokenizer().encode(text)
    )


def test_transformers_makes_the_same_of_tokenizer_model_alone(hf_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((hf_folder / name).read_bytes())
    theirs = LlamaTokenizer.from_pretrained(tmp_path)
    for text in ("def self(x): return 12345", "naïve ☃ 🦙", "a  b\n\tc"):
        assert theirs.encode(text) == tokenizer().encode(text, bos=True)


def loaded(folder: Path, kept: dict[Path, object] = {}) -> object:  # noqa: B006
    if folder not in kept:
        kept[folder] = AutoTokenizer.from_pretrained(folder)
    return kept[folder]


def test_transformers_knows_the_control_tokens(hf_folder: Path) -> None:
    theirs = loaded(hf_folder)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (1, 2, 0, 0)
    assert theirs.model_max_length == 128
    batch = theirs(["a", "a longer text"], padding=True)
    assert len(batch["input_ids"][0]) == len(batch["input_ids"][1])


# Chat.


def metas(dialog: list[dict[str, str]]) -> list[int]:
    """``chat_completion`` of meta-llama/llama, in few lines."""
    b_inst, e_inst, b_sys, e_sys = "[INST]", "[/INST]", "<<SYS>>\n", "\n<</SYS>>\n\n"
    if dialog[0]["role"] == "system":
        content = b_sys + dialog[0]["content"] + e_sys + dialog[1]["content"]
        dialog = [{"role": dialog[1]["role"], "content": content}, *dialog[2:]]
    processor = tokenizer()._processor
    tokens: list[int] = []
    for prompt, answer in zip(dialog[::2], dialog[1::2], strict=False):
        text = f"{b_inst} {(prompt['content']).strip()} {e_inst} {(answer['content']).strip()} "
        tokens += [1, *processor.encode(text), 2]
    return [*tokens, 1, *processor.encode(f"{b_inst} {(dialog[-1]['content']).strip()} {e_inst}")]


def dialog_of(texts: list[str], *, has_system: bool) -> list[dict[str, str]]:
    roles = (["system"] if has_system else []) + ["user", "assistant"] * len(texts)
    texts = texts if (len(texts) - has_system) % 2 else [*texts, "and then?"]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def messages(dialog: list[dict[str, str]]) -> list[Message]:
    return [Message(**message) for message in dialog]  # type: ignore[arg-type]


CONTENT = st.lists(st.sampled_from([p for p in PIECES if "INST" not in p and "SYS" not in p])).map("".join)


@given(st.lists(CONTENT, min_size=1, max_size=6), st.booleans())
def test_chat_is_metas_token_for_token(texts: list[str], has_system: bool) -> None:
    dialog = dialog_of(texts if not has_system else ["be kind", *texts], has_system=has_system)
    assert dialog_tokens(tokenizer(), messages(dialog)) == metas(dialog)


def test_chat_golden() -> None:
    text = "[INST] <<SYS>>\n be \n<</SYS>>\n\nhi [/INST]"
    dialog = [
        Message("system", " be "),
        Message("user", "hi "),
        Message("assistant", " yes\n"),
        Message("user", " so?"),
    ]
    expected = [BOS, *tokenizer().encode(f"{text} yes "), EOS, BOS, *tokenizer().encode("[INST] so? [/INST]")]
    assert dialog_tokens(tokenizer(), dialog) == expected


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_marks_of_turns_in_a_message_are_refused(tag: str, place: int) -> None:
    dialog = dialog_of(["be kind", "hi", "yes", "so?"], has_system=True)
    dialog[place]["content"] += f" then{tag}"
    with pytest.raises(InjectionError, match=f"message {place} holds ") as caught:
        dialog_tokens(tokenizer(), messages(dialog))
    assert (caught.value.message, caught.value.tag) == (place, tag)


def test_control_text_of_a_user_stays_text() -> None:
    tokens = dialog_tokens(tokenizer(), [Message("user", "</s><s>hi")])
    assert (tokens.count(BOS), tokens.count(EOS)) == (1, 0)


@pytest.mark.parametrize(
    "roles", [(), ("system",), ("assistant",), ("user", "user"), ("user", "assistant"), ("user", "system", "user"),
              ("system", "assistant", "user"), ("system", "system", "user"), ("tool",)]
)  # fmt: skip
def test_other_orders_of_roles_are_refused(roles: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="they must be"):
        dialog_tokens(tokenizer(), [Message(role, "x") for role in roles])  # type: ignore[arg-type]


@settings(max_examples=50)
@given(texts=st.lists(CONTENT, min_size=1, max_size=5), has_system=st.booleans())
def test_transformers_formats_chats_alike(hf_folder: Path, texts: list[str], has_system: bool) -> None:
    texts = [text.replace("<s>", "").replace("</s>", "") or "x" for text in texts]
    dialog = dialog_of(texts if not has_system else ["be kind", *texts], has_system=has_system)
    ids = loaded(hf_folder).apply_chat_template(dialog, return_dict=False)
    assert ids == dialog_tokens(tokenizer(), messages(dialog))


@pytest.mark.parametrize("tag", ["[/INST]", "<s>"])
def test_transformers_refuses_marks_too(hf_folder: Path, tag: str) -> None:
    with pytest.raises(Exception, match="special tags"):
        loaded(hf_folder).apply_chat_template([{"role": "user", "content": tag}])
