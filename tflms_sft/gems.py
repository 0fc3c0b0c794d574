"""How long GEMS' schedules take, by formula: Jain et al., "GEMS", SC '20, section VI, equations 1 to 11.

A network is cut into n partitions, one for each GPU: stages, in the words of this package. The paper's symbols are

| paper | here | |
|---|---|---|
| FP_i, BP_i | `forward[i - 1]`, `backward[i - 1]` | seconds of partition i for one micro-batch |
| lat_i1 + lat_i2 + ... | `transfer[i - 1]` | seconds of all tensors between i and i + 1, one way; n - 1 of them |
| N, η | `eta` | micro-batches of a step: delayed synchronisation's N, MASTER's replications η; 2 for MAST |
| T_allreduce | `allreduce` | seconds of one exchange of gradients |

Executing the schedules (`rewriters.pipelining.schedule_simulator`) shows which of the equations are what they take.
Where one is not, the function with the plain name is what is right, and the one that ends in `_printed` is the paper's.
"Level" stands for
FP_1 + ... + FP_(n-1) = BP_1 + ... + BP_(n-1).

| equation | is right |
|---|---|
| 1, 2, 3, 5: basic and delayed synchronisation | always |
| 4: idle time | without communication |
| 6: MAST | if `mast_holds`; otherwise MAST takes longer |
| 7: MAST's communication | as an amount, with a sum to n - 1; a step takes 3 Σlat and at least one exchange longer |
| 8: idle time of MAST | with the time of `mast` in place of equation 6 |
| 9: MASTER, odd η | if `mast_holds` and level; always for η = 1 |
| 9: MASTER, even η | never: it lacks a ΣBP, besides what odd η need |
| 10: improvement by MASTER | for even η, if `mast_holds` and level; level or not for η = 2 |
| 11: the same from two measurements | always, since the improvement is linear in η |

MASTER is at most 2η / (η + 1) times as fast as delayed synchronisation, and so MAST 4/3 times, whatever the stages.
With memory for several micro-batches at once a pipeline (GPipe, 1F1B) is faster than both; these are for a micro-batch
of one image that barely fits.

`ring_all_reduce`, `hybrid` and `scaling` are about many devices, for which the paper has measurements and no equation.
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
    """Equation 1: basic model parallelism, where one GPU computes at a time.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    _checked(forward, backward)
    return sum(forward) + sum(backward)


def communication(transfer: Sequence[float]) -> float:
    """Equation 2: every border once forward and once backward.

    Args:
        transfer: Seconds of each border between stages.
    """
    return 2 * sum(transfer)


def total(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], eta: int = 1) -> float:
    """Equation 3, with equation 5 for more than one micro-batch: all of it, one after another.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        transfer: Seconds of each border between stages.
        eta: Micro-batches.
    """
    return delayed(forward, backward, eta) + eta * communication(transfer)


def underutilized(forward: Sequence[float], backward: Sequence[float]) -> tuple[float, ...]:
    """Equation 4: for each GPU the part of a step in which it is idle, in percent.

    Communication is left out of the step.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    seconds = compute(forward, backward)
    return tuple(100 * (seconds - (f + b)) / seconds for f, b in zip(forward, backward, strict=True))


def delayed(forward: Sequence[float], backward: Sequence[float], eta: int) -> float:
    """Equation 5: delayed synchronisation, micro-batches one after another and one update.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Micro-batches; the paper's N.
    """
    _at_least_one(eta=eta)
    return eta * compute(forward, backward)


def mast_printed(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Equation 6, as printed: ΣFP + 2 ΣBP + FP_n. Too little unless `mast_holds`.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    _checked(forward, backward)
    return sum(forward) + 2 * sum(backward) + forward[-1]


def mast_holds(forward: Sequence[float], backward: Sequence[float]) -> bool:
    """Whether MAST, and MASTER's `master_bound`, take no longer than that: the inverted forward never falls behind.

    It follows the backward of the replication before from the last GPU to the first, and ends right behind it if BP_1 +
    ... + BP_(n-i) is at least FP_i + ... + FP_(n-1) for each i from 1 to n - 1. Each BP_(n-i) >= FP_i is enough, which
    equal stages have where a backward takes no less than a forward. Transfers are not counted.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    _checked(forward, backward)
    n = len(forward)
    return all(sum(backward[: n - i]) >= sum(forward[i - 1 : n - 1]) for i in range(1, n))


def mast(forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float] | None = None) -> float:
    """What MAST takes: `master` with two replications.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        transfer: Seconds of each border between stages. Defaults to 0.
    """
    return master(forward, backward, 2, transfer)


def mast_communication(transfer: Sequence[float], allreduce: float) -> float:
    """Equation 7: what MAST communicates, with the sum over the n - 1 borders that there are (printed: n).

    An amount, not an addition to the time of a step. The forwards of the second replication, and their transfers, run
    beside the backwards of the first, so that three of the four Σlat are time where they do not fall behind. Exchanges
    run beside the backwards of other stages, but for that of the first stage: see `exchange`.

    Args:
        transfer: Seconds of each border between stages.
        allreduce: Seconds of one exchange of gradients, of which each GPU has two.
    """
    return 2 * allreduce + 4 * sum(transfer)


def mast_underutilized(forward: Sequence[float], backward: Sequence[float]) -> tuple[float, ...]:
    """Equation 8: for each GPU the part of MAST's step in which it is idle, in percent, with the time of `mast`.

    Communication is left out of the step.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
    """
    seconds = mast(forward, backward)
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    return tuple(100 * (1 - (own + other) / seconds) for own, other in zip(work, reversed(work), strict=True))


