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

OP_TRAITS: dict[str, OpTraits] = {
    # Elementwise.
    "Abs": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "Acos": OpTraits(T.ELEMENTWISE),
    "Acosh": OpTraits(T.ELEMENTWISE),
    "Add": OpTraits(
        T.ELEMENTWISE | T.ADDITIVE | T.SUM | T.IN_PLACE | T.FUSION_EPILOGUE | T.SHRINKABLE | T.INDEX_ARITHMETIC
    ),
    "AddN": OpTraits(T.ELEMENTWISE | T.ADDITIVE | T.SUM | T.IN_PLACE),
    "AddV2": OpTraits(
        T.ELEMENTWISE | T.ADDITIVE | T.SUM | T.IN_PLACE | T.FUSION_EPILOGUE | T.SHRINKABLE | T.INDEX_ARITHMETIC
    ),
    "Asin": OpTraits(T.ELEMENTWISE),
    "Asinh": OpTraits(T.ELEMENTWISE),
    "Atan": OpTraits(T.ELEMENTWISE),
    "Atan2": OpTraits(T.ELEMENTWISE),
    "Atanh": OpTraits(T.ELEMENTWISE),
    "BitwiseAnd": OpTraits(T.ELEMENTWISE),
    "BitwiseOr": OpTraits(T.ELEMENTWISE),
    "BitwiseXor": OpTraits(T.ELEMENTWISE),
    "Cast": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE | T.INDEX_ARITHMETIC),
    "Ceil": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "ClipByValue": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Cos": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Cosh": OpTraits(T.ELEMENTWISE),
    "Div": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE | T.SCALES, linear_in=(0,)),
    "Digamma": OpTraits(T.ELEMENTWISE),
    "DivNoNan": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE, linear_in=(0,)),
    "Elu": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE),
    "EluGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "Equal": OpTraits(T.ELEMENTWISE | T.COMPARISON),
    "Erf": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Erfc": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Erfinv": OpTraits(T.ELEMENTWISE),
    "Exp": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "Expm1": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Floor": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "FloorDiv": OpTraits(T.ELEMENTWISE),
    "FloorMod": OpTraits(T.ELEMENTWISE),
    "Greater": OpTraits(T.ELEMENTWISE | T.COMPARISON),
    "GreaterEqual": OpTraits(T.ELEMENTWISE | T.COMPARISON),
    "Identity": OpTraits(
        T.ELEMENTWISE | T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.SHRINKABLE | T.INDEX_ARITHMETIC,
        linear_in=(0,),
    ),
    "Inv": OpTraits(T.ELEMENTWISE),
    "InvGrad": OpTraits(T.ELEMENTWISE, linear_in=(1,)),
    "IsFinite": OpTraits(T.ELEMENTWISE),
    "IsInf": OpTraits(T.ELEMENTWISE),
    "IsNan": OpTraits(T.ELEMENTWISE),
    "LeakyRelu": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE),
    "LeakyReluGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "Less": OpTraits(T.ELEMENTWISE | T.COMPARISON),
    "LessEqual": OpTraits(T.ELEMENTWISE | T.COMPARISON),
    "Lgamma": OpTraits(T.ELEMENTWISE),
    "Log": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "Log1p": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "LogicalAnd": OpTraits(T.ELEMENTWISE),
    "LogicalNot": OpTraits(T.ELEMENTWISE),
    "LogicalOr": OpTraits(T.ELEMENTWISE),
    "Maximum": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "Minimum": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "Mod": OpTraits(T.ELEMENTWISE),
    "Mul": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE | T.INDEX_ARITHMETIC | T.SCALES, linear_in=(0, 1)),
    "MulNoNan": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE, linear_in=(0, 1)),
    "Ndtri": OpTraits(T.ELEMENTWISE),
    "Neg": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE, linear_in=(0,)),
    "NotEqual": OpTraits(T.ELEMENTWISE | T.COMPARISON),
    "OnesLike": OpTraits(T.ELEMENTWISE),
    "Pow": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "PreventGradient": OpTraits(T.ELEMENTWISE | T.FORWARDS_BUFFER | T.SHRINKABLE, linear_in=(0,)),
    "RealDiv": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE | T.SCALES, linear_in=(0,)),
    "Reciprocal": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "ReciprocalGrad": OpTraits(T.ELEMENTWISE, linear_in=(1,)),
    "Relu": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE),
    "Relu6": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE),
    "Relu6Grad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "ReluGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "Rint": OpTraits(T.ELEMENTWISE),
    "Round": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Rsqrt": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "RsqrtGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(1,)),
    "SelectV2": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Selu": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "SeluGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "Sigmoid": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE),
    "SigmoidGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(1,)),
    "Sign": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "Sin": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "Sinh": OpTraits(T.ELEMENTWISE),
    "Snapshot": OpTraits(T.ELEMENTWISE | T.FORWARDS_BUFFER, linear_in=(0,)),
    "Softplus": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "SoftplusGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "Softsign": OpTraits(T.ELEMENTWISE | T.IN_PLACE),
    "SoftsignGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(0,)),
    "Sqrt": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "SqrtGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(1,)),
    "Square": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "SquaredDifference": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.SHRINKABLE),
    "StopGradient": OpTraits(T.ELEMENTWISE | T.FORWARDS_BUFFER | T.SHRINKABLE, linear_in=(0,)),
    "Sub": OpTraits(T.ELEMENTWISE | T.ADDITIVE | T.IN_PLACE | T.SHRINKABLE | T.INDEX_ARITHMETIC),
    "Tan": OpTraits(T.ELEMENTWISE),
    "Tanh": OpTraits(T.ELEMENTWISE | T.IN_PLACE | T.FUSION_EPILOGUE),
    "TanhGrad": OpTraits(T.ELEMENTWISE | T.IN_PLACE, linear_in=(1,)),
    "Xdivy": OpTraits(T.ELEMENTWISE),
    "Xlog1py": OpTraits(T.ELEMENTWISE),
    "Xlogy": OpTraits(T.ELEMENTWISE),
    # Contractions, convolutions, pooling and their gradients.
    "BatchMatMul": OpTraits(T.MATRIX_PRODUCT),
    "BatchMatMulV2": OpTraits(T.FUSION_ROOT | T.MATRIX_PRODUCT),
    "Conv2D": OpTraits(T.CONVOLUTION | T.FUSION_ROOT),
    "Conv2DBackpropFilter": OpTraits(T.CONV_FILTER_GRADIENT),
    "Conv2DBackpropInput": OpTraits(T.CONV_INPUT_GRADIENT, shape_operand=0),
    "Conv3D": OpTraits(T.CONVOLUTION | T.VOLUMETRIC | T.FUSION_ROOT),
    "Conv3DBackpropFilterV2": OpTraits(T.CONV_FILTER_GRADIENT | T.VOLUMETRIC),
    "Conv3DBackpropInputV2": OpTraits(T.CONV_INPUT_GRADIENT | T.VOLUMETRIC, shape_operand=0),
    "DepthwiseConv2dNative": OpTraits(T.FUSION_ROOT),
    "DepthwiseConv2dNativeBackpropFilter": OpTraits(T.DEPTHWISE_GRADIENT),
    "DepthwiseConv2dNativeBackpropInput": OpTraits(T.DEPTHWISE_GRADIENT),
    "MatMul": OpTraits(T.FUSION_ROOT | T.MATRIX_PRODUCT),
    "MaxPool3DGrad": OpTraits(gradient_of="MaxPool3D"),
    "MaxPoolGrad": OpTraits(gradient_of="MaxPool"),
    # Reductions.
    "All": OpTraits(T.REDUCTION),
    "Any": OpTraits(T.REDUCTION),
    "ArgMax": OpTraits(T.REDUCTION),
    "ArgMin": OpTraits(T.REDUCTION),
    "Max": OpTraits(T.REDUCTION),
    "Mean": OpTraits(T.REDUCTION),
    "Min": OpTraits(T.REDUCTION),
    "Prod": OpTraits(T.REDUCTION),
    "Sum": OpTraits(T.REDUCTION),
    # Softmax.
    "LogSoftmax": OpTraits(T.SOFTMAX),
    "Softmax": OpTraits(T.SOFTMAX),
    # Shapes, layout and data movement.
    "BatchToSpaceND": OpTraits(T.CONV_WRAPPER),
    "BiasAdd": OpTraits(T.IN_PLACE | T.FUSION_EPILOGUE),
    "Bitcast": OpTraits(T.FORWARDS_BUFFER),
    "BroadcastTo": OpTraits(T.INDEX_ARITHMETIC | T.REPEATS, shape_operand=1),
    "ConcatV2": OpTraits(T.INDEX_ARITHMETIC),
    "CropAndResize": OpTraits(T.OWN_LEADING_SIZE),
    "EnsureShape": OpTraits(T.FORWARDS_BUFFER),
    "ExpandDims": OpTraits(T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.INDEX_ARITHMETIC),
    "Fill": OpTraits(T.REPEATS, shape_operand=0),
    "IdentityN": OpTraits(T.FORWARDS_BUFFER),
    "MirrorPad": OpTraits(T.PADDING),
    "Pack": OpTraits(T.INDEX_ARITHMETIC),
    "Pad": OpTraits(T.FUSED_PADDING | T.PADDING),
    "PadV2": OpTraits(T.FUSED_PADDING | T.PADDING),
    "Range": OpTraits(T.OWN_LEADING_SIZE),
    "Rank": OpTraits(T.SHAPE_QUERY),
    "Reshape": OpTraits(T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.INDEX_ARITHMETIC, shape_operand=1),
    "Select": OpTraits(T.IN_PLACE),
    "Shape": OpTraits(T.CONV_WRAPPER | T.SHAPE_QUERY),
    "ShapeN": OpTraits(T.CONV_WRAPPER | T.SHAPE_QUERY),
    "Size": OpTraits(T.SHAPE_QUERY),
    "Slice": OpTraits(shape_operand=2),
    "SpaceToBatchND": OpTraits(T.CONV_WRAPPER),
    "Squeeze": OpTraits(T.CONV_WRAPPER | T.FORWARDS_BUFFER | T.INDEX_ARITHMETIC),
    "StridedSlice": OpTraits(T.INDEX_ARITHMETIC),
    "StridedSliceGrad": OpTraits(shape_operand=0),
    "Tile": OpTraits(T.INDEX_ARITHMETIC | T.REPEATS, shape_operand=1),
    "Transpose": OpTraits(T.REORDERS | T.INDEX_ARITHMETIC),
    "Where": OpTraits(T.OWN_LEADING_SIZE),
    # Sources, variables and effects.
    "AssignAddVariableOp": OpTraits(T.COUNTS),
    "AssignSubVariableOp": OpTraits(T.COUNTS),
    "Const": OpTraits(T.CONV_WRAPPER | T.NO_ALLOCATION | T.SOURCE),
    "Empty": OpTraits(T.NO_ALLOCATION, shape_operand=0),
    "NoOp": OpTraits(T.CONV_WRAPPER | T.NO_ALLOCATION | T.SOURCE),
    "Placeholder": OpTraits(T.NO_ALLOCATION | T.SOURCE),
    "PlaceholderWithDefault": OpTraits(T.SOURCE),
    "ReadVariableOp": OpTraits(T.CONV_WRAPPER | T.NO_ALLOCATION | T.READS_VARIABLE),
    "ResourceGather": OpTraits(T.READS_VARIABLE),
    "ResourceGatherNd": OpTraits(T.READS_VARIABLE),
    "VarHandleOp": OpTraits(T.NO_ALLOCATION | T.SOURCE),
    "VarIsInitializedOp": OpTraits(T.READS_VARIABLE),
    "VariableShape": OpTraits(T.READS_VARIABLE),
    # Calls, loops and conditionals.
    "Case": OpTraits(T.CONDITIONAL),
    "EagerPyFunc": OpTraits(T.PYTHON_CALL),
    "If": OpTraits(T.OWN_LEADING_SIZE | T.CONDITIONAL),
    "PartitionedCall": OpTraits(T.CALL),
    "PyFunc": OpTraits(T.PYTHON_CALL),
    "PyFuncStateless": OpTraits(T.PYTHON_CALL),
    "StatefulPartitionedCall": OpTraits(T.CALL),
    "StatelessCase": OpTraits(T.CONDITIONAL),
    "StatelessIf": OpTraits(T.OWN_LEADING_SIZE | T.CONDITIONAL),
    "StatelessWhile": OpTraits(T.OWN_LEADING_SIZE | T.LOOP),
    "TensorListPushBack": OpTraits(T.SETS_ELEMENT),
    "TensorListSetItem": OpTraits(T.SETS_ELEMENT),
    "While": OpTraits(T.OWN_LEADING_SIZE | T.LOOP),
}
"""Every op type that some module outside of the rules needs a fact about."""
