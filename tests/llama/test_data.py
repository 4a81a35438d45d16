"""Token stores and packed rows: every token is trained on once an epoch, and a row is found from its number."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.llama.data.packing import PackedRows
from foretrace.llama.data.store import TokenStore, read_store, write_store
from foretrace.trace import FormatError


def store_of(documents: list[list[int]], vocabulary: int = 1 << 20) -> TokenStore:
    starts = np.concatenate(([0], np.cumsum([len(document) for document in documents]))).astype(np.int64)
    return TokenStore(np.array([t for d in documents for t in d], np.uint32), starts, vocabulary)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents in which no token is there twice."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 3), st.integers(0, 2))
def test_every_pair_of_neighbors_is_trained_once_an_epoch(
    lengths: list[int], length: int, seed: int, epoch: int
) -> None:
    documents = numbered(lengths)
    pairs = sum(lengths) - len(lengths)
    if pairs < length:
        with pytest.raises(FormatError, match="a row takes"):
            PackedRows(store_of(documents), length, seed)
        return
    rows = PackedRows(store_of(documents), length, seed)
    document_of = {token: number for number, document in enumerate(documents) for token in document}
    seen: Counter[int] = Counter()
    for number in range(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch):
        tokens, targets, pieces = rows.row(number)
        assert sum(pieces) == length
        np.testing.assert_array_equal(targets, tokens + 1)  # the one behind it
        begin = 0
        for piece in pieces:
            mine = tokens[begin : begin + piece]
            assert len({document_of[int(token)] for token in (*mine, targets[begin + piece - 1])}) == 1
            np.testing.assert_array_equal(mine, np.arange(mine[0], mine[0] + piece))
            begin += piece
        seen.update(tokens.tolist())
    assert max(seen.values()) == 1
    assert len(seen) == rows.rows_per_epoch * length > pairs - length


def test_epochs_differ_in_their_order_and_seeds_too() -> None:
    store = store_of(numbered([20] * 30))
    orders = [
        [PackedRows(store, 19, seed).row(30 * epoch + row)[0].tolist() for row in range(30)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] and orders[0] != orders[2]
    assert sorted(map(tuple, orders[0])) == sorted(map(tuple, orders[1])) == sorted(map(tuple, orders[2]))


def test_a_batch_is_its_rows_and_their_documents() -> None:
    rows = PackedRows(store_of(numbered([5, 9, 14, 3, 7])), 8)
    batch = rows.batch(range(1, 4))
    assert batch.tokens_BT.shape == batch.targets_BT.shape == (3, 8)
    assert int(batch.lengths.sum()) == batch.num_targets() == 24
    assert batch.tokens_BT[1].tolist() == rows.row(2)[0].tolist()


@given(st.lists(st.lists(st.integers(0, 299), max_size=20), min_size=1, max_size=10), st.sampled_from([300, 1 << 17]))
@settings(max_examples=30, deadline=None)
def test_stores_hold_what_was_written(documents: list[list[int]], vocabulary: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        filled = [document for document in documents if document]
        if not filled:
            with pytest.raises(FormatError, match="no document with text"):
                write_store(path, documents, vocabulary)
            assert not list(Path(folder).iterdir())  # nothing is left behind
            return
        write_store(path, iter(documents), vocabulary, "abc")
        store = read_store(path)
        assert [store.document(i).tolist() for i in range(store.num_documents)] == filled
        assert (store.vocabulary, store.tokenizer) == (vocabulary, "abc")
        assert store.tokens.dtype == (np.uint16 if vocabulary == 300 else np.uint32)


def test_a_store_is_complete_or_absent(tmp_path: Path) -> None:
    def broken() -> object:
        yield [1, 2, 3]
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_store(tmp_path / "store", broken(), 10)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    write_store(tmp_path / "store", [[1, 2]], 10)
    with pytest.raises(FormatError, match="it exists already"):
        write_store(tmp_path / "store", [[3]], 10)
    with pytest.raises(RuntimeError):
        write_store(tmp_path / "store", broken(), 10, overwrite=True)  # type: ignore[arg-type]
    assert read_store(tmp_path / "store").document(0).tolist() == [1, 2]


@pytest.mark.parametrize("token", [10, -1])
def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(FormatError, match="the vocabulary has the ids 0 to 9"):
        write_store(tmp_path / "store", [[1], [2, token]], 10)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokens.bin", b"\x01\x00\x02", "3 bytes, its documents have 4"),
        ("tokens.bin", None, "cannot be read"),
        ("starts.npy", b"\x93NUMPY", "cannot be read"),
        ("store.json", b"{", "no description of a token store"),
        ("store.json", b"[]", "no description of a token store"),
        ("store.json", None, "No such file"),
        ("store.json", json.dumps({"version": 9, "vocabulary": 5, "dtype": "uint16"}).encode(), "version 9"),
    ],
)
def test_broken_stores_are_refused_by_file(tmp_path: Path, file: str, content: bytes | None, problem: str) -> None:
    write_store(tmp_path / "store", [[1, 2]], 10)
    if content is None:
        (tmp_path / "store" / file).unlink()
    else:
        (tmp_path / "store" / file).write_bytes(content)
    with pytest.raises(FormatError, match=problem) as caught:
        read_store(tmp_path / "store")
    assert "foretrace llama tokenize" in str(caught.value)


def test_documents_that_do_not_lie_one_behind_the_other_are_refused(tmp_path: Path) -> None:
    write_store(tmp_path / "store", [[1, 2]], 10)
    np.save(tmp_path / "store" / "starts.npy", np.array([0, 2, 1]))
    with pytest.raises(FormatError, match="one behind the other"):
        read_store(tmp_path / "store")
