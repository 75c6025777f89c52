"""Every error that diloco-node raises on purpose.

::

    DilocoError
    +-- ConfigError            settings or usage are wrong; exit code 2
    +-- BindError              a port or socket can't be taken; exit code 3
    +-- IdentityError          our own certificate or key is wrong; exit code 4
    +-- PeerError              a peer misbehaves or is gone: drop the link, keep the node
    |   +-- LinkLost
    |   +-- ProtocolViolation  a message against the schema, the limits or the state
    |   +-- PayloadCorrupt     bytes that don't decode to what their header says, or non-finite values
    |   +-- PeerIncompatible   another run, version or manifest; names the field that differs
    |   +-- RateExceeded       more than an honest peer sends: it is read more slowly, the link stays
    +-- PeersUnreachable       nobody answers; exit code 5
    +-- StorageError           disk: full, damaged, in use; exit code 6
    |   +-- DiskRefused        full, read-only, failing: what is there stays as it is, and another try may go through
    |   +-- LedgerLost         entries that were durable can't be read any more, and the disk does not let go of its id
    |   +-- LedgerGone         the same, and the id is gone: the next process begins again as another folder
    +-- RecoveryFailed         state can't be completed from disk and peers; exit code 6
    +-- SupersededError        a newer process has this identity, or another version runs; exit code 7
    +-- LearnerError           the training process broke its side of the contract
    +-- InvalidTransition      a bug of ours: a state machine got an event it has no arrow for

A message says what happened, to which peer and fragment, what was expected and found (with units), and what to do next.
"""

from __future__ import annotations


class DilocoError(Exception):
    """The root. `exit_code` is what the command line ends with when nobody handles the error."""

    exit_code = 1


class ConfigError(DilocoError):
    """A setting or an argument is wrong. The message names the setting, where it came from, and a value that works."""

    exit_code = 2


class BindError(DilocoError):
    """A port or a socket path can't be taken."""

    exit_code = 3


class IdentityError(DilocoError):
    """This node's certificate, key or CA is missing, unreadable, expired, or not for this region."""

    exit_code = 4


class PeerError(DilocoError):
    """A peer did something wrong or is gone. The link is dropped, the node lives on."""


class LinkLost(PeerError):
    """The connection to a peer ended or made no progress within its deadline."""


class ProtocolViolation(PeerError):
    """A peer sent something against the schema, the limits, or the state of the conversation."""


class PayloadCorrupt(PeerError):
    """Bytes that don't decode to what their header says, a failed hash, or non-finite values."""


class PeerIncompatible(PeerError):
    """The peer belongs to another run or speaks another version. The message names each field that differs."""


class RateExceeded(PeerError):
    """A peer sends more messages than any honest one. They are taken more slowly; the link stays."""


class PeersUnreachable(DilocoError):
    """No peer could be reached."""

    exit_code = 5


class StorageError(DilocoError):
    """The state folder can't be read or written, or what is in it is damaged."""

    exit_code = 6


class DiskRefused(StorageError):
    """The kernel refused to read or write: full, read-only, failing. Another try may go through."""


class LedgerLost(StorageError):
    """Entries that this region has acknowledged can't be read back: it must not acknowledge any more, but end."""


class LedgerGone(StorageError):
    """Entries that this region has acknowledged can't be read back. Its folder gave its id up: it may start again."""


class RecoveryFailed(DilocoError):
    """The state could not be completed from the own disk and the peers."""

    exit_code = 6


class SupersededError(DilocoError):
    """A newer process runs with this identity, or the run has moved on to another version."""

    exit_code = 7


class LearnerError(DilocoError):
    """The training process broke its side of the contract (non-finite parameters, another model)."""


class InvalidTransition(DilocoError):
    """A state machine got an event it has no arrow for. Always a bug in this program."""
