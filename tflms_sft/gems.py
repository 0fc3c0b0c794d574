"""Formulas for the durations of GEMS' schedules: Jain et al., "GEMS", SC '20, section VI, equations 1 to 11.

A network is cut into n partitions, one for each GPU; this package calls them stages. The paper's symbols are

| paper | here | |
|---|---|---|
| FP_i, BP_i | `forward[i - 1]`, `backward[i - 1]` | seconds of partition i for one micro-batch |
| lat_i1 + lat_i2 + ... | `transfer[i - 1]` | seconds of all tensors between i and i + 1, one way; n - 1 of them |
| N, η | `eta` | micro-batches of a step: delayed synchronisation's N, MASTER's replications η; 2 for MAST |
| T_allreduce | `allreduce` | seconds of one exchange of gradients |

Simulations of the schedules (`rewriters.pipelining.schedule_simulator`) show which equations are correct. For an
incorrect equation, the function with the plain name is correct, and the function whose name ends in `_printed` is the
paper's. "Level" stands for FP_1 + ... + FP_(n-1) = BP_1 + ... + BP_(n-1).

| equation | correct |
|---|---|
| 1, 2, 3, 5: basic and delayed synchronisation | always |
| 4: idle time | without communication |
| 6: MAST | if `mast_holds`; otherwise MAST takes longer |
| 7: MAST's communication | as an amount, with a sum to n - 1; a step takes 3 Σlat and at least one exchange longer |
| 8: idle time of MAST | with the time of `mast` in place of equation 6 |
| 9: MASTER, odd η | if `mast_holds` and level; always for η = 1 |
| 9: MASTER, even η | never: it lacks a ΣBP, apart from the conditions for odd η |
| 10: improvement by MASTER | for even η, if `mast_holds` and level; level or not for η = 2 |
| 11: improvement from two measurements | always, since the improvement is linear in η |

MASTER is at most 2η / (η + 1) times as fast as delayed synchronisation, and MAST 4/3 times, for any stages. With memory
for several micro-batches a pipeline (GPipe, 1F1B) is faster than both; MAST and MASTER suit a micro-batch of one image
that barely fits.

`ring_all_reduce`, `hybrid` and `scaling` model many devices, for which the paper has measurements but no equation.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "communication",
    "compute",
    "delayed",
    "exchange",
    "hybrid",
    "improved",
    "improved_from_measured",
    "improved_printed",
    "mast",
    "mast_communication",
    "mast_holds",
    "mast_printed",
    "mast_underutilized",
    "master",
    "master_bound",
    "master_printed",
    "ring_all_reduce",
    "scaling",
    "total",
    "underutilized",
]


def compute(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the seconds of basic model parallelism, where one GPU computes at a time (equation 1).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    _checked(forward, backward)
    return sum(forward) + sum(backward)


def communication(transfer: Sequence[float]) -> float:
    """Return the seconds of communication: each border once forward and once backward (equation 2).

    Args:
        transfer: Seconds of each border between stages.
    """
    return 2 * sum(transfer)


def total(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], eta: int = 1) -> float:
    """Return the seconds of computation and communication in sequence (equation 3; equation 5 for micro-batches).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        transfer: Seconds of each border between stages.
        eta: Micro-batches.
    """
    return delayed(forward, backward, eta) + eta * communication(transfer)


def underutilized(forward: Sequence[float], backward: Sequence[float]) -> tuple[float, ...]:
    """Return the idle time of each GPU in percent of a step without communication (equation 4).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    seconds = compute(forward, backward)
    return tuple(100 * (seconds - (f + b)) / seconds for f, b in zip(forward, backward, strict=True))


def delayed(forward: Sequence[float], backward: Sequence[float], eta: int) -> float:
    """Return the seconds of delayed synchronisation: micro-batches in sequence, and one update (equation 5).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Micro-batches; the paper's N.
    """
    _at_least_one(eta=eta)
    return eta * compute(forward, backward)


