"""Facts about op types: the one table of op names.

A pass that needs to know which ops are sums, loops or elementwise derives a set with `ops_with`, or looks one op up
with `traits_of`. How an op runs on a tile is not a fact but a rule (`rewriters/rules/`). A table that maps op types to
functions lies beside these functions. `tests/ir/test_op_traits.py` holds all modules to this.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

__all__: list[str] = []


class Trait(enum.Flag):
    """A property that an op type has or has not."""

    ELEMENTWISE = enum.auto()
    """The operands are broadcast to the shape of the result; each entry depends on the same entry of the operands."""

    ADDITIVE = enum.auto()
    """Adds or subtracts its operands: linear in all of them together."""

    SUM = enum.auto()
    """Adds its operands. TensorFlow may reorder and flatten sums, which changes the rounding."""

    COMPARISON = enum.auto()
    """Compares two operands."""

    REDUCTION = enum.auto()
    """Reduces operand 0 over the axes in operand 1."""

    CONVOLUTION = enum.auto()
    """Dense convolution."""

    CONV_INPUT_GRADIENT = enum.auto()
    """Gradient of a dense convolution by its image."""

    CONV_FILTER_GRADIENT = enum.auto()
    """Gradient of a dense convolution by its filter."""

    DEPTHWISE_GRADIENT = enum.auto()
    """Gradient of a depthwise convolution."""

    SOFTMAX = enum.auto()
    """Normalises exponentials over the last axis, or takes the logarithm of that. The kernel may overwrite its operand,
    but plans that relied on it took up to a half more memory in loops of attention on a CPU."""

    VOLUMETRIC = enum.auto()
    """Convolution over three axes, or a gradient of one."""

    CONV_WRAPPER = enum.auto()
    """Keras and autodiff put it around a single convolution (dilation, an added dimension)."""

    FORWARDS_BUFFER = enum.auto()
    """With one output: the output is the buffer of operand 0 (an alias)."""

    REPEATS = enum.auto()
    """The result repeats the entries of the operand that holds no shape."""

    REORDERS = enum.auto()
    """The result has the entries of operand 0 in another order."""

    IN_PLACE = enum.auto()
    """The kernel may write the result into an operand's buffer if nothing else reads it."""

    FUSION_ROOT = enum.auto()
    """TensorFlow may fuse it with a `FUSION_EPILOGUE` that alone consumes it."""

    FUSION_EPILOGUE = enum.auto()
    """TensorFlow may fuse it into the contraction that it follows, or with another epilogue after it."""

    MATRIX_PRODUCT = enum.auto()
    """Multiplies two matrices or two batches of matrices."""

    SCALES = enum.auto()
    """TensorFlow may compute its constant operand with that of a product or quotient that alone consumes it."""

    FUSED_PADDING = enum.auto()
    """TensorFlow may fuse it into the contraction that alone consumes it."""

    NO_ALLOCATION = enum.auto()
    """The output exists anyway (an argument, a weight) or is counted elsewhere (a buffer of a loop)."""

    SHRINKABLE = enum.auto()
    """Elementwise with one or two operands, and as exact on operands before a broadcast as after it."""

    PADDING = enum.auto()
    """Pads operand 0 by the rows of operand 1."""

    SHAPE_QUERY = enum.auto()
    """Reads the shape of its operands, not their values."""

    OWN_LEADING_SIZE = enum.auto()
    """The leading size of the result is not that of an operand."""

    INDEX_ARITHMETIC = enum.auto()
    """Appears in the computation of indices from sample numbers, and passes an offset on."""

    SOURCE = enum.auto()
    """Has no data operand that it computes with: an argument, a constant, a handle."""

    READS_VARIABLE = enum.auto()
    """Reads a variable and never writes it. Any other op with a handle may write."""

    COUNTS = enum.auto()
    """Adds to a variable, or subtracts from it."""

    CALL = enum.auto()
    """Calls one function, which can be inlined."""

    PYTHON_CALL = enum.auto()
    """Calls a Python function, whose arrays the device's allocator does not hold."""

    LOOP = enum.auto()
    """A while loop, of the step or of tiles."""

    CONDITIONAL = enum.auto()
    """Runs one of several branches."""

    SETS_ELEMENT = enum.auto()
    """The result is operand 0, a tensor list, with the last operand as one of its elements."""


@dataclasses.dataclass(frozen=True)
class OpTraits:
    """All facts about an op type.

    Attributes:
        flags: Its traits.
        linear_in: Operands in which an elementwise op is linear while the others are forward values.
        shape_operand: Position of the operand that holds the shape, the sizes or the multiples of the result.
        gradient_of: Forward op whose operand 0 and result are operands 0 and 1 of this gradient.
    """

    flags: Trait = Trait(0)
    linear_in: tuple[int, ...] = ()
    shape_operand: int | None = None
    gradient_of: str | None = None


