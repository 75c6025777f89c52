"""Every error that diloco-node raises on purpose.

Each class has a code (`E-...`) and a remedy; `diloco-node help CODE` prints them with the first line of its docstring.
A message says what happened, to which peer and fragment, what was expected and found (with units), and what to do next.
"""

from __future__ import annotations

from typing import ClassVar, Final

INTERRUPTED_CODE: Final = 130
"""Exit code of a command that was told to stop, by Ctrl-C or SIGTERM: as a shell has it."""


class DilocoError(Exception):
    """The program failed in a way that has no name of its own."""

    exit_code: ClassVar[int] = 1
    """Exit code of the command line when nobody handles the error."""

    code: ClassVar[str] = "E-RUNTIME"
    """Stable: shown with the error, explained by `diloco-node help CODE` and in docs/errors.md."""

    remedy: ClassVar[str] = "read the last lines of logs/daemon.log; `--debug` before a command shows its traceback"


class ConfigError(DilocoError):
    """A setting or an argument is wrong. The message names the setting, where it came from, and a value that works."""

    exit_code = 2
    code = "E-CONFIG"
    remedy = (
        "set what the message names to the value that it offers; diloco-node config show --origin tells "
        "where each comes from"
    )


class BindError(DilocoError):
    """A port or a socket path can't be taken."""

    exit_code = 3
    code = "E-PORT"
    remedy = "see who has the port with ss -ltnp; end that, or set another port or path in run.toml"


class IdentityError(DilocoError):
    """This node's certificate, key or CA is missing, unreadable, expired, or not for this region."""

    exit_code = 4
    code = "E-CERT"
    remedy = "copy certs/REGION from where diloco-node certs made it; expired: diloco-node certs renew REGION there"


class PeerError(DilocoError):
    """A peer did something wrong or is gone. The link is dropped, the node lives on."""

    code = "E-PEER"
    remedy = "read the message: it names the peer; the others go on"


class LinkLost(PeerError):
    """The connection to a peer ended or made no progress within its deadline."""

    code = "E-PEER-LOST"
    remedy = "the link is dialled again by itself; if it stays down, run diloco-node doctor in both regions"


class PeerCertificateRefused(LinkLost):
    """One side of a connection refuses the other's certificate: of another run or region, ended, or revoked."""

    code = "E-PEER-CERT"
    remedy = (
        "give all regions certificates of one authority, and check addresses and clocks; diloco-node doctor tells "
        "which of them it is"
    )


class ProtocolViolation(PeerError):
    """A peer sent something against the schema, the limits, or the state of the conversation."""

    code = "E-PEER-PROTOCOL"
    remedy = (
        "install the same version everywhere; if it is the same, check that machine's memory, then "
        "diloco-node quarantine lift"
    )


class PayloadCorrupt(PeerError):
    """Bytes that don't decode to what their header says, a failed hash, or non-finite values."""

    code = "E-PEER-CORRUPT"
    remedy = "check memory and disk of the region that the message names; it is left out until it sends what holds"


class PeerIncompatible(PeerError):
    """The peer belongs to another run or speaks another version. The message names each field that differs."""

    code = "E-PEER-INCOMPATIBLE"
    remedy = "make run.toml and the version the same in all regions; diloco-node doctor compares them"


class RateExceeded(PeerError):
    """A peer sends more messages than any honest one. They are taken more slowly; the link stays."""

    code = "E-PEER-RATE"
    remedy = "look at that region: it sends more than the protocol does; its link stays, only slower"


class PeersUnreachable(DilocoError):
    """No peer could be reached."""

    exit_code = 5
    code = "E-UNREACHABLE"
    remedy = "start the region, or correct address and firewall; diloco-node doctor dials each peer"


class StorageError(DilocoError):
    """The state folder can't be read or written, or what is in it is damaged."""

    exit_code = 6
    code = "E-STORAGE"
    remedy = "end the other daemon that uses the folder, or mend what the message names; then start again"

    disk: tuple[int, int] = (0, 0)
    """Device and number of a kernel's refusal: equal for all files on one full disk."""


class DiskRefused(StorageError):
    """The kernel refused to read, write or lock: full, read-only, failing. Another try may go through."""

    code = "E-DISK"
    remedy = "make room, remount the disk writable, or do what the message says; the daemon tries again by itself"


class StoreRefused(StorageError):
    """A bucket or its network refused. The message names the object, and what helps."""

    code = "E-BUCKET"
    remedy = "do what the message says, and give the command again: an earlier copy is untouched, half a copy is none"


class LedgerLost(StorageError):
    """Entries that this region has acknowledged can't be read back: it must not acknowledge any more, but end."""

    code = "E-LEDGER-LOST"
    remedy = "check the disk (dmesg), then start the region again: it fetches from the others what is lost"


class LedgerGone(StorageError):
    """Entries that this region has acknowledged can't be read back. Its folder gave its id up: it may start again."""

    code = "E-LEDGER-GONE"
    remedy = "nothing: the region starts again under a new folder id and catches up"


class SupersededError(DilocoError):
    """A newer process runs with this identity, or the run has moved on to another version."""

    exit_code = 7
    code = "E-SUPERSEDED"
    remedy = "start only one process for each region, all of the same version"


class LearnerError(DilocoError):
    """The training process broke its side of the contract (non-finite parameters, another model)."""

    code = "E-LEARNER"
    remedy = "read logs/learner.log; pass the same model and optimizer to attach in every region"


class InvalidTransition(DilocoError):
    """A state machine got an event it has no arrow for. Always a bug in this program."""

    code = "E-BUG"
    remedy = "report it with logs/daemon.log: it is a bug of this program"
