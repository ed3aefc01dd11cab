"""Pretrain GPT with upstream's Megatron trainer; with ``--deadpool``, without fearing for the nodes.

Every flag of upstream's works. See ``megatron/hotswap/gpt/entry.py``.
"""

import importlib.util
import sys


def _megatron_is_a_namespace() -> bool:
    """A foreign ``megatron/__init__.py`` found first would hide both the installed trainer and our part of it."""
    found = importlib.util.find_spec("megatron")
    if found is None or found.origin is None:
        return True
    print(
        f"pretrain_gpt.py: {found.origin} hides the installed megatron-core: take that directory off PYTHONPATH",
        file=sys.stderr,
    )
    return False


def main() -> int:
    """Returns the process's exit code: 2 for a user's error, named in one line."""
    if not _megatron_is_a_namespace():
        return 2
    from megatron.hotswap.gpt.entry import main as train

    return train()


if __name__ == "__main__":
    sys.exit(main())
