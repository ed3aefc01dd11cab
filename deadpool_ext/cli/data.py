"""``deadpool data``: text in, the trainer's ``.bin``/``.idx`` (and tokenizer) out, without a download."""

from __future__ import annotations

import importlib
import logging
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deadpool_ext.corpus.sources import check_readable, documents, standard_library_files
from deadpool_ext.corpus.vocabulary import BpeVocabulary, ByteVocabulary, Vocabulary
from deadpool_ext.protocol.types import UsageError

#: The one place that knows upstream's format; looked up by name because this package does not import Megatron.
_WRITER_MODULE = "megatron.hotswap.data"
_MEGABYTE = 1_000_000
_DEFAULT_BPE_SIZE = 4096


class DataOutputError(UsageError):
    """The output exists already, or cannot be written."""


def _common_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option(
            "--output", "prefix", required=True, metavar="PREFIX", type=click.Path(path_type=Path),
            help="Write PREFIX.bin and PREFIX.idx, and PREFIX.tokenizer/ for bpe.",
        ),
        click.option(
            "--tokenizer", type=click.Choice(["byte", "bpe"]), default="byte", show_default=True,
            help="byte: UTF-8 bytes, 257 ids. bpe: byte-pair encoding trained on this very text.",
        ),
        click.option(
            "--vocab-size", type=click.IntRange(min=1), default=None, metavar="V",
            help=f"Number of ids for bpe.  [default: {_DEFAULT_BPE_SIZE}]",
        ),
        click.option(
            "--limit-mb", type=click.FloatRange(min=0, min_open=True), default=None, metavar="MB",
            help="Use only the first MB megabytes of text.  [default: all]",
        ),
        click.option("--force", is_flag=True, help="Replace output that exists."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.group(short_help="Make training data out of text.")
def data() -> None:
    """Make training data (PREFIX.bin, PREFIX.idx) out of text, without a download.

    Prints the trainer's arguments that go with it on standard output.
    """


@data.command()
@_common_options
def stdlib(**options: Any) -> None:
    """Use the Python standard library's own sources: real text that is on every machine."""
    build(standard_library_files(), **options)


@data.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@_common_options
def text(files: tuple[Path, ...], **options: Any) -> None:
    """Use UTF-8 text files, each a document, in the order given."""
    build(files, **options)


def build(
    files: Sequence[Path], *, prefix: Path, tokenizer: str, vocab_size: int | None, limit_mb: float | None, force: bool
) -> None:
    """Encode ``files`` and put the finished output in place; prints the arguments that go with it.

    Output appears only when complete: everything is written into a temporary folder beside it and renamed, the index
    last. Raises :class:`UsageError` for anything the user can change.
    """
    if tokenizer == "byte" and vocab_size is not None:
        raise UsageError("--vocab-size goes with --tokenizer bpe; byte always has 257 ids")
    prefix = prefix.absolute()
    outputs = {suffix: prefix.with_name(prefix.name + suffix) for suffix in (".idx", ".bin", ".tokenizer")}
    present = [str(path) for path in outputs.values() if path.exists()]
    if present and not force:
        raise DataOutputError(f"{present[0]} exists; --force replaces it")
    limit = None if limit_mb is None else max(1, int(limit_mb * _MEGABYTE))
    total = check_readable(files)
    total = total if limit is None else min(total, limit)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}.") as work:
            vocabulary = _encode(files, Path(work), tokenizer, vocab_size or _DEFAULT_BPE_SIZE, limit, total)
            _put_in_place(Path(work), outputs)
    except OSError as error:
        raise DataOutputError(f"cannot write {prefix}: {error.strerror or error}") from error
    _note_stale_indices(prefix, replaced=bool(present))
    click.echo(shlex.join(["--data-path", str(prefix), *vocabulary.flags(outputs[".tokenizer"])]))


def _encode(
    files: Sequence[Path], work: Path, tokenizer: str, vocab_size: int, limit: int | None, total: int
) -> Vocabulary:
    """Write ``.bin``, ``.idx`` and perhaps ``.tokenizer`` into ``work``."""
    writer = _load_writer()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:

        def watched(description: str) -> Iterator[str]:
            task = progress.add_task(description, total=total)
            for document in documents(files, limit):
                yield document
                progress.advance(task, len(document.encode("utf-8")))

        vocabulary: Vocabulary
        if tokenizer == "bpe":
            vocabulary = BpeVocabulary.train(watched("training the tokenizer"), vocab_size)
        else:
            vocabulary = ByteVocabulary()
        vocabulary.save(work / ".tokenizer")
        arrays = (vocabulary.encode(document) for document in watched("encoding"))
        count, tokens = writer.write_indexed_dataset(
            bin_path=str(work / ".bin"), idx_path=str(work / ".idx"), documents=arrays, vocabulary_size=vocabulary.size
        )
    click.echo(f"{count} documents, {tokens} tokens, {vocabulary.size} ids", err=True)
    return vocabulary


def _load_writer() -> Any:
    """The module that writes upstream's format; its import is slow and talkative on a machine without a GPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            importlib.import_module("megatron.core.datasets.indexed_dataset")
            return importlib.import_module(_WRITER_MODULE)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed; scripts/quickstart.sh makes the environment") from error
    finally:
        logging.disable(logging.NOTSET)


def _put_in_place(work: Path, outputs: dict[str, Path]) -> None:
    """Rename the finished files. Without an index there is no data set, so it goes first and comes last."""
    outputs[".idx"].unlink(missing_ok=True)
    if outputs[".tokenizer"].is_dir():
        shutil.rmtree(outputs[".tokenizer"])
    for suffix in (".tokenizer", ".bin", ".idx"):
        finished = work / suffix
        if finished.exists():
            finished.replace(outputs[suffix])


def _note_stale_indices(prefix: Path, *, replaced: bool) -> None:
    """Upstream caches sample indices by the data's path and not by its content."""
    cache = prefix.parent / "cache" / "GPTDataset_indices"
    if replaced and cache.is_dir():
        click.echo(f"warning: the trainer's indices of the old data may be in {cache}; remove it", err=True)
