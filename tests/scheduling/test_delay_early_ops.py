"""What could run long before anybody needs it waits, in a graph for swaps."""

import keras
import pytest
from equivalence import keras_step
from nets import conv

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.canonicalize import canonicalize
from rewriters.ir.graph import ancestors
from rewriters.scheduling.delay_early_ops import MIN_DELAYED_BYTES
from rewriters.swapping import swap_pass


@pytest.mark.parametrize("min_bytes", [1, 2**30])
def test_copies_of_weights_that_an_update_makes_wait_for_gradients_however_small(min_bytes):
    step = keras_step(lambda x: conv(12)(conv(12)(conv(12)(x))), (12, 10), 2, optimizer=keras.optimizers.SGD(0.1, 0.9))
    graph = canonicalize.read_canonical(step.concrete_fn, canonicalize.CanonicalMode.EXACT)
    early = [
        node.name
        for node in graph.nodes.values()
        if node.op == "Mul"
        and "sgd" in node.name
        and node.out().num_bytes() >= MIN_DELAYED_BYTES
        and not any(is_seed(before) for before in ancestors([node]))
    ]
    assert len(early) >= 2, "momentum times velocity is ready when the step begins"
    prepared = swap_pass.prepare_for_swapping(graph, min_bytes, 2).graph
    for name in early:
        assert any(is_seed(before) for before in ancestors([prepared.nodes[name]])), name
