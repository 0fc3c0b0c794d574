"""Each step of canonicalization on a small graph: lines with `-` before the step, with `+` after it."""

from graph_rewrites import passes, step

from rewriters.canonicalize import canonicalize
from rewriters.canonicalize.add_batch_axis import add_batch_axis
from rewriters.canonicalize.canonicalize import Canonicalization, CanonicalMode


def test_canonicalization_repeats_its_steps_and_drops_dead_ops():
    passes(lambda graph: Canonicalization(CanonicalMode.TILING)).check("""
        graph(x: float32[?,4], y: float32[?,4])
      - wrapped = (float32[?,4], float32[?,4]) IdentityN(x, y)
      - dead = float32[?,4] Exp(wrapped:1)
      - sizes = (int32[2], int32[2]) ShapeN(wrapped, wrapped:1) {N=2}
      - args = (int32[?], int32[?]) BroadcastGradientArgs(sizes, sizes:1)
      - same = float32[?,4] Sum(wrapped, args)
      - shaped = float32[?,4] Reshape(same, sizes)
      - out = float32[?,4] Tanh(shaped)
      + out = float32[?,4] Tanh(x)
        return out
    """)


def test_bypass_identity_n_consumers_read_and_await_operands_unless_it_waits_for_an_assertion():
    step(canonicalize._bypass_identity_n).check("""
        graph(x: float32[2], y: float32[2], positive: bool[])
        both = (float32[2], float32[2]) IdentityN(x, y)
      - again = float32[2] IdentityN(both:1)
      + again = float32[2] IdentityN(y)
      - reader = float32[2] Neg(again) after [again]
      + reader = float32[2] Neg(y) after [y]
      - late = float32[2] Neg(x) after [both]
      + late = float32[2] Neg(x) after [x, y]
        check = Assert(positive, x)
        checked = float32[2] IdentityN(x) after [check]
        effects check
      - return reader, late, both, checked
      + return reader, late, x, checked
    """)


def test_bypass_no_ops_are_bypassed_unless_they_wait_for_an_assertion():
    step(canonicalize._bypass_no_ops).check("""
        graph(x: float32[?,3], positive: bool[])
        sum = float32[?,3] Sum(x, [])
      - order = float32[?,3] Transpose(sum, [0, 1])
      + order = float32[?,3] Transpose(x, [0, 1])
      - shaped = float32[?,3] Reshape(order, [-1, 3])
      + shaped = float32[?,3] Reshape(x, [-1, 3])
        size = int32[2] Shape(x)
      - wide = float32[?,3] BroadcastTo(shaped, size)
      + wide = float32[?,3] BroadcastTo(x, size)
      - turned = float32[3,?] Transpose(wide, [1, 0])
      + turned = float32[3,?] Transpose(x, [1, 0])
      - total = float32[3] Sum(wide, 0)
      + total = float32[3] Sum(x, 0)
      - late = float32[?,3] Neg(x) after [shaped]
      + late = float32[?,3] Neg(x) after [x]
        check = Assert(positive, x)
        checked = float32[?,3] Reshape(x, [-1, 3]) after [check]
        effects check
        return turned, total, late, checked
    """)


def test_find_shapes_of_sums_and_by_operands_evaluates_axes_sizes_and_paddings():
    step(lambda graph, evaluate: all([find(graph, evaluate) for find in FINDERS])).check("""
        graph(x: float32[?,4,6], y: float32[6])
        sizes = (int32[3], int32[1]) ShapeN(x, y) {N=2}
        args = (int32[?], int32[?]) BroadcastGradientArgs(sizes, sizes:1)
      - sum = float32[...] Sum(x, args:1)
      + sum = float32[6] Sum(x, args:1)
      - kept = float32[...] Mean(x, args:1) {keep_dims=True}
      + kept = float32[1,1,6] Mean(x, args:1) {keep_dims=True}
        batch = int32[] StridedSlice(sizes, [0], [1], [1]) {shrink_axis_mask=1}
        to = int32[3] Pack(batch, 6, 4) {N=3}
      - shaped = float32[?,?,?] Reshape(x, to)
      + shaped = float32[?,6,4] Reshape(x, to)
      - padded = float32[?,?,?] Pad(x, [[0, 0], [1, 1], [0, 2]])
      + padded = float32[?,6,8] Pad(x, [[0, 0], [1, 1], [0, 2]])
        return sum, kept, shaped, padded
    """)


