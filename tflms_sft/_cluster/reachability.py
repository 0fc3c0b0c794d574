"""Checks whether workers answer, without TensorFlow, which would wait forever for a worker that does not.

A gRPC server speaks HTTP/2 and sends its settings first when a connection begins (RFC 9113, section 3.4). A stopped
process does not, although the operating system may still accept the connection.
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
from tflms_sft._util.open_files import open_descriptors

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Client preface of HTTP/2, with empty settings."""

_HEADER_BYTES = 9
_SETTINGS = 4
_PAUSE_SECONDS = 0.2


def missing(addresses: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Return the reasons, by name, of the workers that do not answer within a time limit for each."""
    if not addresses:
        return {}
    with concurrent.futures.ThreadPoolExecutor(min(len(addresses), 32)) as pool:
        reasons = pool.map(lambda address: _failure(address, seconds), addresses.values())
        return {name: reason for name, reason in zip(addresses, reasons, strict=True) if reason}


def wait_for(addresses: Mapping[str, str], seconds: float) -> dict[str, str]:
    """Wait until all workers answer; return the workers that do not within a time limit, with reasons."""
    end = time.monotonic() + seconds
    left = dict(addresses)
    while True:
        reasons = missing(left, max(min(end - time.monotonic(), 5.0), 0.1))
        left = {name: left[name] for name in reasons}
        if not left or time.monotonic() + _PAUSE_SECONDS > end:
            return reasons
        time.sleep(_PAUSE_SECONDS)


def _failure(address: str, seconds: float) -> str:
    """Return why no worker answers at an address; empty if one does."""
    end = time.monotonic() + seconds
    try:
        with socket.create_connection(split_address(address), timeout=seconds) as connection:
            connection.sendall(_PREFACE)
            header = b""
            while len(header) < _HEADER_BYTES:
                connection.settimeout(max(end - time.monotonic(), 0.01))
                part = connection.recv(_HEADER_BYTES - len(header))
                if not part:
                    return "a program that is not a worker answers there"
                header += part
    except TimeoutError:
        return f"no answer within {seconds:.2g} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    return "" if header[3] == _SETTINGS else "a program that is not a worker answers there"


def fail_fast() -> None:
    """Make TensorFlow's calls to a lost machine fail at once instead of waiting for its return.

    TensorFlow reads the variable at each call.
    """
    os.environ.setdefault("GRPC_FAIL_FAST", "true")


def break_connections(address: str) -> int:
    """Shut down this process's connections to an address, and return their number.

    The connections belong to TensorFlow, which has no function for this. Its pending calls then fail.
    """
    try:
        infos = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except OSError:
        return 0
    peers: set[tuple[Any, ...]] = {target[:2] for *_, target in infos}
    broken = 0
    for descriptor in open_descriptors() or ():
        with contextlib.suppress(OSError):  # The descriptor was closed meanwhile, or is not connected.
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                broken += _end_connection(os.dup(descriptor), peers)
    return broken


def _end_connection(descriptor: int, peers: set[tuple[Any, ...]]) -> bool:
    """Shut down a connection if it leads to one of the peers. Closes the descriptor, which must be a copy."""
    try:
        connection = socket.socket(fileno=descriptor)
    except BaseException:
        os.close(descriptor)  # A failed constructor does not own the descriptor.
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
    """Return the address under which workers reach this machine, with a free port.

    It is the address of the interface that leads to a worker. Connecting a UDP socket finds it without a message.
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
    """Return a port of an interface that no process uses."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def why_not_bound(address: str) -> str:
    """Return why this machine cannot serve at an address; empty if it can.

    TensorFlow itself would share a used port, and would listen on all addresses instead of a wrong one.
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