def mast_printed(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return equation 6 as printed: ΣFP + 2 ΣBP + FP_n. Too low unless `mast_holds`.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    _checked(forward, backward)
    return sum(forward) + 2 * sum(backward) + forward[-1]


def mast_holds(forward: Sequence[float], backward: Sequence[float]) -> bool:
    """Return whether the inverted forward never falls behind, so that equation 6 and `master_bound` are exact.

    The forward follows the backward of the previous replication from the last GPU to the first. It ends right behind it
    if BP_1 + ... + BP_(n-i) >= FP_i + ... + FP_(n-1) for each i from 1 to n - 1. BP_(n-i) >= FP_i for each i is
    sufficient; equal stages satisfy it if a backward takes no less than a forward. Transfers are ignored.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    _checked(forward, backward)
    n = len(forward)
    return all(sum(backward[: n - i]) >= sum(forward[i - 1 : n - 1]) for i in range(1, n))


def mast(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float] | None = None) -> float:
    """Return the seconds of MAST, which is `master` with two replications.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        transfer: Seconds of each border between stages; `None` stands for 0.
    """
    return master(forward, backward, 2, transfer)


def mast_communication(transfer: Sequence[float], allreduce: float) -> float:
    """Return MAST's seconds of communication (equation 7), with the sum over n - 1 borders (printed: n).

    The step is longer by less than that. The forwards of the second replication and their transfers run concurrently
    with the backwards of the first, so three of the four Σlat add to the step if no forward falls behind. Exchanges run
    concurrently with the backwards of other stages, except that of the first stage: see `exchange`.

    Args:
        transfer: Seconds of each border between stages.
        allreduce: Seconds of one exchange of gradients, of which each GPU has two.
    """
    return 2 * allreduce + 4 * sum(transfer)


def mast_underutilized(forward: Sequence[float], backward: Sequence[float]) -> tuple[float, ...]:
    """Return the idle time of each GPU in percent of MAST's step without communication (equation 8, with `mast`).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    seconds = mast(forward, backward)
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    return tuple(100 * (1 - (first + second) / seconds) for first, second in zip(work, reversed(work), strict=True))


def master_printed(forward: Sequence[float], backward: Sequence[float], eta: int) -> float:
    """Return equation 9 as printed. The module docstring tells when it is correct; `master` always is.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
    """
    _at_least_one(eta=eta)
    stages, last = compute(forward, backward), forward[-1] + backward[-1]
    if eta % 2:
        return (eta + 1) / 2 * stages + (eta - 1) / 2 * last
    return eta / 2 * stages + (eta / 2 - 1) * last + forward[-1]


def master(
    forward: Sequence[float], backward: Sequence[float], eta: int, transfer: Sequence[float] | None = None
) -> float:
    """Return the seconds of MASTER: ΣFP + (η - 1) X + ΣBP, and the transfers of these passes.

    X is the time between the ends of two consecutive forwards. On the GPU of stage i the inverted forward waits for the
    backwards of stages n to n - i + 1, and then passes stages i to n:

        X = max over i of  BP_n + ... + BP_(n-i+1) + FP_i + ... + FP_n

    If i = n attains the maximum, X is ΣBP + FP_n, and the result is `master_bound`, or equation 6 for η = 2.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
        transfer: Seconds of each border between stages; `None` stands for 0.
    """
    borders = _checked(forward, backward, transfer, eta=eta)
    n = len(forward)
    between = max(
        sum(backward[n - i :]) + sum(borders[n - i :]) + sum(forward[i - 1 :]) + sum(borders[i - 1 :])
        for i in range(1, n + 1)
    )
    return compute(forward, backward) + communication(borders) + (eta - 1) * between


def master_bound(
    forward: Sequence[float], backward: Sequence[float], eta: int, transfer: Sequence[float] | None = None
) -> float:
    """Return the lower bound ΣFP + η ΣBP + (η - 1) FP_n + (η + 1) Σlat of MASTER, exact if `mast_holds`.

    Every backward waits for the last stage's forward, which waits for the previous backward. If FP_1 + ... + FP_(n-1) =
    BP_1 + ... + BP_(n-1), this is equation 9 for odd η, and equation 9 plus the missing ΣBP for even η.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
        transfer: Seconds of each border between stages; `None` stands for 0.
    """
    borders = _checked(forward, backward, transfer, eta=eta)
    return sum(forward) + eta * sum(backward) + (eta - 1) * forward[-1] + (eta + 1) * sum(borders)


def improved_printed(forward: Sequence[float], backward: Sequence[float], eta: int, allreduce: float = 0.0) -> float:
    """Return equation 10 as printed: the seconds that MASTER saves of equation 5, for even η.

    It is equation 5 minus the corrected equation 9. The module docstring tells when it is correct.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications, even.
        allreduce: Seconds of an exchange of gradients.
    """
    _checked(forward, backward, eta=eta)
    return eta / 2 * sum(forward[:-1]) + (eta / 2 - 1) * sum(backward[:-1]) - allreduce


def improved(forward: Sequence[float], backward: Sequence[float], eta: int, allreduce: float = 0.0) -> float:
    """Return the seconds that MASTER saves of equation 5: linear in η - 1, at most (η - 1) (FP_1 + ... + FP_(n-1)).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
        allreduce: Seconds of an exchange of gradients.
    """
    return delayed(forward, backward, eta) - master(forward, backward, eta) - allreduce


def improved_from_measured(two: float, four: float, eta: int) -> float:
    """Return the seconds that MASTER saves, extrapolated from measurements with η = 2 and η = 4 (equation 11).

    Args:
        two: Measured savings in seconds with η = 2.
        four: Measured savings in seconds with η = 4.
        eta: Replications.
    """
    _at_least_one(eta=eta)
    return (eta / 2 - 1) * (four - two) + two


# Many devices -------------------------------------------------------------------------------------------------------


def exchange(
    backward: Sequence[float],
    reduce: Sequence[float],
    transfer: Sequence[float] | None = None,
    inverted: bool = True,
) -> float:
    """Return the seconds by which the exchanges of gradients lengthen a step.

    The last backward goes from stage n to stage 1. Each stage's exchange starts when the backward has passed it, and
    runs concurrently with the remaining backwards. A device takes part in one exchange at a time. So at least the
    exchange of stage 1 lengthens the step.

    Args:
        backward: Seconds of each stage.
        reduce: Seconds of each stage's exchange; 0 for a stage that has one device.
        transfer: Seconds of each border between stages; `None` stands for 0.
        inverted: Whether stages i and n + 1 - i share their devices, as MAST's and MASTER's do.
    """
    n = len(backward)
    borders = _borders(n, transfer)
    remaining = [sum(backward[:stage]) + sum(borders[:stage]) for stage in range(n)]
    """Seconds from the end of each stage's last backward to the end of the last backward of all."""
    ends = [0.0]
    for stage in range(n):
        other, begin = n - 1 - stage, -remaining[stage]
        if inverted and stage < other:
            begin = max(begin, reduce[other] - remaining[other])
        ends.append(begin + reduce[stage])
    return max(ends)


def ring_all_reduce(amount: float, devices: int, bytes_per_second: float, latency: float = 0.0) -> float:
    """Return the seconds of a ring all-reduce: 2 (p - 1) rounds, each with 1/p of the bytes.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. Assumes that each
    device sends and receives concurrently, that no two links of the ring share a wire, and that additions take no time.

    Args:
        amount: Bytes of gradients.
        devices: Number of devices, p.
        bytes_per_second: Rate of each link.
        latency: Seconds of a message besides its bytes.
    """
    _at_least_one(devices=devices)
    return 2 * (devices - 1) * (latency + amount / devices / bytes_per_second)


def hybrid(
    forward: Sequence[float],
    backward: Sequence[float],
    eta: int,
    replicas: int,
    gradients: Sequence[float],
    bytes_per_second: float,
    latency: float = 0.0,
    transfer: Sequence[float] | None = None,
) -> float:
    """Return the seconds of a step of GEMS-Hybrid (V-C): parallel pipelines of η replications, and their exchanges.

    Assumptions besides those of `ring_all_reduce`: all devices are equal, pipelines wait for each other only in their
    exchanges, exchanges do not slow down transfers between stages, and reading data takes no time.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications of each pipeline: 1 is GEMS-HY Basic, 2 GEMS-HY MAST.
        replicas: Data-parallel copies, on n devices each.
        gradients: Bytes of each stage's gradients.
        bytes_per_second: Rate of the links between the devices of an exchange.
        latency: Seconds of a message of an exchange, besides its bytes.
        transfer: Seconds of each border between stages; `None` stands for 0.
    """
    _checked(forward, backward, transfer, eta=eta, replicas=replicas)
    n = len(forward)
    both_ways = [2 if eta > 1 and stage != n - 1 - stage else 1 for stage in range(n)]
    reduce = [
        ring_all_reduce(amount, ways * replicas, bytes_per_second, latency)
        for amount, ways in zip(gradients, both_ways, strict=True)
    ]
    return master(forward, backward, eta, transfer) + exchange(backward, reduce, transfer, inverted=eta > 1)


def scaling(
    forward: Sequence[float],
    backward: Sequence[float],
    eta: int,
    replicas: int,
    gradients: Sequence[float],
    bytes_per_second: float,
    latency: float = 0.0,
    transfer: Sequence[float] | None = None,
) -> float:
    """Return the throughput of several replicas over that of one replica; at most `replicas`.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications of each pipeline.
        replicas: Data-parallel copies, each with as many images as a single replica.
        gradients: Bytes of each stage's gradients.
        bytes_per_second: Rate of the links between the devices of an exchange.
        latency: Seconds of a message of an exchange, besides its bytes.
        transfer: Seconds of each border between stages; `None` stands for 0.
    """
    one, many = (
        hybrid(forward, backward, eta, count, gradients, bytes_per_second, latency, transfer) for count in (1, replicas)
    )
    return replicas * one / many


def _checked(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float] | None = None, **counts: int
) -> Sequence[float]:
    """Check that all sequences have matching lengths, and return the seconds of each border, 0 by default."""
    _at_least_one(**counts)
    if not len(forward) or len(forward) != len(backward):
        raise ValueError(
            "`forward` and `backward` need a number for each stage, at least one. "
            f"Received: forward={forward!r}, backward={backward!r}."
        )
    return _borders(len(forward), transfer)


def _at_least_one(**counts: int) -> None:
    for argument, value in counts.items():
        if value < 1:
            raise ValueError(f"`{argument}` must be at least 1. Received: {argument}={value!r}.")


def _borders(stages: int, transfer: Sequence[float] | None) -> Sequence[float]:
    borders = [0.0] * (stages - 1) if transfer is None else transfer
    if len(borders) != stages - 1:
        raise ValueError(
            f"`transfer` needs {stages - 1} numbers, one for each border between stages. "
            f"Received: transfer={transfer!r}."
        )
    return borders