_NONE = OpTraits()


def is_gradient_kernel(op_type: str) -> bool:
    """Return whether an op type computes a gradient; TensorFlow names the kernels for gradients alike."""
    return "Backprop" in op_type or op_type.endswith("Grad")


def traits_of(op_type: str) -> OpTraits:
    """Return the facts about an op type; one without a row has no trait."""
    return OP_TRAITS.get(op_type, _NONE)


@functools.cache
def ops_with(trait: Trait) -> frozenset[str]:
    """Return the op types that have a trait, or all of a combination of traits."""
    return frozenset(op_type for op_type, traits in OP_TRAITS.items() if trait in traits.flags)


def is_random(op_type: str) -> bool:
    """Return whether an op draws random numbers, from a seed operand or from none."""
    return any(word in op_type for word in ("Random", "Multinomial", "TruncatedNormal"))


def is_stateless_random(op_type: str) -> bool:
    """Return whether the numbers of a random op depend on its seed operand alone."""
    return op_type.startswith("Stateless") and is_random(op_type)


def is_collective(op_type: str) -> bool:
    """Return whether an op exchanges tensors with its twins on other devices, and waits for them."""
    return op_type.startswith(("Collective", "Nccl"))


def has_own_leading_size(op_type: str) -> bool:
    """Return whether the leading size of the result is not that of an operand, by trait or by op family."""
    return op_type in ops_with(Trait.OWN_LEADING_SIZE) or any(family in op_type for family in _OWN_SIZE_FAMILIES)


_OWN_SIZE_FAMILIES = (
    *("Gather", "Unique", "Dynamic", "Segment", "TensorList", "Call"),
    *("Ragged", "SparseTo", "SparseTensor", "SparseRe"),
)
"""Parts of the names of op families."""

T = Trait  # A short name for the rows below.

