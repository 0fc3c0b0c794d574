"""Whether a worker answers, without TensorFlow, which waits for one that does not as long as it takes.

A server of gRPC speaks HTTP/2, and is the first to: it sends its settings when a connection begins (RFC 9113, section
3.4). One that was stopped, or whose machine is gone, does not, although the operating system may take the connection.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import stat
import time
from collections.abc import Mapping
from typing import Any

from tflms_sft._cluster.spec import is_loopback, split_address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With empty settings of our own."""

_HEADER_BYTES = 9
_SETTINGS = 4
_PAUSE_SECONDS = 0.2


def missing(addresses: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Those that do not answer.

    Args:
        addresses: Of workers, by their names.
        seconds: How long each may take.

    Returns:
        Why not, by name.
    """
    if not addresses:
        return {}
    with concurrent.futures.ThreadPoolExecutor(min(len(addresses), 32)) as pool:
        reasons = pool.map(lambda address: _why_not(address, seconds), addresses.values())
        return {name: why for name, why in zip(addresses, reasons, strict=True) if why}


def wait_for(addresses: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Wait until all of them answer; those that have not after that many seconds, with the reasons."""
    end = time.monotonic() + seconds
    left = dict(addresses)
    while True:
        reasons = missing(left, max(min(end - time.monotonic(), 5.0), 0.1))
        left = {name: left[name] for name in reasons}
        if not left or time.monotonic() + _PAUSE_SECONDS > end:
            return reasons
        time.sleep(_PAUSE_SECONDS)


def _why_not(address: str, seconds: float) -> str:
    end = time.monotonic() + seconds
    try:
        with socket.create_connection(split_address(address), timeout=seconds) as connection:
            connection.sendall(_PREFACE)
            header = b""
            while len(header) < _HEADER_BYTES:
                connection.settimeout(max(end - time.monotonic(), 0.01))
                part = connection.recv(_HEADER_BYTES - len(header))
                if not part:
                    return "something that is no worker answers there"
                header += part
    except TimeoutError:
        return f"no answer within {seconds:.2g} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    return "" if header[3] == _SETTINGS else "something that is no worker answers there"


def fail_fast() -> None:
    """Have TensorFlow's calls to a machine that is gone fail; by default they wait for it to come back.

    It reads the variable at each call.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "true")


def break_connections(address: str) -> int:
    """End this program's connections to an address for all who wait for something to come; how many there were.

    They are TensorFlow's, and it has no way to be told.
    """
    try:
        found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except OSError:
        return 0
    peers: set[tuple[Any, ...]] = {target[:2] for *_, target in found}
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # Closed meanwhile, or not connected.
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                broken += _end_connection(os.dup(int(name)), peers)
    return broken


def _end_connection(descriptor: int, peers: set[tuple[Any, ...]]) -> bool:
    """End a connection if it is to one of some peers; the descriptor, which is a copy, is closed."""
    try:
        connection = socket.socket(fileno=descriptor)
    except BaseException:
        os.close(descriptor)  # What could not become a socket object does not own it.
        raise
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        host, port, *_ = connection.getpeername()
        if (host.removeprefix("::ffff:"), port) not in peers:
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True


def own_address(workers: list[str]) -> str:
    """The address under which workers reach this machine, with a port that is free.

    It is that of the interface by which a worker is reached; sending nothing finds that out.
    """
    host = "127.0.0.1"
    for worker in workers:
        if is_loopback(worker):
            continue
        with contextlib.suppress(OSError):
            (family, *_, target), *_ = socket.getaddrinfo(*split_address(worker), type=socket.SOCK_DGRAM)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                host = probe.getsockname()[0]
            break
    bracketed = f"[{host}]" if ":" in host else host
    return f"{bracketed}:{free_port(host)}"


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def why_not_bound(address: str) -> str:
    """Why this machine cannot serve at an address; empty if it can.

    TensorFlow shares a port with others that do so, and listens on all addresses, whatever it is told.
    """
    host, port = split_address(address)
    try:
        (family, kind, protocol, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)
            listener.listen(1)
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""
