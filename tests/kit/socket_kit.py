"""Two ends of a TCP connection on loopback, for tests of what the kernel counts."""

import socket
import threading

from diloco_node.transport.kernel import tcp_info
from diloco_node.transport.kernel.tcp_info import SocketCounters, read_sockets

PACED = (socket.SOL_SOCKET, tcp_info.SO_MAX_PACING_RATE)
REMOTE = ("10.0.0.2", 7400)


def counters_of(near: socket.socket) -> SocketCounters:
    return next(found for found in read_sockets() if found.local == near.getsockname())


def send(near: socket.socket, far: socket.socket, data: bytes) -> None:
    thread = threading.Thread(target=near.sendall, args=(data,))
    thread.start()
    left = len(data)
    while left:
        left -= len(far.recv(min(left, 2**16)))
    thread.join()
