"""One case for every op rule; a helper, no test."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from one_op import HEIGHT, WIDTH, Const, flags, image, numbers

Builder = Callable[[], dict[str, Any]]
CASES: dict[str, Builder] = {}


def cases(op_types: str, builder: Builder) -> None:
    for op_type in op_types.split():
        assert op_type not in CASES
        CASES[op_type] = builder


def conv_sides(depthwise: bool = False, stride: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Large side, filter, small side and attributes of one SAME convolution."""
    rows = [-(-size // stride) for size in (HEIGHT, WIDTH)]
    kernel = image(4, 5, 4, 2)
    small = image(3, *rows, 8 if depthwise else 2)
    return image(), kernel, small, {"strides": [1, stride, stride, 1], "padding": "SAME"}


def convolution_case(depthwise: bool) -> dict[str, Any]:
    large, kernel, _, attrs = conv_sides(depthwise)
    return {"input": large, "filter": kernel, **attrs}


def input_gradient_case(depthwise: bool) -> dict[str, Any]:
    large, kernel, small, attrs = conv_sides(depthwise)
    return {"input_sizes": Const(large.shape), "filter": kernel, "out_backprop": small, **attrs}


def filter_gradient_case(depthwise: bool) -> dict[str, Any]:
    large, kernel, small, attrs = conv_sides(depthwise)
    return {"input": large, "filter_sizes": Const(kernel.shape), "out_backprop": small, **attrs}


POOL = {"ksize": [1, 4, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}


def max_pool_gradient_case() -> dict[str, Any]:
    x = image()
    y = tf.raw_ops.MaxPool(input=tf.constant(x), **POOL).numpy()
    return {"orig_input": x, "orig_output": y, "grad": image(*y.shape), **POOL}


cases("Conv2D", lambda: convolution_case(False))
cases("DepthwiseConv2dNative", lambda: convolution_case(True))
cases("Conv2DBackpropInput", lambda: input_gradient_case(False))
cases("DepthwiseConv2dNativeBackpropInput", lambda: input_gradient_case(True))
cases("Conv2DBackpropFilter", lambda: filter_gradient_case(False))
cases("DepthwiseConv2dNativeBackpropFilter", lambda: filter_gradient_case(True))
cases("MaxPool", lambda: {"input": image(), **POOL})
cases("AvgPool", lambda: {"value": image(), **POOL})
cases("MaxPoolGrad", max_pool_gradient_case)
cases("AvgPoolGrad", lambda: {"orig_input_shape": Const((3, HEIGHT, WIDTH, 4)), "grad": image(3, 7, 7, 4), **POOL})

cases("BiasAdd", lambda: {"value": image(), "bias": image(4)})
cases("BiasAddGrad", lambda: {"out_backprop": image()})
cases("Sum Mean", lambda: {"input": image(), "axis": Const([-1]), "keep_dims": True})
cases("Max Min Prod", lambda: {"input": image(), "axis": Const([3]), "keep_dims": True})
cases("Tile", lambda: {"input": image(3, 1, 1, 4), "multiples": Const([1, HEIGHT, WIDTH, 1])})
cases("BroadcastTo", lambda: {"input": image(1, 1, 1, 1), "shape": Const([3, HEIGHT, WIDTH, 4])})
cases("Einsum", lambda: {"inputs": [image(), image(4, 5)], "equation": "bhwc,cd->bhwd"})
cases("SoftmaxCrossEntropyWithLogits", lambda: {"features": image(), "labels": image()})
cases(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda: {"features": image(), "labels": np.random.RandomState(5).randint(0, 4, (3, HEIGHT, WIDTH))},
)
cases(
    "InTopKV2",
    lambda: {
        "predictions": image().astype("float32"),
        "targets": np.random.RandomState(5).randint(0, 4, (3, HEIGHT, WIDTH)),
        "k": Const(np.int64(2)),
    },
)
cases("Softmax LogSoftmax", lambda: {"logits": image()})

cases("Pad", lambda: {"input": image(), "paddings": Const([[0, 0], [1, 2], [3, 0], [1, 0]])})
cases(
    "PadV2",
    lambda: {
        "input": image(),
        "paddings": Const([[0, 0], [5, 0], [0, 6], [0, 1]]),
        "constant_values": Const(np.float64(0)),
    },
)
cases("MirrorPad", lambda: {"input": image(), "paddings": Const([[0, 0], [5, 2], [0, 13], [1, 0]]), "mode": "REFLECT"})
cases(
    "MirrorPadGrad",
    lambda: {
        "input": image(3, HEIGHT + 14, WIDTH + 4, 5),
        "paddings": Const([[0, 0], [12, 2], [1, 3], [1, 0]]),
        "mode": "REFLECT",
    },
)
cases("ReverseV2", lambda: {"tensor": image(), "axis": Const([1, -1])})
cases("SpaceToDepth", lambda: {"input": image(3, 14, 12, 2), "block_size": 2})
cases("DepthToSpace", lambda: {"input": image(3, 7, 6, 8), "block_size": 2})
cases("Slice", lambda: {"input": image(), "begin": Const([0, 2, 5, 1]), "size": Const([-1, 9, -1, 2])})
cases("ConcatV2", lambda: {"values": [image(seed=1), image(3, HEIGHT, WIDTH, 2)], "axis": Const(-1)})
cases("Split", lambda: {"axis": Const(3), "value": image(), "num_split": 2})
cases("SplitV", lambda: {"value": image(), "size_splits": Const([1, 3]), "axis": Const(3), "num_split": 2})

cases(
    "Abs Asinh Atan Ceil Cos Cosh Erf Erfc Exp Expm1 Floor IsFinite IsInf IsNan Neg OnesLike Rint Round "
    "Sigmoid Sign Sin Sinh Square Tan Tanh ZerosLike",
    lambda: {"x": image()},
)
cases("Elu Relu Relu6 Selu Softplus Softsign LeakyRelu", lambda: {"features": image()})
cases("Acos Asin Atanh Erfinv", lambda: {"x": image(low=-0.9, high=0.9)})
cases("Ndtri", lambda: {"x": image(low=0.1, high=0.9)})
cases("Acosh", lambda: {"x": image(low=1.1, high=3.0)})
cases("Log Log1p Digamma Lgamma Reciprocal Inv Rsqrt Sqrt", lambda: {"x": image(low=0.1, high=3.0)})
cases("Atan2", lambda: {"y": image(), "x": image(seed=1)})
cases("Maximum Minimum SquaredDifference", lambda: {"x": image(), "y": image(seed=1)})
cases("Less LessEqual Greater GreaterEqual", lambda: {"x": image(), "y": image(3, 1, 1, 4)})
cases("Equal NotEqual", lambda: {"x": numbers(), "y": numbers(1, 1, 1, 4)})
cases("FloorDiv FloorMod Mod BitwiseAnd BitwiseOr BitwiseXor", lambda: {"x": numbers(), "y": numbers(3, 1, WIDTH, 4)})
cases("Pow Xdivy Xlogy Xlog1py", lambda: {"x": image(low=0.1), "y": image(seed=1, low=0.1)})
cases(
    "ClipByValue",
    lambda: {"t": image(), "clip_value_min": Const(np.float64(-1)), "clip_value_max": Const(np.float64(0.5))},
)
cases("LogicalAnd LogicalOr", lambda: {"x": flags(), "y": flags(seed=1)})
cases("LogicalNot", lambda: {"x": flags()})

cases("Identity Snapshot StopGradient PreventGradient", lambda: {"input": image()})
cases("Cast", lambda: {"x": image(), "DstT": tf.float32})
cases("RealDiv Div DivNoNan MulNoNan", lambda: {"x": image(), "y": image(4, low=0.5)})
cases("Mul", lambda: {"x": image(), "y": image(3, 1, WIDTH, 1)})
cases("Add AddV2 Sub", lambda: {"x": image(), "y": image(seed=1)})
cases("AddN", lambda: {"inputs": [image(), image(seed=1), image(seed=2)]})
cases("Select", lambda: {"condition": flags(), "x": image(), "y": image(seed=1)})
cases("SelectV2", lambda: {"condition": flags(1, 1, 1, 4), "t": image(), "e": Const(np.zeros([4]))})
cases(
    "ReluGrad Relu6Grad SoftplusGrad SoftsignGrad LeakyReluGrad",
    lambda: {"gradients": image(), "features": image(seed=1)},
)
cases("EluGrad SeluGrad", lambda: {"gradients": image(), "outputs": image(seed=1)})
cases(
    "TanhGrad SigmoidGrad SqrtGrad RsqrtGrad InvGrad ReciprocalGrad", lambda: {"y": image(low=0.1), "dy": image(seed=1)}
)

# Volumes ----------------------------------------------------------------------------------------------------

DEPTH = 7
VOLUME = (3, DEPTH, HEIGHT, WIDTH, 2)
POOL3D = {"ksize": [1, 2, 4, 3, 1], "strides": [1, 1, 2, 2, 1], "padding": "SAME"}


def conv3d_sides() -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """Large side, filter, small side and attributes of one SAME convolution."""
    small = image(3, 4, 13, 7, 3)
    return image(*VOLUME), image(2, 4, 3, 2, 3), small, {"strides": [1, 2, 1, 2, 1], "padding": "SAME"}


def conv3d(*names: str) -> dict[str, Any]:
    large, kernel, small, attrs = conv3d_sides()
    every = {"input": large, "filter": kernel, "out_backprop": small}
    every |= {"input_sizes": Const(large.shape), "filter_sizes": Const(kernel.shape)}
    return {name: every[name] for name in names} | attrs


def single(*shape: int) -> np.ndarray:
    """TensorFlow pools no volumes in float64; eighths leave nothing to round."""
    return np.round(image(*(shape or VOLUME)) * 8).astype("float32") / 8


def max_pool3d_gradient() -> dict[str, Any]:
    x = single()
    y = tf.raw_ops.MaxPool3D(input=tf.constant(x), **POOL3D).numpy()
    return {"orig_input": x, "orig_output": y, "grad": single(*y.shape), **POOL3D}


cases("Conv3D", lambda: conv3d("input", "filter"))
cases("Conv3DBackpropInputV2", lambda: conv3d("input_sizes", "filter", "out_backprop"))
cases("Conv3DBackpropFilterV2", lambda: conv3d("input", "filter_sizes", "out_backprop"))
cases("MaxPool3D", lambda: {"input": single(), **POOL3D})
cases("AvgPool3D", lambda: {"input": single(), **POOL3D})
cases("MaxPool3DGrad", max_pool3d_gradient)
cases("AvgPool3DGrad", lambda: {"orig_input_shape": Const(VOLUME), "grad": single(3, 7, 7, 7, 2), **POOL3D})

# Other shapes -----------------------------------------------------------------------------------------------

INDEX = {"ellipsis_mask": 0, "new_axis_mask": 0}
MIDDLE = {
    "begin": Const([0, 2, 1, 0]),
    "end": Const([0, 12, -2, 3]),
    "strides": Const([1, 3, 1, 2]),
    "begin_mask": 1,
    "end_mask": 1,
    "shrink_axis_mask": 0,
    **INDEX,
}
HALF_PIXELS = {"align_corners": False, "half_pixel_centers": True}

cases("Reshape", lambda: {"tensor": image(), "shape": Const([3, HEIGHT, WIDTH, 2, 2])})
cases("ExpandDims", lambda: {"input": image(), "axis": Const(2)})
cases("Squeeze", lambda: {"input": image(3, HEIGHT, 1, WIDTH, 4), "axis": [2]})
cases("Transpose", lambda: {"x": image(), "perm": Const([0, 3, 1, 2])})
cases("SpaceToBatchND", lambda: {"input": image(), "block_shape": Const([2, 3]), "paddings": Const([[2, 1], [1, 0]])})
cases(
    "BatchToSpaceND",
    lambda: {"input": image(18, 5, 4, 2), "block_shape": Const([2, 3]), "crops": Const([[1, 0], [0, 2]])},
)
cases("StridedSlice", lambda: {"input": image(), **MIDDLE})
cases("StridedSliceGrad", lambda: {"shape": Const((3, HEIGHT, WIDTH, 4)), "dy": image(3, 4, 11, 2), **MIDDLE})
cases("ResizeNearestNeighbor", lambda: {"images": image(), "size": Const([29, 9]), **HALF_PIXELS})
cases("ResizeNearestNeighborGrad", lambda: {"grads": image(3, 29, 9, 4), "size": Const([HEIGHT, WIDTH]), **HALF_PIXELS})
cases(
    "ResizeBilinear",
    lambda: {"images": image().astype("float32"), "size": Const([2 * HEIGHT, 3 * WIDTH]), **HALF_PIXELS},
)
cases(
    "ResizeBilinearGrad",
    lambda: {"grads": image(3, 2 * HEIGHT, WIDTH // 2, 4).astype("float32"), "original_image": image(), **HALF_PIXELS},
)
cases(
    "ResizeBicubic",
    lambda: {"images": image().astype("float32"), "size": Const([2 * HEIGHT, 3 * WIDTH]), **HALF_PIXELS},
)
cases(
    "ResizeBicubicGrad",
    lambda: {"grads": image(3, 2 * HEIGHT, WIDTH // 2, 4).astype("float32"), "original_image": image(), **HALF_PIXELS},
)

# Channels ---------------------------------------------------------------------------------------------------

cases("ArgMax ArgMin", lambda: {"input": image(), "dimension": Const(-1)})
cases("All Any", lambda: {"input": image() > -1.5, "axis": Const([3]), "keep_dims": True})
cases("Cumsum Cumprod", lambda: {"x": image(), "axis": Const(3), "exclusive": True})
cases("Roll", lambda: {"input": image(), "shift": Const([1]), "axis": Const([-1])})
cases(
    "OneHot",
    lambda: {"indices": numbers(), "depth": Const(5), "on_value": Const(2.0), "off_value": Const(-1.0), "axis": 3},
)
cases("Pack", lambda: {"values": [image(), image(seed=1)], "axis": -1})
cases("Unpack", lambda: {"value": image(), "num": 4, "axis": 3})
cases("GatherV2", lambda: {"params": image(), "indices": Const([2, 0, 2]), "axis": Const(3)})
cases("TopKV2", lambda: {"input": image(), "k": Const(2)})
cases("RGBToHSV HSVToRGB", lambda: {"images": image(3, HEIGHT, WIDTH, 3, low=0.0, high=1.0)})
cases("LRN", lambda: {"input": image().astype("float32"), "depth_radius": 1})
cases(
    "LRNGrad",
    lambda: {
        "input_grads": image(seed=1).astype("float32"),
        "input_image": image().astype("float32"),
        "output_image": image(seed=2).astype("float32"),
        "depth_radius": 1,
    },
)
cases("Bitcast", lambda: {"input": image(), "type": tf.int64})
cases("EnsureShape", lambda: {"input": image(), "shape": [None, HEIGHT, WIDTH, 4]})
PATCHES = {"ksizes": [1, 3, 2, 1], "strides": [1, 2, 1, 1], "rates": [1, 2, 3, 1], "padding": "SAME"}
cases("ExtractImagePatches", lambda: {"images": image(), **PATCHES})
cases(
    "ExtractVolumePatches",
    lambda: {"input": image(*VOLUME), "ksizes": [1, 2, 3, 3, 1], "strides": [1, 2, 2, 1, 1], "padding": "SAME"},
)
