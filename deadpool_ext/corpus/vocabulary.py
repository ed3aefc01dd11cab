"""The two vocabularies of ``deadpool data``, and the trainer's flags that fit each.

``byte``: the 256 byte values and one end-of-document id. Megatron-core 0.19 has a byte-level tokenizer in its library
but no flag that reaches it, and a training run needs nothing of a tokenizer but its size and its end-of-document id:
``--tokenizer-type NullTokenizer --vocab-size 257`` says exactly that (its end-of-document id is the last one).

``bpe``: byte-pair encoding trained on the corpus itself, saved in a folder that ``--tokenizer-type
HuggingFaceTokenizer`` loads from disk.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deadpool_ext.protocol.types import UsageError

BYTE_VALUES = 256
END_OF_DOCUMENT = "<|endoftext|>"
#: Ids of a byte-pair vocabulary start with these; a smaller vocabulary could not spell every text.
SMALLEST_BPE = BYTE_VALUES + 1


class Vocabulary(ABC):
    """Maps a document to token ids and knows how the trainer is told about it."""

    size: int  # ids are 0 .. size-1

    @abstractmethod
    def encode(self, document: str) -> npt.NDArray[np.int32]:
        """Token ids of one document, one-dimensional int32, ending with the end-of-document id."""

    @abstractmethod
    def save(self, folder: Path) -> bool:
        """Write what the trainer must load into the new ``folder``; False when there is nothing to write."""

    @abstractmethod
    def flags(self, folder: Path) -> tuple[str, ...]:
        """Arguments of the trainer that go with data encoded by this vocabulary, saved in ``folder``."""


class ByteVocabulary(Vocabulary):
    """UTF-8 bytes as they are; id 256 ends a document."""

    size = BYTE_VALUES + 1

    def encode(self, document: str) -> npt.NDArray[np.int32]:
        """See :meth:`Vocabulary.encode`."""
        raw = np.frombuffer(document.encode("utf-8"), dtype=np.uint8)
        ids = np.empty(raw.size + 1, dtype=np.int32)
        ids[:-1] = raw
        ids[-1] = BYTE_VALUES
        return ids

    def save(self, folder: Path) -> bool:
        """Nothing to save."""
        return False

    def flags(self, folder: Path) -> tuple[str, ...]:
        """See :meth:`Vocabulary.flags`."""
        return ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(self.size))


class BpeVocabulary(Vocabulary):
    """Byte-level byte-pair encoding, trained by :meth:`train`; the end-of-document id is 0."""

    def __init__(self, model: object) -> None:
        from tokenizers import Tokenizer

        if not isinstance(model, Tokenizer):
            raise TypeError("model must be a tokenizers.Tokenizer")
        end = model.token_to_id(END_OF_DOCUMENT)
        if end is None:
            raise ValueError(f"the model has no {END_OF_DOCUMENT}")
        self._model = model
        self._end = int(end)
        self.size = int(model.get_vocab_size())

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> BpeVocabulary:
        """Train on ``texts`` to at most ``size`` ids (fewer when the text has no more pairs to merge).

        Raises :class:`UsageError` for a size that cannot hold every byte value.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if size < SMALLEST_BPE:
            raise UsageError(f"--vocab-size {size} is too small: a byte-pair vocabulary needs at least {SMALLEST_BPE}")
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer=trainer)
        return cls(model)

    def encode(self, document: str) -> npt.NDArray[np.int32]:
        """See :meth:`Vocabulary.encode`."""
        return np.array([*self._model.encode(document).ids, self._end], dtype=np.int32)

    def save(self, folder: Path) -> bool:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, the layout transformers loads from disk."""
        folder.mkdir()
        self._model.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_DOCUMENT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return True

    def flags(self, folder: Path) -> tuple[str, ...]:
        """See :meth:`Vocabulary.flags`."""
        return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder))