FINDERS = canonicalize._find_shapes_of_sums, canonicalize._find_shapes_by_operands


def test_infer_shapes_of_consumers_of_known_shapes():
    step(canonicalize._infer_shapes).check("""
        graph(x: float32[?,4,6])
      - tanh = float32[?,?,?] Tanh(x)
      + tanh = float32[?,4,6] Tanh(x)
      - turned = float32[...] Transpose(tanh, [0, 2, 1])
      + turned = float32[?,6,4] Transpose(tanh, [0, 2, 1])
        return turned
    """)


def test_find_shapes_by_operands_padding_of_unknown_rank_stays_open():
    step(canonicalize._find_shapes_by_operands, run=False).check("""
        graph(x: float32[...])
        padded = float32[?,?] Pad(x, [[1, 1], [0, 2]])
        return padded
    """)


def test_sum_repetitions_gradient_of_a_tiled_row_becomes_a_sum_but_not_that_of_several_rows():
    step(canonicalize._sum_repetitions).check("""
        graph(dy: float32[2,6,5])
        split = float32[1,2,6,1,1,5] Reshape(dy, [1, 2, 6, 1, 1, 5])
        dx = float32[2,1,5] Sum(split, [0, 2, 4])
      - late = float32[2,6,5] Neg(dy) after [dx]
      + late = float32[2,6,5] Neg(dy) after [dx/repeated]
        rows = float32[1,2,3,2,1,5] Reshape(dy, [1, 2, 3, 2, 1, 5])
        of_rows = float32[2,2,5] Sum(rows, [0, 2, 4])
      - return dx, late, of_rows
      + dx/repeated = float32[2,1,5] Sum(dy, [1]) {keep_dims=True}
      + return dx/repeated, late, of_rows
    """)


def test_connect_frames_slices_and_transpositions_of_a_stack_are_frames():
    step(canonicalize._connect_frames).check("""
        graph(x: float32[4,2,5])
        times = float32[2,4,5] Transpose(x, [1, 0, 2])
        frames = (float32[4,5], float32[4,5]) Unpack(times) {num=2}
      + frames/Unpack = (float32[4,5], float32[4,5]) Unpack(x) {axis=1, num=2}
      - relu = float32[4,5] Relu(frames)
      + relu = float32[4,5] Relu(frames/Unpack)
      - late = float32[4,5] Exp(frames:1) after [frames]
      + late = float32[4,5] Exp(frames/Unpack:1) after [frames/Unpack]
        stack = float32[2,4,5] Pack(relu, late) {N=2}
        second = float32[4,5] StridedSlice(stack, [1], [2], [1]) {shrink_axis_mask=1}
      - tanh = float32[4,5] Tanh(second)
      + tanh = float32[4,5] Tanh(late)
        out = float32[4,2,5] Transpose(stack, [1, 0, 2])
      + out/Pack = float32[4,2,5] Pack(relu, late) {N=2, axis=1}
      - return tanh, out
      + return tanh, out/Pack
    """)


def test_connect_frames_sum_of_padded_gradients_becomes_a_stack():
    step(canonicalize._connect_frames).check("""
        graph(da: float32[4,5], db: float32[4,5], rest: float32[2,4,5])
        a = float32[2,4,5] StridedSliceGrad([2, 4, 5], [0], [1], [1], da) {shrink_axis_mask=1}
        b = float32[2,4,5] StridedSliceGrad([2, 4, 5], [1], [2], [1], db) {shrink_axis_mask=1}
        sum = float32[2,4,5] AddN(a, rest, b) {N=3}
      + sum/Pack = float32[2,4,5] Pack(da, db) {N=2}
      + sum/AddN = float32[2,4,5] AddN(sum/Pack, rest) {N=2}
      - return sum
      + return sum/AddN
    """)


