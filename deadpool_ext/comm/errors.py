"""What can go wrong between ranks, and which exceptions mean that the communication failed and not the caller."""

from __future__ import annotations

from torch.distributed import DistError

from deadpool_ext.protocol.types import DeadpoolError


class CommunicatorError(DeadpoolError):
    """A group could not be made, connected or replaced."""


class FencedError(CommunicatorError):
    """The generation that this belonged to is over; raised instead of waiting any longer."""


class ConnectTimeoutError(CommunicatorError):
    """The peers did not all arrive within the deadline."""


class GroupMismatchError(CommunicatorError):
    """Two ranks disagree about which groups exist or who is in them: a newcomer built something else."""


#: Raised by operations and connections when a peer, the network or a fence ended them. Errors about arguments are not
#: among them. (The backend raises ``torch.distributed.DistBackendError``, a ``DistError``.)
COMMUNICATION_ERRORS: tuple[type[Exception], ...] = (DistError, FencedError, ConnectTimeoutError)
