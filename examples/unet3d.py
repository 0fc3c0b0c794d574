"""Trains a 3-D U-Net on a NIfTI volume, plain, within a memory budget, or with activations swapped out.

    python -m examples.unet3d --lms --compare
    python -m examples.unet3d --volume scan.nii.gz --labels seg.nii.gz --volume-size 96 --steps 50 --lms

It trains on cubes cut from the volume at random; every second one holds a voxel that is labelled. Without a volume
it takes a phantom, nested ellipsoids in noise, written as .nii.gz and read back.

With --compare swapping gives the same bits where plain training gives them twice. On a CPU the kernels of oneDNN do
not for larger cubes; with TF_ENABLE_ONEDNN_OPTS=0 they are off.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples import _training

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

    Build = Callable[[int, int], keras.Model]

LEARNING_RATE = 1e-3
FILTERS = (8, 16, 32, 64)  # from the full size to the smallest; each level has half the size of the one above
STRIDE = 2 ** (len(FILTERS) - 1)
MAX_CLASSES = 100  # More classes hardly occur in a segmentation.
PHANTOM_SHAPE = (96, 88, 80)
PHANTOM_RADII = (0.85, 0.6, 0.3)  # of the ellipsoids, as a part of the half extent
PHANTOM_NOISE = 0.5  # deviation; ellipsoids differ by 1


# ----------------------------------------------------------------------------------------------------------
# The network.


def build_model(edge: int, classes: int) -> keras.Model:
    """Returns a 3-D U-Net with Dice loss, compiled."""
    from keras import Input, Model, layers

    x = scan = Input((edge, edge, edge, 1), name="scan")
    skips = []
    for filters in FILTERS[:-1]:
        x = _convolutions(x, filters)
        skips.append(x)
        x = layers.MaxPooling3D(2)(x)
    x = _convolutions(x, FILTERS[-1])
    for filters, skip in zip(FILTERS[-2::-1], reversed(skips), strict=True):
        x = layers.Conv3DTranspose(filters, 2, strides=2)(x)
        x = _convolutions(layers.Concatenate()([skip, x]), filters)
    return compiled(Model(scan, layers.Conv3D(classes, 1, activation="softmax", name="classes")(x), name="unet3d"))


def compiled(model: keras.Model) -> keras.Model:
    """Compiles a network that returns the probabilities of classes, and returns it."""
    from keras import losses, optimizers

    model.compile(
        optimizers.Adam(LEARNING_RATE),
        losses.Dice(axis=(1, 2, 3)),  # for each cube and class, so that small classes weigh as much as large ones
        # XLA would fuse the plain step's operations, which changes roundings; rewritten steps run without it.
        jit_compile=False,
    )
    return model


def _convolutions(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    from keras import layers

    for _ in range(2):
        x = layers.Conv3D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x


# ----------------------------------------------------------------------------------------------------------
# The volume.


def write_phantom(folder: Path, seed: int) -> tuple[Path, Path]:
    """Writes a scan of nested ellipsoids and its labels; returns the paths of the two .nii.gz files."""
    import nibabel
    import numpy as np

    axes = (np.linspace(-1, 1, extent) for extent in PHANTOM_SHAPE)
    distance = np.linalg.norm(np.meshgrid(*axes, indexing="ij"), axis=0)
    labels = sum((distance < radius).astype(np.uint8) for radius in PHANTOM_RADII)
    noise = np.random.default_rng(seed).normal(scale=PHANTOM_NOISE, size=PHANTOM_SHAPE)
    paths = folder / "scan.nii.gz", folder / "labels.nii.gz"
    for path, values in zip(paths, ((labels + noise).astype(np.float32), labels), strict=True):
        nibabel.save(nibabel.Nifti1Image(values, affine=np.eye(4)), path)
    return paths


def read_volume(path: Path, option: str) -> np.ndarray:
    """Returns the voxels of a NIfTI file as float32, with three axes.

    Raises:
        _training.UserError: It is no such file.
    """
    import nibabel
    import numpy as np

    try:
        image: Any = nibabel.load(path)  # its type does not say that it holds voxels
        voxels = image.get_fdata(dtype=np.float32)
    except (OSError, EOFError, zlib.error, nibabel.filebasedimages.ImageFileError) as error:
        raise _training.UserError(f"{option}: {path} cannot be read: {error}") from None
    if voxels.ndim != 3:
        raise _training.UserError(
            f"{option}: expected a volume with 3 axes. Received: {path} with {voxels.ndim}, {by(voxels.shape)}"
        )
    if not np.isfinite(voxels).all():
        raise _training.UserError(f"{option}: {path} has voxels that are infinite or not a number")
    return voxels


def load_scan(volume: Path, labels: Path, edge: int, stride: int = STRIDE) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns the scan with mean 0 and deviation 1, the class of each voxel, and the label of each class.

    Raises:
        _training.UserError: The files cannot be read, do not match, or are too small.
    """
    import numpy as np

    scan, found = read_volume(volume, "--volume"), read_volume(labels, "--labels")
    if scan.shape != found.shape:
        raise _training.UserError(
            f"--labels must have the shape of the volume, {by(scan.shape)}. Received: {by(found.shape)}"
        )
    if edge > min(scan.shape):
        largest = min(scan.shape) // stride * stride
        remedy = f"the largest that fits is {largest}" if largest else f"it needs at least {stride} along each axis"
        raise _training.UserError(f"--volume-size {edge} is more than the volume has, {by(scan.shape)}: {remedy}")
    values, classes = np.unique(found, return_inverse=True)
    if not 2 <= len(values) <= MAX_CLASSES or not np.array_equal(values, np.rint(values)):
        raise _training.UserError(
            f"--labels: expected 2 to {MAX_CLASSES} different whole numbers. "
            f"Received: {len(values)} different values from {values[0]:g} to {values[-1]:g}"
        )
    scan = (scan - scan.mean()) / max(scan.std(), 1e-6)
    return scan, classes.reshape(scan.shape).astype(np.uint8), [int(value) for value in values]


