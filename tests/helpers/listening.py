"""Servers that answer as a worker does, or say nothing, for tests without workers."""

import contextlib
import socket
import threading

from tflms_sft._cluster import reachability


@contextlib.contextmanager
def listener(answer=None):
    """A server on a free port that answers so, or takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held, done = [], threading.Event()
        server.settimeout(0.05)

        def serve():
            while not done.is_set():
                with contextlib.suppress(OSError):
                    held.append(server.accept()[0])
                    if answer is not None:
                        held[-1].sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join()
        for connection in held:
            connection.close()


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def free():
    return f"127.0.0.1:{reachability.free_port('127.0.0.1')}"
