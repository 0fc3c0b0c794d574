"""Broadcast operands of elementwise ops are read from their source."""

from graph_rewrites import passes

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.swapping.shrink_broadcasts import ShrinkBroadcasts


def shrinking():
    return passes(lambda graph: ShrinkBroadcasts(GraphAnalysis))


def test_shrink_broadcasts_elementwise_ops_read_sources():
    shrinking().check("""
        graph(x: float32[?,4,5,3], total: float32[])
      - size = int32[4] Shape(x)
        mean = float32[?,1,1,3] Mean(x, [1, 2]) {keep_dims=True}
      - wide = float32[?,4,5,3] BroadcastTo(mean, size)
      - third = float32[?,4,5,3] RealDiv(wide, 3.0)
      + third/small = float32[?,1,1,3] RealDiv(mean, 3.0)
      - sum = float32[?,4,5,3] AddV2(x, third)
      + sum = float32[?,4,5,3] AddV2(x, third/small)
      - filled = float32[?,4,5,3] Fill(size, total)
      - square = float32[?,4,5,3] Pow(filled, 2.0)
      - half = float32[4,5,3] Fill([4, 5, 3], total)
      - cast = float64[4,5,3] Cast(half)
      + cast/small = float64[] Cast(total)
      - back = float32[4,5,3] Cast(cast)
      + back/small = float32[] Cast(cast/small)
      - largest = float32[?,4,5,3] Maximum(back, sum)
      + largest = float32[?,4,5,3] Maximum(back/small, sum)
      + square/small = float32[] Pow(total, 2.0)
      - product = float32[?,4,5,3] Mul(largest, square)
      + product = float32[?,4,5,3] Mul(largest, square/small)
        return product
    """)


def test_shrink_broadcasts_sums_of_several_terms_become_additions_in_their_order():
    shrinking().check("""
        graph(x: float32[2,4], total: float32[])
      - a = float32[2,4] Tile(x, [1, 1])
        b = float32[2,4] Exp(x)
      - c = float32[2,4] Fill([2, 4], total)
      - sum = float32[2,4] AddN(c, b, a) {N=3}
      + sum/small = float32[2,4] AddV2(x, b)
      + sum/small_1 = float32[2,4] Snapshot(sum/small)
      + sum = float32[2,4] AddV2(sum/small_1, total)
        return sum
    """)


def test_shrink_broadcasts_consumers_of_the_full_size_and_flattened_sums_read_the_copy():
    shrinking().check("""
        graph(x: float32[2,4], total: float32[], w: float32[4,4])
        repeated = float32[4,4] Tile(x, [2, 1])
        doubled = float32[4,4] Mul(repeated, 2.0)
        filled = float32[2,4] Fill([2, 4], total)
        product = float32[2,4] MatMul(filled, w)
        scaled = float32[2,4] Mul(filled, 2.0)
        both = float32[2,8] ConcatV2(x, scaled, 1) {N=2}
        mean = float32[2] Mean(scaled, 1)
        rows = float32[4] Fill([4], total)
        between = float32[2,4] Mul(scaled, rows)
        first = float32[2,4] AddV2(filled, x)
        second = float32[2,4] AddV2(first, x)
        lists = variant[] TensorListFromTensor(x, [4])
        list = variant[] AddN(lists, lists, lists) {N=3}
        stack = float32[2,4] TensorListStack(list, [4])
        return doubled, product, both, mean, between, filled, second, stack
    """)


def test_shrink_broadcasts_sizes_that_may_differ_are_not_compared():
    shrinking().check("""
        graph(x: float32[?,2], total: float32[])
        one = float32[1,2] GatherV2(x, [1], 0)
      - filled = float32[1,2] Fill([1, 2], total)
      - sum = float32[1,2] AddV2(one, filled)
      + sum = float32[1,2] AddV2(one, total)
        product = float32[?,2] Mul(sum, x)
        return product
    """)


def test_shrink_broadcasts_ops_that_wait_for_a_copy_wait_for_its_source():
    shrinking().check("""
        graph(x: float32[2,4], v: resource of float32[])
        total = float32[] Sum(x, [0, 1])
      - filled = float32[2,4] Fill([2, 4], total)
      - product = float32[2,4] Mul(x, filled)
      + product = float32[2,4] Mul(x, total)
      - update = AssignAddVariableOp(v, 1.0) after [filled]
      + update = AssignAddVariableOp(v, 1.0) after [total]
        effects update
        return product
    """)
