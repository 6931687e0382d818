"""The GPT-2 example's text: read without importing, split by document, equal on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt2"
sys.path.insert(0, str(EXAMPLE))

import data as demo_data  # noqa: E402


@pytest.fixture(scope="module")
def corpus() -> demo_data.Corpus:
    return demo_data.load_corpus()


def test_own_prose_is_enough_and_is_prose(corpus: demo_data.Corpus) -> None:
    assert corpus.train.numel() > 500_000
    assert corpus.val.numel() > 20_000
    assert 0.02 < corpus.val.numel() / corpus.train.numel() < 0.12
    text = demo_data.decode(corpus.train)
    assert " the " in text
    assert text.count(" the ") > 5000


def test_reading_twice_gives_the_same_bytes(corpus: demo_data.Corpus) -> None:
    again = demo_data.load_corpus()
    assert again.sha256 == corpus.sha256
    assert torch.equal(again.val, corpus.val)


def test_split_is_by_document_and_drops_repeats() -> None:
    documents = [f"document {i} " + "with enough words to be kept " * 3 for i in range(400)]
    train, val = demo_data.split_documents(documents + documents[:50])
    assert len(train) + len(val) == 400
    assert not set(train) & set(val)
    assert 5 <= len(val) <= 45
    # Neither the order nor the neighbours of a document decide its side.
    train_of_half, val_of_half = demo_data.split_documents(documents[200:][::-1])
    assert set(val_of_half) <= set(val)
    assert set(train_of_half) <= set(train)


def test_docstrings_are_found_without_importing(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        '"""Module."""\nraise SystemExit("must never run")\n'
        "class A:\n    'Class.'\n    async def f(self):\n        '''Method.\n\n        More.'''\n"
        "if True:\n    def g():\n        'Nested.'\n"
        "else:\n    def h():\n        'Else.'\n"
        "x = 'not a docstring'\n"
    )
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""\n')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text('"""Skipped."""\n')
    found = demo_data.read_standard_library(tmp_path)
    assert found == ["Module.", "Class.", "Method.\n\nMore.", "Nested.", "Else."]


def test_without_topics_the_docstrings_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert demo_data.read_topics() == []
    assert demo_data.load_corpus().train.numel() > 300_000


def test_any_file_can_be_the_text(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"Paragraph {i}: " + "word " * 40 for i in range(500)))
    corpus = demo_data.load_corpus(path)
    assert corpus.val.numel() >= 1024
    # Nothing is lost but repeated separators and the blanks around documents.
    both = demo_data.decode(corpus.train) + demo_data.decode(corpus.val)
    assert all(f"Paragraph {i}:" in both for i in range(500))


def test_too_short_a_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Too short.")
    with pytest.raises(ValueError, match=r"short\.txt.*at least 1024"):
        demo_data.load_corpus(path)


def test_batches_follow_the_text_and_the_seed(corpus: demo_data.Corpus) -> None:
    batches = demo_data.Batches(corpus.train, batch_size=3, context=16, seed=1)
    tokens, targets = batches.next()
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    same, _ = demo_data.Batches(corpus.train, 3, 16, seed=1).next()
    other, _ = demo_data.Batches(corpus.train, 3, 16, seed=2).next()
    assert torch.equal(same, tokens)
    assert not torch.equal(other, tokens)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_validation_covers_the_text_whatever_the_ranks(dp_size: int) -> None:
    data = (torch.arange(4096) % 251).to(torch.uint8)
    starts = []
    for rank in range(dp_size):
        batches = demo_data.validation_batches(data, 2, 32, 100, rank, dp_size)
        assert len(batches) == 4096 // 32 // (2 * dp_size)
        for tokens, targets in batches:
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            starts += [tuple(row.tolist()) for row in tokens]
    expected = demo_data.validation_batches(data, 2, 32, 100, 0, 1)
    assert sorted(starts) == sorted(tuple(r.tolist()) for t, _ in expected for r in t)


def test_validation_of_a_short_text_still_gives_each_rank_a_batch() -> None:
    data = torch.arange(40, dtype=torch.uint8)
    for rank in range(4):
        assert len(demo_data.validation_batches(data, 2, 16, 8, rank, 4)) == 1


def test_text_survives_tokens() -> None:
    text = "Grüße, 世界"
    assert demo_data.decode(demo_data.encode(text)[0]) == text
    assert demo_data.encode("").tolist() == [[demo_data.END_OF_DOCUMENT]]
