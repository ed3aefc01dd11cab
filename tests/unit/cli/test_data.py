"""``deadpool data``: what it writes upstream reads, and it writes all or nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deadpool_ext.cli import data as data_command
from deadpool_ext.cli.main import run
from deadpool_ext.corpus.sources import CorpusError, documents, standard_library_files
from deadpool_ext.corpus.vocabulary import BpeVocabulary, ByteVocabulary

TEXTS = ["The first text, é and ö included.\n", "Another one.\n"]


class _RecordingWriter:
    """Stands in for the module that needs Megatron; the real one is in the integration test below."""

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail
        self.documents: list[list[int]] = []

    def write_indexed_dataset(
        self, *, bin_path: str, idx_path: str, documents: Any, vocabulary_size: int
    ) -> tuple[int, int]:
        self.documents = [ids.tolist() for ids in documents]
        Path(bin_path).write_bytes(b"bin")
        if self.fail:
            raise OSError(28, "No space left on device")
        Path(idx_path).write_bytes(b"idx")
        return len(self.documents), sum(map(len, self.documents))


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> _RecordingWriter:
    recorder = _RecordingWriter()
    monkeypatch.setattr(data_command, "_load_writer", lambda: recorder)
    return recorder


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for path, content in zip(paths, TEXTS, strict=True):
        path.write_text(content, encoding="utf-8")
    return [str(path) for path in paths]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_bytes_and_an_end_of_document(
    writer: _RecordingWriter, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["data", "text", *texts, "--output", str(out / "corpus")]) == 0
    assert writer.documents == [[*text.encode(), 256] for text in TEXTS]
    assert names(out) == {"corpus.bin", "corpus.idx"}
    captured = capsys.readouterr()
    assert captured.out == f"--data-path {out}/corpus --tokenizer-type NullTokenizer --vocab-size 257\n"
    assert "2 documents" in captured.err


def test_the_order_of_files_is_the_users(writer: _RecordingWriter, texts: list[str], tmp_path: Path) -> None:
    assert run(["data", "text", *texts[::-1], "--output", str(tmp_path / "c")]) == 0
    assert [len(ids) for ids in writer.documents] == [len(text.encode()) + 1 for text in TEXTS[::-1]]


def test_existing_output_is_kept_unless_forced(
    writer: _RecordingWriter, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "c.idx"
    old.write_bytes(b"old")
    (tmp_path / "c.tokenizer").mkdir()
    command = ["data", "text", *texts, "--output", str(tmp_path / "c")]
    assert run(command) == 2
    assert old.read_bytes() == b"old"
    assert f"{old} exists; --force replaces it" in capsys.readouterr().err
    (tmp_path / "cache" / "GPTDataset_indices").mkdir(parents=True)
    assert run([*command, "--force"]) == 0
    assert old.read_bytes() == b"idx"
    assert not (tmp_path / "c.tokenizer").exists()
    assert "GPTDataset_indices; remove it" in capsys.readouterr().err


def test_a_failure_leaves_nothing(
    writer: _RecordingWriter, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer.fail = True
    out = tmp_path / "out"
    assert run(["data", "text", *texts, "--output", str(out / "c")]) == 2
    assert names(out) == set()
    assert capsys.readouterr().err.endswith(f"deadpool: cannot write {out}/c: No space left on device\n")


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "the input holds no text"), (b"abc\xff", "not UTF-8 text (byte 3)")]
)
def test_what_is_no_text_is_refused(
    writer: _RecordingWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "in").write_bytes(content)
    assert run(["data", "text", str(tmp_path / "in"), "--output", str(tmp_path / "out" / "c")]) == 2
    assert said in capsys.readouterr().err
    assert names(tmp_path / "out") == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{missing}"], "No such file"),
        (["{folder}"], "Is a directory"),
        (["{file}", "--vocab-size", "300"], "byte always has 257 ids"),
        (["{file}", "--tokenizer", "bpe", "--vocab-size", "256"], "at least 257"),
        (["{file}", "--limit-mb", "0"], "--limit-mb"),
        (["{file}", "--tokenizer", "words"], "--tokenizer"),
    ],
)
def test_user_errors_are_one_line(
    writer: _RecordingWriter,
    texts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    known = {"missing": str(tmp_path / "none"), "folder": str(tmp_path), "file": texts[0]}
    command = [argument.format(**known) for argument in arguments]
    assert run(["data", "text", *command, "--output", str(tmp_path / "c")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_limit_cuts_between_characters(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    files[0].write_text("xé", encoding="utf-8")
    files[1].write_text("yz", encoding="utf-8")
    assert list(documents(files, limit_bytes=2)) == ["x"]
    assert list(documents(files, limit_bytes=3)) == ["xé"]
    assert list(documents(files, limit_bytes=4)) == ["xé", "y"]
    assert list(documents(files)) == ["xé", "yz"]


def test_standard_library_is_sorted_and_without_machine_dependent_files(tmp_path: Path) -> None:
    kept = ["abc.py", "json/decoder.py", "os.py"]
    dropped = ["test/test_os.py", "site-packages/pip.py", "_sysconfigdata__linux_.py", "json/tests/x.py", "a.txt"]
    for name in kept + dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [path.relative_to(tmp_path).as_posix() for path in standard_library_files(tmp_path)] == kept
    with pytest.raises(CorpusError):
        standard_library_files(tmp_path / "site-packages" / "empty")
    assert len(list(documents(standard_library_files(), limit_bytes=200_000))) > 5


def test_byte_vocabulary_has_room_for_every_byte() -> None:
    ids = ByteVocabulary().encode("".join(map(chr, range(256))))
    assert ids.dtype == np.int32
    assert ids.max() == 256
    assert ByteVocabulary.size == 257


def test_bpe_is_deterministic_and_spells_everything(tmp_path: Path) -> None:
    texts = ["def f(x):\n    return x\n"] * 3 + ["class A:\n    pass\n"]
    for name in "ab":
        vocabulary = BpeVocabulary.train(texts, 280)
        assert vocabulary.save(tmp_path / name)
    hashes = {hashlib.sha256((tmp_path / name / "tokenizer.json").read_bytes()).hexdigest() for name in ("a", "b")}
    assert len(hashes) == 1
    assert 257 < vocabulary.size <= 280
    ids = vocabulary.encode("unseen: \U0001f600")
    assert ids[-1] == 0
    assert ids.max() < vocabulary.size
    assert json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
