"""pretrain_gpt.py that also writes down every sample it draws from the training set: the script of a test, not a test.

One line a sample, ``iteration id``, in a file for each process in the directory that ``DEADPOOL_TEST_IDS`` names.
"""

import os
import pathlib
import runpy
from typing import Any

from megatron.hotswap.gpt.corpus import GPTDataset

ROOT = pathlib.Path(__file__).resolve().parents[3]
DIRECTORY = pathlib.Path(os.environ["DEADPOOL_TEST_IDS"])


def _write_down() -> None:
    from megatron.training import get_args

    inherited = GPTDataset.__getitem__
    # By start time, so that the files of one seat sort like the processes that filled it.
    name = f"rank{os.environ['RANK']}.{pathlib.Path('/proc/self/stat').read_text().rsplit(')', 1)[1].split()[19]:0>20}"
    file = open(DIRECTORY / name, "w", buffering=1)  # noqa: SIM115 - as long as the process, which is killed

    def getitem(self: Any, index: Any) -> Any:
        if self.index_split.name == "train":
            file.write(f"{get_args().curr_iteration + 1} {index}\n")
        return inherited(self, index)

    GPTDataset.__getitem__ = getitem  # type: ignore[method-assign]


_write_down()
runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