def cut_cubes(scan: np.ndarray, classes: np.ndarray, options: argparse.Namespace) -> tf.data.Dataset:
    """Returns batches of (cubes of the scan, their classes as one-hot vectors) for all epochs."""
    import tensorflow as tf

    size = [options.volume_size] * 3
    count = int(classes.max()) + 1
    images, labels = tf.constant(scan), tf.constant(classes)

    def cut(corner: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.slice(images, corner, size)[..., None], tf.one_hot(tf.slice(labels, corner, size), count)

    corners = draw_corners(classes, options)
    return tf.data.Dataset.from_tensor_slices(corners).map(cut).batch(options.batch_size, drop_remainder=True)


def draw_corners(classes: np.ndarray, options: argparse.Namespace) -> np.ndarray:
    """Returns where the cubes begin: anywhere and, every second one, so that a labelled voxel lies in it.

    Most of a scan is background, of which a network learns little.
    """
    import numpy as np

    random = np.random.default_rng(options.seed)
    count = options.epochs * options.steps * options.batch_size
    last = np.array(classes.shape) - options.volume_size
    corners = random.integers(0, last + 1, size=(count, 3))
    labelled = random.choice(np.flatnonzero(classes), size=len(corners[::2]))
    voxels = np.stack(np.unravel_index(labelled, classes.shape), axis=1)
    corners[::2] = np.clip(voxels - random.integers(0, options.volume_size, voxels.shape), 0, last)
    return corners


def by(shape: Sequence[int]) -> str:
    """Returns a shape as people write it."""
    return " x ".join(map(str, shape))


# ----------------------------------------------------------------------------------------------------------
# The program.


def train(volume: Path, labels: Path, options: argparse.Namespace, build: Build, stride: int) -> None:
    """Trains a network on a volume and its labels."""
    scan, classes, values = load_scan(volume, labels, options.volume_size, stride)
    print(f"Volume of {by(scan.shape)} voxels, labels {', '.join(map(str, values))}", flush=True)
    built = functools.partial(build, options.volume_size, len(values))
    _training.train(built, functools.partial(cut_cubes, scan, classes, options), options)


def check_size(parser: argparse.ArgumentParser, edge: int, stride: int) -> None:
    """Ends the program if the network would leave a remainder."""
    if edge % stride:
        below = edge // stride * stride
        nearest = " and ".join(str(size) for size in (below, below + stride) if size)
        parser.error(
            f"--volume-size must be divisible by {stride}, as the network needs. Received: {edge}; nearest: {nearest}"
        )


def parse_arguments(
    arguments: Sequence[str] | None, program: str = "unet3d", description: str | None = __doc__, stride: int = STRIDE
) -> argparse.Namespace:
    """Parses the command line of an example."""
    parser = _training.new_parser(program, description)
    add = parser.add_argument_group("volume").add_argument
    add("--volume", type=Path, metavar="FILE", help="the scan, such as scan.nii.gz (default: a phantom)")
    add("--labels", type=Path, metavar="FILE", help="its segmentation: whole numbers, of the same shape")
    edge = _training.whole_number(1)
    add("--volume-size", type=edge, default=48, metavar="N", help="edge of the cubes (default: %(default)s)")
    _training.add_options(parser, batch_size=2, epochs=3, steps=4)
    options = parser.parse_args(arguments)
    _training.check_options(parser, options)
    check_size(parser, options.volume_size, stride)
    if (options.volume is None) != (options.labels is None):
        parser.error("--volume and --labels belong together: give both or neither")
    for name in ("volume", "labels"):
        path = getattr(options, name)
        if path and not path.is_file():
            parser.error(f"--{name}: no such file. Received: {path}")
    return options


def main(
    arguments: Sequence[str] | None = None,
    program: str = "unet3d",
    description: str | None = __doc__,
    build: Build = build_model,
    stride: int = STRIDE,
) -> None:
    """Trains on the volume of the command line, or on a phantom.

    Args:
        arguments: Of the command line; None for those of the process.
        program: Name of the example.
        description: What `--help` says of it.
        build: Makes its network from the edge of the cubes and the number of classes.
        stride: Number that must divide the edge of the cubes.
    """
    options = parse_arguments(arguments, program, description, stride)
    if options.volume:
        train(options.volume, options.labels, options, build, stride)
        return
    with tempfile.TemporaryDirectory() as folder:
        train(*write_phantom(Path(folder), options.seed), options, build, stride)


if __name__ == "__main__":
    sys.exit(_training.command(main))