def master_printed(forward: Sequence[float], backward: Sequence[float], eta: int) -> float:
    """Equation 9, as printed. See the top of this module; `master` is what it takes.

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
    """What MASTER takes: ΣFP + (η - 1) X + ΣBP, and the transfers of that.

    X is what passes between the ends of two forwards that follow each other. On the GPU of stage i the inverted forward
    waits for the backwards of stages n to n - i + 1, and from there it has stages i to n to go:

        X = max over i of  BP_n + ... + BP_(n-i+1) + FP_i + ... + FP_n

    At i = n that is ΣBP + FP_n, which makes `master_bound` of it, and equation 6 for η = 2.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
        transfer: Seconds of each border between stages. Defaults to 0.
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
    """ΣFP + η ΣBP + (η - 1) FP_n + (η + 1) Σlat: the least that MASTER takes, and all of it where `mast_holds`.

    Every backward waits for the last stage's forward, which waits for the backward before. Where FP_1 + ... + FP_(n-1)
    = BP_1 + ... + BP_(n-1) this is equation 9 for odd η, and for even η equation 9 with the ΣBP that it lacks.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
        transfer: Seconds of each border between stages. Defaults to 0.
    """
    borders = _checked(forward, backward, transfer, eta=eta)
    return sum(forward) + eta * sum(backward) + (eta - 1) * forward[-1] + (eta + 1) * sum(borders)


def improved_printed(forward: Sequence[float], backward: Sequence[float], eta: int, allreduce: float = 0.0) -> float:
    """Equation 10, as printed: what MASTER saves of equation 5, for even η. See the top of this module.

    It is equation 5 minus an equation 9 that has the ΣBP it lacks.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications, even.
        allreduce: Seconds of an exchange of gradients.
    """
    _checked(forward, backward, eta=eta)
    return eta / 2 * sum(forward[:-1]) + (eta / 2 - 1) * sum(backward[:-1]) - allreduce


def improved(forward: Sequence[float], backward: Sequence[float], eta: int, allreduce: float = 0.0) -> float:
    """What MASTER saves of equation 5: η - 1 times the same, at most (η - 1) (FP_1 + ... + FP_(n-1)).

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications.
        allreduce: Seconds of an exchange of gradients.
    """
    return delayed(forward, backward, eta) - master(forward, backward, eta) - allreduce


def improved_from_measured(two: float, four: float, eta: int) -> float:
    """Equation 11: what MASTER saves, by what it saves with two and with four replications.

    Args:
        two: Seconds that are saved with η = 2, as measured.
        four: Seconds that are saved with η = 4, as measured.
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
    """Seconds by which the exchanges of gradients make a step longer.

    The last backward goes from stage n to stage 1. Each stage's exchange starts when it has passed, beside the
    backwards that are left; a device takes part in one exchange at a time. So at least that of stage 1 is seen.

    Args:
        backward: Seconds of each stage.
        reduce: Seconds of each stage's exchange; 0 for a stage that has one device.
        transfer: Seconds of each border between stages. Defaults to 0.
        inverted: Whether stages i and n + 1 - i share their devices, as MAST's and MASTER's do.
    """
    n = len(backward)
    borders = _borders(n, transfer)
    left = [sum(backward[:stage]) + sum(borders[:stage]) for stage in range(n)]
    """Seconds from the end of each stage's last backward to the end of all."""
    ends = [0.0]
    for stage in range(n):
        other, begin = n - 1 - stage, -left[stage]
        if inverted and stage < other:
            begin = max(begin, reduce[other] - left[other])
        ends.append(begin + reduce[stage])
    return max(ends)


def ring_all_reduce(amount: float, devices: int, bytes_per_second: float, latency: float = 0.0) -> float:
    """Seconds in which devices in a ring add up and share an amount, in 2 (p - 1) rounds of 1/p of it each.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. It is assumed that
    each device sends and receives at once, that no two links of the ring share a wire, and that adding is for free.

    Args:
        amount: Bytes of gradients.
        devices: How many have them, p.
        bytes_per_second: Of each link.
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
    """Seconds of a step of GEMS-Hybrid (V-C): pipelines of η replications beside each other, and their exchanges.

    Besides what `ring_all_reduce` assumes: devices are all alike, pipelines do not wait for each other before their
    gradients are there, transfers between stages are not slowed down by exchanges, and reading data takes no time.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications of each pipeline: 1 is GEMS-HY Basic, 2 GEMS-HY MAST.
        replicas: Data-parallel copies, on n devices each.
        gradients: Bytes of each stage's gradients.
        bytes_per_second: Of the links that exchanges go through.
        latency: Seconds of one of their messages, besides its bytes.
        transfer: Seconds of each border between stages. Defaults to 0.
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
    """How many times as many images a second that many replicas train as one; `replicas` at best.

    Args:
        forward: Seconds of each stage.
        backward: Seconds of each stage.
        eta: Replications of each pipeline.
        replicas: Data-parallel copies, each with as many images as the one.
        gradients: Bytes of each stage's gradients.
        bytes_per_second: Of the links that exchanges go through.
        latency: Seconds of one of their messages, besides its bytes.
        transfer: Seconds of each border between stages. Defaults to 0.
    """
    one, many = (
        hybrid(forward, backward, eta, count, gradients, bytes_per_second, latency, transfer) for count in (1, replicas)
    )
    return replicas * one / many


def _checked(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float] | None = None, **counts: int
) -> Sequence[float]:
    """The seconds of each border, 0 if they were not given, once it is seen that all numbers go together."""
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
