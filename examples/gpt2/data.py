"""Text for the GPT-2 example: real English that every Python installation carries.

Documents are the language reference of ``pydoc_data.topics`` and the docstrings of the
standard library, read with ``ast`` and never imported. ``--data FILE`` takes any other
text. Tokens are bytes, so the loss is nats per byte. Next: train.py.

    python examples/gpt2/data.py FOLDER [--data FILE]   # train.bin, val.bin for programs in C++
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib.util
import inspect
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY_SIZE = 256
END_OF_DOCUMENT = 0  # A byte that text never holds; it separates the documents.
VALIDATION_SHARE = 20  # One document in so many is kept for validation.
MIN_DOCUMENT_BYTES = 60  # "See base class." teaches nothing.

# Tests are not prose; the others are vendored or generated; none is needed.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__",
     "turtledemo", "pydoc_data", "ensurepip"}
)  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """Bytes of the documents, cut into training and validation by document.

    Attributes:
        train: uint8 [num_train_bytes].
        val: uint8 [num_val_bytes].
        num_documents: In both parts together.
        sha256: Of the training bytes followed by the validation bytes.
    """

    train: Tensor
    val: Tensor
    num_documents: int
    sha256: str

    def describe(self) -> str:
        """One line for the log: the same text on every rank and machine with this Python."""
        return (
            f"{self.num_documents:,} documents, {self.train.numel() / 1e6:.2f} MB to train and "
            f"{self.val.numel() / 1e6:.2f} MB to validate, sha256 {self.sha256[:12]}"
        )


def read_topics() -> list[str]:
    """The language reference behind ``help("for")``; empty where Python comes without it."""
    if importlib.util.find_spec("pydoc_data") is None:
        return []
    try:
        from pydoc_data.topics import topics
    except ImportError:  # Some distributions strip the module and keep the package.
        return []
    return [topics[name] for name in sorted(topics)]


def find_sources(root: Path) -> list[Path]:
    """All Python files under `root` that hold prose, in one order on every machine."""
    return sorted(
        path
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1])
    )


def docstrings_of(source: str) -> Iterator[str]:
    """Docstrings of the module, its classes and functions, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Invalid escapes in old files are not our concern.
        tree = ast.parse(source)
    # Statements only: docstrings never sit inside expressions, which are most of the nodes.
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield inspect.cleandoc(text)
        for field in ("orelse", "body"):
            stack.extend(reversed(getattr(node, field, None) or []))


def read_standard_library(root: Path | None = None) -> list[str]:
    """Docstrings of the standard library; files that do not parse are left out."""
    root = root or Path(sysconfig.get_path("stdlib"))
    documents: list[str] = []
    was_enabled = gc.isenabled()
    gc.disable()  # Syntax trees have no cycles; collecting them doubles the time.
    try:
        for path in find_sources(root):
            try:
                documents.extend(docstrings_of(path.read_text(encoding="utf-8")))
            except (SyntaxError, ValueError):  # ValueError: not UTF-8, or a null byte.
                continue
    finally:
        if was_enabled:
            gc.enable()
    return documents


def read_file(path: Path) -> list[str]:
    """Any text as documents of whole paragraphs, about 2 KB each, so that it can be split."""
    text = path.read_bytes().decode("utf-8", errors="replace").replace("\0", " ")
    documents: list[str] = []
    paragraphs: list[str] = []
    num_characters = 0
    for paragraph in text.split("\n\n"):
        paragraphs.append(paragraph)
        num_characters += len(paragraph)
        if num_characters >= 2048:
            documents.append("\n\n".join(paragraphs))
            paragraphs, num_characters = [], 0
    if paragraphs:
        documents.append("\n\n".join(paragraphs))
    return documents


def split_documents(documents: Iterable[str]) -> tuple[list[bytes], list[bytes]]:
    """Drops repeated documents and splits the others by their hash.

    A document goes to the same side wherever and whenever it is read; cutting at an offset
    instead would put one half of a text on each side.
    """
    train: list[bytes] = []
    val: list[bytes] = []
    seen: set[bytes] = set()
    for document in documents:
        data = document.strip().encode("utf-8", errors="replace")
        digest = hashlib.sha256(data).digest()
        if digest in seen or len(data) < MIN_DOCUMENT_BYTES:
            continue
        seen.add(digest)
        side = val if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else train
        side.append(data)
    return train, val


