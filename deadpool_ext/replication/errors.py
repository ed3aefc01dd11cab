"""What can go wrong with host memory and replication, as types."""

from __future__ import annotations

from deadpool_ext.protocol.types import DeadpoolError, UsageError, Version


class ArenaMemoryError(UsageError):
    """The host cannot hold an arena segment. Raised when it is created; never a SIGBUS later."""

    def __init__(self, what: str, needed: int, available: int, advice: str) -> None:
        super().__init__(
            f"{what} needs {needed} bytes of host memory ({needed / 2**30:.2f} GiB) but {available} are available "
            f"({available / 2**30:.2f} GiB): {advice}"
        )
        self.needed = needed
        self.available = available


class SegmentFormatError(DeadpoolError):
    """What was opened is not a segment or board of this version of Deadpool."""


class SlotStateError(DeadpoolError):
    """A slot is not in the state that the operation needs (INV-2, INV-3); nothing was changed."""


class CorruptSlotError(DeadpoolError):
    """A sealed slot's content does not match its checksum: it must not be used (INV-2)."""

    def __init__(self, rank: int, version: Version, detail: str) -> None:
        super().__init__(f"rank {rank}, version {version.v} (lineage {version.lineage}): {detail}")
        self.rank = rank
        self.version = version


class FencedError(DeadpoolError):
    """A newer generation has begun: the caller unwinds. ``generation`` is the newer one."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"fenced by generation {generation}")
        self.generation = generation


class GateTimeoutError(DeadpoolError):
    """A version was not committed before the deadline."""


class StoppedError(DeadpoolError):
    """The caller's own ``should_stop`` ended a wait."""


class CopyError(DeadpoolError):
    """A snapshot copy could not be started or did not finish."""


class CudaCopyEngineRequiredError(CopyError):
    """Device memory was handed to an engine that copies host memory only."""


class ProtocolError(DeadpoolError):
    """A peer or the agent sent what the protocol does not allow; the connection is closed."""


class AuthenticationError(ProtocolError):
    """The other side does not know the job's secret, or speaks another protocol."""


class StaleGenerationError(ProtocolError):
    """The other side lives in a newer generation than this connection (INV-4)."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(f"generation {ours} is over, the peer is in {theirs}")
        self.ours = ours
        self.theirs = theirs


class NotReadyError(ProtocolError):
    """The other side is not yet configured for this generation: try again."""


class TransferError(DeadpoolError):
    """A transfer ended without a verified result; the receiver's last good replica is untouched."""


class CorruptTransferError(TransferError):
    """Bytes arrived that do not match their checksum; they were dropped."""


class NoProgressError(TransferError):
    """The peer moved no byte for the allowed time."""
