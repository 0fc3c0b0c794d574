"""Addresses of the machines of a cluster, as users write them; without TensorFlow, for the command line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

_ADDRESS = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})$")
_FORMS = (
    'a list of addresses "HOST:PORT", one for each worker, a string of them with commas between, a mapping such as '
    '{"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}, or the path of a JSON file with that'
)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Workers, and who gives them work.

    Attributes:
        workers: Address of each, by its task.
        chief: The address under which they reach the chief, if it is told.
    """

    workers: tuple[str, ...]
    chief: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """The address of each worker by its name in TensorFlow."""
        return {worker_name(task): address for task, address in enumerate(self.workers)}


def worker_name(task: int) -> str:
    """As the names of its devices begin, without what all of them have."""
    return f"/job:worker/task:{task}"


def read_cluster(cluster: Any) -> Cluster:
    """Find out what a user means.

    Args:
        cluster: One of the forms of `connect`.

    Raises:
        TypeError: For something else.
        ValueError: For wrong addresses, and a file that cannot be read.
    """
    if isinstance(cluster, os.PathLike) or (isinstance(cluster, str) and _is_path(cluster)):
        return _of_jobs(_from_file(os.fspath(cluster)), cluster)
    if isinstance(cluster, str):
        return _of_jobs([part.strip() for part in cluster.split(",") if part.strip()], cluster)
    if hasattr(cluster, "as_dict"):  # `tf.train.ClusterSpec`
        cluster = cluster.as_dict()
    return _of_jobs(cluster, cluster)


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of an address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether it means another machine on each machine."""
    host, _ = split_address(address)
    return host in ("localhost", "::1") or host.startswith("127.")


def checked_address(address: object, where: str) -> str:
    """An address.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is no address.
    """
    if not isinstance(address, str):
        raise TypeError(f'{where} must be an address "HOST:PORT". Received: {address!r}.')
    found = _ADDRESS.match(address)
    if found is None or not 1 <= int(found["port"]) <= 65535:
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
            f"`cluster` names a file that cannot be read: {error.strerror}. Received: cluster={path!r}."
        ) from None
    except ValueError as error:
        raise ValueError(f"`cluster` must be a file of JSON: {error}. Received: cluster={path!r}.") from None


def _of_jobs(found: Any, given: Any) -> Cluster:
    if isinstance(found, Mapping) and isinstance(found.get("cluster"), Mapping):  # As in TF_CONFIG.
        found = found["cluster"]
    jobs = found if isinstance(found, Mapping) else {"worker": found}
    unknown = [job for job in jobs if job not in ("worker", "chief")]
    if unknown:
        raise ValueError(
            f'`cluster` may have the jobs "worker" and "chief". Received: {unknown} in cluster={given!r}. A pipeline '
            "is driven by one chief; all others are workers."
        )
    workers, chief = jobs.get("worker"), jobs.get("chief")
    if isinstance(chief, (list, tuple)) and len(chief) == 1:
        (chief,) = chief
    if not isinstance(workers, (list, tuple)):
        raise TypeError(f"`cluster` must be {_FORMS}. Received: cluster={given!r}.")
    if not workers:
        raise ValueError(f"`cluster` has no workers. It must be {_FORMS}. Received: cluster={given!r}.")
    addresses = [checked_address(address, "each worker in `cluster`") for address in workers]
    of_chief = None if chief is None else checked_address(chief, "the chief in `cluster`")
    _check_all(addresses if of_chief is None else [*addresses, of_chief], given)
    return Cluster(tuple(addresses), of_chief)


def _check_all(addresses: list[str], given: Any) -> None:
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise ValueError(f"`cluster` has {twice} twice; each task has an address of its own. Received: {given!r}.")
    loopback = [address for address in addresses if is_loopback(address)]
    if loopback and len(loopback) < len(addresses):
        raise ValueError(
            f"`cluster` has {loopback}, which each machine takes for itself, beside addresses of other machines. All "
            f"of them reach each other by these addresses. Received: cluster={given!r}."
        )
