"""The first words on a stream beside the hello: how each side shows by which certificate it is there.

gRPC tells an accepting side the certificate of the dialing one. The dialing side learns only that TLS was content. So
it sends a challenge with each call, and the accepting side answers with its certificate and a signature.
"""

from __future__ import annotations

from diloco_node.transport.credentials import CERTIFICATE_KEY, CHALLENGE_KEY, PROOF_KEY, Credentials, check_proof, prove
from diloco_node.transport.kernel.congestion import METADATA_KEY, own_congestion_controls
from diloco_node.transport.streams import AcceptedStream, DialedStream, Metadata
from diloco_node.wire.envelope import Hello, Lane, check_hello, decode_hello


async def hear(stream: DialedStream, ours: Hello, peer: str, credentials: Credentials) -> Hello:
    """Read the hello of the accepting side, and learn its certificate. Raises LinkLost. ProtocolViolation,
    PeerIncompatible: see `check_hello`. PeerCertificateRefused: it is not proved, or not good."""
    peer_hello = decode_hello(await stream.read())
    check_hello(ours, peer_hello, certificate_region=peer)
    certificate, proof = [await stream.peer_metadata(key) for key in (CERTIFICATE_KEY, PROOF_KEY)]
    stream.certificate = check_proof(credentials, peer, stream.challenge, certificate, proof)
    return peer_hello


def answer(stream: AcceptedStream, peer: str, lane: Lane, credentials: Credentials) -> Metadata:
    """Return the metadata for the dialing side: the answer to its challenge, and on control what our sockets go by."""
    return (*lane_metadata(lane), *prove(credentials.identity, peer, stream.peer_metadata(CHALLENGE_KEY)))


def lane_metadata(lane: Lane) -> Metadata:
    """Return the metadata of the call of a lane."""
    ours = own_congestion_controls() if lane is Lane.CONTROL else None
    return ((METADATA_KEY, ours.encode()),) if ours is not None else ()