def test_gather_from_values_gathers_from_the_value_of_a_variable_of_known_shape():
    step(canonicalize._gather_from_values).check("""
        graph(table: resource of float32[7,4], other: resource of float32[7,4], words: int32[?,3])
        read = float32[7,4] ReadVariableOp(table)
        rows = float32[?,3,4] ResourceGather(table, words)
        open = float32[?,3,4] ResourceGather(other, words)
      + rows/ReadVariableOp = float32[7,4] ReadVariableOp(table)
      + rows/GatherV2 = float32[?,3,4] GatherV2(rows/ReadVariableOp, words, 0)
      - effects open, rows
      + effects open
      - return rows, read, open
      + return rows/GatherV2, read, open
    """)


def test_release_constants_whose_consumers_wait_for_no_effect_through_them():
    step(canonicalize._release_constants).check("""
        graph(x: float32[2], positive: bool[])
        check = Assert(positive, x)
        exp = float32[2] Exp(x)
      - free = float32[] Const() {value=2.0} after [exp]
        guarded = float32[] Const() {value=3.0} after [check]
      - double = float32[2] Mul(x, free)
      + double = float32[2] Mul(x, 2.0)
        triple = float32[2] Mul(x, guarded)
        effects check
        return double, triple
    """)


def test_split_shapes_one_shape_for_each_operand():
    step(canonicalize._split_shapes).check("""
        graph(x: float32[?,3], positive: bool[])
        check = Assert(positive, x)
        exp = float32[?,3] Exp(x)
        sizes = (int32[2], int64[2]) ShapeN(x, exp) {N=2}
        number = int32[] Size(x)
        rank = int32[] Rank(exp) after [check]
      - late = float32[?,3] Neg(x) after [sizes]
      + late = float32[?,3] Neg(x) after [sizes/shape_0, sizes/shape_1]
      + sizes/shape_0 = int32[2] Shape(x)
      + sizes/shape_1 = int64[2] Shape(exp)
      + number/shape_0 = int32[2] Shape(x)
      + number/product = int32[] Prod(number/shape_0, [0])
      + rank/static = int32[] Const() {value=2} after [check]
        effects check
      - return sizes, number, rank, late
      + return sizes/shape_0, number/product, rank/static, late
    """)


def test_freeze_shapes_known_sizes_become_constants():
    step(canonicalize._freeze_shapes).check("""
        graph(x: float32[2,3], open: float32[?,3])
        exp = float32[2,3] Exp(x)
        known = int32[2] Shape(exp) after [exp]
        unknown = int32[2] Shape(open)
      + known/static_0 = int32[2] Const() {value=[2, 3]} after [exp]
      - args = (int32[?], int32[?]) BroadcastGradientArgs(known, [3])
      + args = (int32[?], int32[?]) BroadcastGradientArgs(known/static_0, [3])
        offsets = (int32[2], int32[2]) ConcatOffset(1, [2, 3], [2, 4]) {N=2}
      - sum = float32[3] Sum(x, args:1)
      + sum = float32[3] Sum(x, [0])
      - both = int32[2] AddV2(known, offsets:1)
      + both = int32[2] AddV2(known/static_0, [0, 3])
        return sum, both, unknown
    """)


def test_add_batch_axis_to_weights_with_pixels_and_their_gradients():
    step(add_batch_axis).check("""
        graph(x: float32[?,4,5,3], mask: float32[4,5,3], means: float32[1,1,3])
      - masked = float32[?,4,5,3] Mul(x, mask)
      + masked/ExpandDims = float32[1,4,5,3] ExpandDims(mask, 0)
      + masked = float32[?,4,5,3] Mul(x, masked/ExpandDims)
        scaled = float32[?,4,5,3] Mul(masked, means)
      - gradient = float32[4,5,3] Sum(scaled, 0)
        bias = float32[3] Sum(scaled, [0, 1, 2])
      - late = float32[3] Exp(bias) after [gradient]
      - return gradient, late
      + late = float32[3] Exp(bias) after [gradient/Reshape]
      + gradient/Sum = float32[1,4,5,3] Sum(scaled, 0) {keep_dims=True}
      + gradient/Reshape = float32[4,5,3] Reshape(gradient/Sum, [4, 5, 3])
      + return gradient/Reshape, late
    """)
