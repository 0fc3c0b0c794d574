"""Parses the addresses of the machines of a cluster. Imports no TensorFlow, for the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

_ADDRESS = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})$")
_FORMS = (
    'a list of addresses "HOST:PORT", one for each worker, a string of addresses separated by commas, a mapping such '
    'as {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}, or the path of a JSON file with a list or mapping'
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Addresses of the workers and of the chief, the program that drives them.

    Attributes:
        workers: Address of each worker, by task.
        chief: Address under which the workers reach the chief; `None` if not given.
    """

    workers: tuple[str, ...]
    chief: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """Addresses of the workers by their names in TensorFlow."""
        return {worker_name(task): address for task, address in enumerate(self.workers)}


def worker_name(task: int) -> str:
    """Return the prefix of a worker's device names, without the replica."""
    return f"/job:worker/task:{task}"


def read_cluster(cluster: Any) -> Cluster:
    """Parse a cluster in any form that `connect` accepts.

    Raises:
        TypeError: For another type.
        ValueError: For wrong addresses, or a file that cannot be read.
    """
    if isinstance(cluster, os.PathLike) or (isinstance(cluster, str) and _is_path(cluster)):
        return _of_jobs(_from_file(os.fspath(cluster)), cluster)
    if isinstance(cluster, str):
        return _of_jobs([part.strip() for part in cluster.split(",") if part.strip()], cluster)
    if hasattr(cluster, "as_dict"):  # `tf.train.ClusterSpec`
        cluster = cluster.as_dict()
    return _of_jobs(cluster, cluster)


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of an address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which means each machine itself."""
    host, _ = split_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def checked_address(address: object, where: str) -> str:
    """Return a valid address; errors call it `where`."""
    if not isinstance(address, str):
        raise TypeError(f'{where} must be an address "HOST:PORT". Received: {address!r}.')
    match = _ADDRESS.match(address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f'{where} must be an address "HOST:PORT", such as "10.0.0.2:2222". Received: {address!r}.')
    return address


def _is_path(text: str) -> bool:
    return text.endswith(".json") or os.sep in text or os.path.isfile(text)


def _from_file(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise ValueError(
            f"`cluster` must name a readable file: {error.strerror}. Received: cluster={path!r}."
        ) from None
    except ValueError as error:
        raise ValueError(f"`cluster` must name a JSON file: {error}. Received: cluster={path!r}.") from None


def _of_jobs(spec: Any, given: Any) -> Cluster:
    """Return the cluster of a list of workers or a mapping of jobs; errors quote `given`."""
    if isinstance(spec, Mapping) and isinstance(spec.get("cluster"), Mapping):  # The form of TF_CONFIG.
        spec = spec["cluster"]
    jobs = spec if isinstance(spec, Mapping) else {"worker": spec}
    unknown = [job for job in jobs if job not in ("worker", "chief")]
    if unknown:
        raise ValueError(
            f'`cluster` may have the jobs "worker" and "chief" only. Received: {unknown} in cluster={given!r}. List '
            "all machines but the chief as workers."
        )
    workers, chief = jobs.get("worker"), jobs.get("chief")
    if isinstance(chief, (list, tuple)) and len(chief) == 1:
        (chief,) = chief
    if not isinstance(workers, (list, tuple)):
        raise TypeError(f"`cluster` must be {_FORMS}. Received: cluster={given!r}.")
    if not workers:
        raise ValueError(f"`cluster` has no workers. It must be {_FORMS}. Received: cluster={given!r}.")
    addresses = [checked_address(address, "each worker in `cluster`") for address in workers]
    chief_address = None if chief is None else checked_address(chief, "the chief in `cluster`")
    _check_all(addresses if chief_address is None else [*addresses, chief_address], given)
    return Cluster(tuple(addresses), chief_address)


def _check_all(addresses: list[str], given: Any) -> None:
    duplicates = sorted({address for address in addresses if addresses.count(address) > 1})
    if duplicates:
        raise ValueError(
            f"`cluster` must have one address per task, without duplicates: {duplicates}. Received: {given!r}."
        )
    loopback = [address for address in addresses if is_loopback(address)]
    if loopback and len(loopback) < len(addresses):
        raise ValueError(
            f"`cluster` must not mix loopback addresses with other addresses: {loopback} means each machine itself, so "
            f"the other machines cannot use it. Received: cluster={given!r}."
        )