_ROWS = (
    # Elementwise.
    (
        "Abs Exp Log Maximum Minimum Pow Reciprocal Rsqrt Sign Sqrt Square SquaredDifference",
        OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    ),
    (
        "Acos Acosh Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr BitwiseXor Cosh Digamma Erfinv FloorDiv "
        "FloorMod Inv IsFinite IsInf IsNan Lgamma LogicalAnd LogicalNot LogicalOr Mod Ndtri OnesLike Rint "
        "Sinh Tan Xdivy Xlog1py Xlogy",
        OpTraits(T.ELEMENTWISE),
    ),
    (
        "Add AddV2",
        OpTraits(
            T.ELEMENTWISE | T.ADDITIVE | T.SUM | T.IN_PLACE | T.FUSION_EPILOGUE | T.SHRINKABLE | T.INDEX_ARITHMETIC
        ),
    ),
    ("AddN", OpTraits(T.ELEMENTWISE | T.ADDITIVE | T.SUM | T.IN_PLACE)),
    ("Cast", OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE | T.INDEX_ARITHMETIC)),
    (
        "Ceil ClipByValue Cos Erf Erfc Expm1 Floor Log1p Round SelectV2 Selu Sin Softplus Softsign",
        OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    ),
    ("Div RealDiv", OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SCALES | T.SHRINKABLE, linear_in=(0,))),
    ("DivNoNan Neg", OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE, linear_in=(0,))),
    ("Elu LeakyRelu Relu Relu6 Sigmoid Tanh", OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE)),
    (
        "EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad",
        OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    ),
    ("Equal Greater GreaterEqual Less LessEqual NotEqual", OpTraits(T.ELEMENTWISE | T.COMPARISON)),
    (
        "Identity",
        OpTraits(
            T.ELEMENTWISE | T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.SHRINKABLE | T.INDEX_ARITHMETIC, linear_in=(0,)
        ),
    ),
    ("InvGrad ReciprocalGrad", OpTraits(T.ELEMENTWISE, linear_in=(1,))),
    ("Mul", OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SCALES | T.SHRINKABLE | T.INDEX_ARITHMETIC, linear_in=(0, 1))),
    ("MulNoNan", OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE, linear_in=(0, 1))),
    ("PreventGradient StopGradient", OpTraits(T.ELEMENTWISE | T.FORWARDS_BUFFER | T.SHRINKABLE, linear_in=(0,))),
    ("RsqrtGrad SigmoidGrad SqrtGrad TanhGrad", OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(1,))),
    ("Snapshot", OpTraits(T.ELEMENTWISE | T.FORWARDS_BUFFER, linear_in=(0,))),
    ("Sub", OpTraits(T.ELEMENTWISE | T.ADDITIVE | T.IN_PLACE | T.SHRINKABLE | T.INDEX_ARITHMETIC)),
    # Contractions, convolutions, pooling and their gradients.
    ("BatchMatMul", OpTraits(T.MATRIX_PRODUCT)),
    ("BatchMatMulV2 MatMul", OpTraits(T.FUSION_ROOT | T.MATRIX_PRODUCT)),
    ("Conv2D", OpTraits(T.CONVOLUTION | T.FUSION_ROOT)),
    ("Conv2DBackpropFilter", OpTraits(T.CONV_FILTER_GRADIENT)),
    ("Conv2DBackpropInput", OpTraits(T.CONV_INPUT_GRADIENT, shape_operand=0)),
    ("Conv3D", OpTraits(T.CONVOLUTION | T.VOLUMETRIC | T.FUSION_ROOT)),
    ("Conv3DBackpropFilterV2", OpTraits(T.CONV_FILTER_GRADIENT | T.VOLUMETRIC)),
    ("Conv3DBackpropInputV2", OpTraits(T.CONV_INPUT_GRADIENT | T.VOLUMETRIC, shape_operand=0)),
    ("DepthwiseConv2dNative", OpTraits(T.FUSION_ROOT)),
    ("DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput", OpTraits(T.DEPTHWISE_GRADIENT)),
    ("MaxPool3DGrad", OpTraits(gradient_of="MaxPool3D")),
    ("MaxPoolGrad", OpTraits(gradient_of="MaxPool")),
    # Reductions.
    ("All Any ArgMax ArgMin Max Mean Min Prod Sum", OpTraits(T.REDUCTION)),
    # Softmax.
    ("LogSoftmax Softmax", OpTraits(T.SOFTMAX)),
    # Shapes, layout and data movement.
    ("BatchToSpaceND SpaceToBatchND", OpTraits(T.CONV_WRAPPER)),
    ("BiasAdd", OpTraits(T.IN_PLACE | T.FUSION_EPILOGUE)),
    ("Bitcast EnsureShape IdentityN", OpTraits(T.FORWARDS_BUFFER)),
    ("BroadcastTo Tile", OpTraits(T.REPEATS | T.INDEX_ARITHMETIC, shape_operand=1)),
    ("ConcatV2 Pack StridedSlice", OpTraits(T.INDEX_ARITHMETIC)),
    ("CropAndResize Range Where", OpTraits(T.OWN_LEADING_SIZE)),
    ("ExpandDims Squeeze", OpTraits(T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.INDEX_ARITHMETIC)),
    ("Fill", OpTraits(T.REPEATS, shape_operand=0)),
    ("MirrorPad", OpTraits(T.PADDING)),
    ("Pad PadV2", OpTraits(T.FUSED_PADDING | T.PADDING)),
    ("Rank Size", OpTraits(T.SHAPE_QUERY)),
    ("Reshape", OpTraits(T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.INDEX_ARITHMETIC, shape_operand=1)),
    ("Select", OpTraits(T.IN_PLACE)),
    ("Shape ShapeN", OpTraits(T.CONV_WRAPPER | T.SHAPE_QUERY)),
    ("Slice", OpTraits(shape_operand=2)),
    ("StridedSliceGrad", OpTraits(shape_operand=0)),
    ("Transpose", OpTraits(T.REORDERS | T.INDEX_ARITHMETIC)),
    # Sources, variables and effects.
    ("AssignAddVariableOp AssignSubVariableOp", OpTraits(T.COUNTS)),
    ("Const NoOp", OpTraits(T.CONV_WRAPPER | T.NO_ALLOCATION | T.SOURCE)),
    ("Empty", OpTraits(T.NO_ALLOCATION, shape_operand=0)),
    ("Placeholder VarHandleOp", OpTraits(T.NO_ALLOCATION | T.SOURCE)),
    ("PlaceholderWithDefault", OpTraits(T.SOURCE)),
    ("ReadVariableOp", OpTraits(T.CONV_WRAPPER | T.NO_ALLOCATION | T.READS_VARIABLE)),
    ("ResourceGather ResourceGatherNd VarIsInitializedOp VariableShape", OpTraits(T.READS_VARIABLE)),
    # Calls, loops and conditionals.
    ("Case StatelessCase", OpTraits(T.CONDITIONAL)),
    ("EagerPyFunc PyFunc PyFuncStateless", OpTraits(T.PYTHON_CALL)),
    ("If StatelessIf", OpTraits(T.OWN_LEADING_SIZE | T.CONDITIONAL)),
    ("PartitionedCall StatefulPartitionedCall", OpTraits(T.CALL)),
    ("StatelessWhile While", OpTraits(T.OWN_LEADING_SIZE | T.LOOP)),
    ("TensorListPushBack TensorListSetItem", OpTraits(T.SETS_ELEMENT)),
)
"""Op types, and their facts: every op type that some module outside of the rules needs a fact about."""

OP_TRAITS: dict[str, OpTraits] = {op_type: traits for op_types, traits in _ROWS for op_type in op_types.split()}
