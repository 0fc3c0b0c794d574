"""`LMSParams.tuned`: swap parameters for a budget, found by the memory model and confirmed by a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from rewriters.errors import BudgetError
from tflms_sft._machine.calibration import machine_rates
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.plan_description import takes_most
from tflms_sft._planner.swap_planner import apply_swaps
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._rewrite.measure import measure
from tflms_sft._rewrite.rewrite import require_batch, rewrite
from tflms_sft._search.traced_step import TracedStep, analyse_step, collector_paused
from tflms_sft._trace.step_tracing import batch_of, trace_step
from tflms_sft._util.byte_sizes import format_bytes

MAX_RUNS = 3
"""Confirming runs; each but the first follows one that exceeded the budget."""


class LMSParams(SwapParams):
    """Parameters of large model support by swapping (Le et al., "TFLMS", 2018, Table 2).

    Activations are swapped out of device memory once they are computed, and swapped in before the backward pass reads
    them. γ is the level of an op in a topological order.

    Args:
        optimizer_scopes (str | Collection[str]): Name scopes of further ops of the backward pass, which is otherwise
            derived from the graph.
        starting_scope: Scope of ops; tensors reachable from them are swapped. `None`: tensors reachable from the
            arguments of the step.
        starting_op_names (str | Collection[str] | None): Names of ops; tensors reachable from them are swapped.
        excl_scopes (str | Collection[str]): Scopes whose tensors are not swapped, even if `incl_scopes` includes them.
        incl_scopes (str | Collection[str]): Scopes whose tensors are swapped; if these or `incl_types` are given, no
            others are.
        excl_types (str | Collection[str]): Op types, such as `"Relu"`, whose outputs are not swapped.
        incl_types (str | Collection[str]): Op types whose outputs are swapped.
        n_tensors: Maximum number of swapped tensors, counted from the start of the step; -1 for all. Fewer take less
            time; `LMSParams.tuned` finds the smallest sufficient number.
        lb: Minimum lead of a swap-in: with `"direct_order"` in γ before the consumer, with `"chain_rule"` in forward
            ops after the producer. A larger lead overlaps more of the transfer with computation and holds more bytes on
            the device.
        ub: Maximum lead of a swap-in, in the unit of `lb`.
        ctrld_strategy: Search for the op that triggers a swap-in: `"chain_rule"` (Algorithm 2) or `"direct_order"`
            (Algorithm 1), which holds fewer bytes. Consumers in the forward pass always use the latter.
        fuse_swapins: Whether close consumers of a tensor share one swap-in: fewer transfers, held longer.
        swap_branches: Whether tensors with a distant consumer in the forward pass, such as skip connections, are
            swapped too.
        branch_threshold: Distance in γ above which a forward consumer is distant.
        tier: Destination: `"host"` memory beside an accelerator, `"disk"`, or `"auto"`: host memory with an
            accelerator, otherwise disk.
        spill_dir (str | os.PathLike[str] | None): Directory for the disk tier, best on a fast local disk. `None`: the
            system's directory for temporary files, or `/var/tmp` if that one lies in memory.
        page_cache: Whether written data may stay in the page cache, which the operating system can reclaim. With
            `False`, every write waits for the disk: for machines and containers whose memory is full.
        min_bytes (int | str): Minimum size of a swapped tensor: an int, or a string such as `"1MiB"`. Each swap is a
            call into Python, so small ones cost more than they save. A tensor list of a loop counts with all its
            elements.
        fuse_distance: Distance in γ up to which consumers are close.
        max_in_flight: Maximum number of concurrent swap-outs; 1 holds the fewest bytes. `None`: 2, and with host memory
            beside an accelerator 1 to 3, so that the link is busy.
        lead: Lead of a swap-in within `lb` and `ub`, over the smallest lead with which its consumer does not wait for
            the transfer, by the cost model; 0 for none. `None`: automatic with host memory beside an accelerator,
            otherwise 0, because transfers and computation compete there.

    Attributes:
        directory: Directory of the disk tier.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the directory is not writable.

    Examples:
        >>> params = tflms_sft.LMSParams(tier="disk", spill_dir="/scratch", min_bytes="4MiB")
        >>> step = tflms_sft.rewrite(train_step, params, images, labels)
    """

    @classmethod
    def tuned(
        cls, step: Any, memory_budget: int | str, *example_args: Any, headroom: float = 0.1, **params: Any
    ) -> LMSParams:
        """Return the parameters with the fewest swaps, then the earliest swap-ins, for a budget (TFLMS, section 5.2).

        The search minimises `n_tensors`, then maximises `lb`, with peaks from the memory model. With an automatic
        `lead` it also tries that lead, which needs more swaps, and takes the faster parameters. A run of the step
        confirms the result; its variables are restored afterwards. If the run exceeds the budget, the search
        repeats with a budget that is smaller by the excess.

        Args:
            step (tf.function | ConcreteFunction): A training step, as for `rewrite`.
            memory_budget: Upper bound for the bytes alive on the device: an int, or a string such as `"8GiB"`.
            *example_args: Arguments of a step. With `tf.TensorSpec`s, and for a `ConcreteFunction`, no run confirms the
                result.
            headroom: Fraction of the budget that the prediction leaves free, from 0 to below 1.
            **params: Arguments of `LMSParams`. The result swaps at most `n_tensors`, at least `lb` ahead.

        Returns:
            Parameters for `rewrite`.

        Raises:
            BudgetError: If the step does not fit with all tensors swapped.
            SwapError: If no tensor can be swapped.
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.

        Examples:
            >>> params = tflms_sft.LMSParams.tuned(train_step, "2GiB", images, labels)
            >>> step = tflms_sft.rewrite(train_step, params, images, labels)
        """
        base = cls(**params)
        tuned = _tuned(step, memory_budget, example_args, headroom, base)
        chosen = {name: getattr(tuned, name) for name in ("n_tensors", "lb", "lead", "max_in_flight")}
        return dataclasses.replace(base, **chosen)


def _tuned(step: Any, memory_budget: Any, example_args: Any, headroom: float, base: SwapParams) -> SwapParams:
    auto = AutoParams(memory_budget, headroom, base)
    concrete_fn, record = trace_step(step, example_args, {})
    batch = batch_of(example_args)
    with collector_paused():
        traced = analyse_step(concrete_fn, record, batch)
        traced.analysis.require_backward()
        traced = dataclasses.replace(traced, rates=machine_rates())
        require_batch(traced, batch)
        budget = int(auto.resolved(traced.fixed_bytes).memory_budget)
        apply_swaps(traced, traced.analysis.graph, base)  # Raises the errors of `base` before the search.
        swaps = SwapSearch(traced, [], base)
    limit = int(budget * (1 - auto.headroom))
    for _ in range(MAX_RUNS):
        with collector_paused():
            candidate = swaps.tuned(limit)
        if candidate is None:
            break
        excess = _measured(step, candidate, example_args) - budget
        if excess <= 0:
            return candidate
        limit -= excess
    raise _too_small(traced, swaps, budget, auto.headroom)


def _measured(step: Any, params: SwapParams, example_args: Any) -> int:
    """Return the measured peak of the rewritten step in bytes; 0 without arguments to run it with."""
    leaves = tf.nest.flatten(example_args)
    if not leaves or any(isinstance(leaf, tf.TypeSpec) for leaf in leaves):
        return 0
    arguments = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), example_args)
    return measure(rewrite(step, params, *arguments), *arguments).peak_bytes


def _too_small(traced: TracedStep, swaps: SwapSearch, budget: int, headroom: float) -> BudgetError:
    """Return the error for a budget that the step exceeds with all tensors swapped."""
    best = swaps.smallest
    assert best is not None, "some tensor can be swapped"
    count, peak = best
    smallest = int(peak.peak_bytes / (1 - headroom)) + 1
    parts, name = takes_most(traced, [], peak)
    error = BudgetError(
        f"`memory_budget` is too small for this step with swaps alone. Received: {format_bytes(budget)} ({budget} "
        f"bytes). With {count} tensors swapped its predicted need is {format_bytes(smallest)} ({smallest} bytes, "
        f"headroom of {headroom:.0%} included), of which {parts}. Raise the budget, lower `min_bytes`, or use "
        "`AutoParams`, which tiles as well."
    )
    error.smallest_bytes = smallest
    error.tensor = name
    return error