def load_corpus(path: str | Path | None = None, min_bytes: int = 1024) -> Corpus:
    """Reads the demo's own text, or the file at `path`.

    Every rank may call this by itself: the result depends on the files alone.

    Args:
        path: A text file to use instead of the Python installation's own prose.
        min_bytes: What each side needs at least, e.g. one context.

    Raises:
        ValueError: A side of the split is shorter than `min_bytes`.
    """
    documents = read_topics() + read_standard_library() if path is None else read_file(Path(path))
    train, val = split_documents(documents)
    if not val and len(train) > 1:  # A short file: rather a small validation set than none.
        val.append(train.pop())
    separator = bytes([END_OF_DOCUMENT])
    train_bytes = b"".join(separator + document for document in train)
    val_bytes = b"".join(separator + document for document in val)
    for side, data in (("training", train_bytes), ("validation", val_bytes)):
        if len(data) < min_bytes:
            raise ValueError(
                f"{path or 'the Python installation'} gives {len(data)} bytes of {side} text, "
                f"at least {min_bytes} are needed: use --data FILE with more text"
            )
    return Corpus(
        train=torch.frombuffer(bytearray(train_bytes), dtype=torch.uint8),
        val=torch.frombuffer(bytearray(val_bytes), dtype=torch.uint8),
        num_documents=len(train) + len(val),
        sha256=hashlib.sha256(train_bytes + val_bytes).hexdigest(),
    )


class Batches:
    """Random windows of the text; each rank draws its own.

    Args:
        data: uint8 [num_bytes].
        seed: Give every rank another one, or all ranks would see the same text.
    """

    def __init__(self, data: Tensor, batch_size: int, context: int, seed: int) -> None:
        if data.numel() <= context:
            raise ValueError(f"{data.numel()} bytes of text are too few for context {context}")
        self._data = data
        self._batch_size = batch_size
        self._context = context
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, both int64 [batch_size, context]."""
        starts = torch.randint(
            self._data.numel() - self._context, (self._batch_size, 1), generator=self._generator
        )
        windows = self._data[starts + torch.arange(self._context + 1)].long()  # [B, T + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def validation_batches(
    data: Tensor, batch_size: int, context: int, max_batches: int, dp_rank: int, dp_size: int
) -> list[tuple[Tensor, Tensor]]:
    """This rank's share of windows that lie evenly over the text, the same in every run.

    Each rank gets the same number of batches, as each forward is a collective. The first
    ones lie as evenly as all of them, so that a few give an early estimate.

    Args:
        data: uint8 [num_bytes].
        batch_size: Windows per batch.
        context: Tokens per window.
        max_batches: Per rank; fewer if the text has not as many windows.
        dp_rank: Which share.
        dp_size: How many shares.

    Returns:
        Tokens and targets, int64 [batch_size, context] each.
    """
    num_windows = data.numel() // context
    num_batches = max(1, min(max_batches, num_windows // (batch_size * dp_size)))
    num_windows = num_batches * batch_size * dp_size
    starts = torch.linspace(0, data.numel() - context - 1, num_windows).long()
    # Window w goes to batch w % num_batches: a batch holds windows from the whole text.
    mine = starts.view(dp_size * batch_size, num_batches)[dp_rank::dp_size]  # [B, num_batches]
    windows = data[mine.T.unsqueeze(-1) + torch.arange(context + 1)].long()  # [batches, B, T + 1]
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


def encode(text: str) -> Tensor:
    """int64 [1, num_bytes]; an empty prompt is the start of a document."""
    data = text.encode("utf-8") or bytes([END_OF_DOCUMENT])
    return torch.tensor(list(data), dtype=torch.long).unsqueeze(0)


def decode(tokens: Tensor) -> str:
    """Text of a one-dimensional tensor of bytes; document ends become blank lines."""
    data = bytes(int(token) for token in tokens)
    return data.replace(bytes([END_OF_DOCUMENT]), b"\n\n").decode("utf-8", errors="replace")


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """Both sides as raw bytes, one token each: ``train.bin`` and ``val.bin``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, side in (("train", corpus.train), ("val", corpus.val)):
        (folder / f"{name}.bin").write_bytes(side.numpy().tobytes())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Writes the text as files of tokens.")
    parser.add_argument("folder", type=Path, help="gets train.bin and val.bin")
    parser.add_argument(
        "--data", type=Path, help="a text file; default: the prose that Python itself carries"
    )
    options = parser.parse_args(arguments)
    corpus = load_corpus(options.data)
    write_corpus(corpus, options.folder)
    print(f"{options.folder}: {corpus.describe()}")


if __name__ == "__main__":
    main()
