"""Metadata. The lists are explicit, so that tests and benchmarks are not installed."""

import re
import runpy
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

# Run, not imported: whoever builds a wheel need not have TensorFlow.
VERSIONS = runpy.run_path(str(HERE / "tflms_sft" / "_version.py"))
# The upper bounds are the next major versions: pip must not refuse a release because it is newer than the tested ones.
TENSORFLOW, KERAS = (
    ">={}.{},<{}".format(*first, last[0] + 1)
    for first, last in map(VERSIONS["SUPPORTED_RELEASES"].get, ("tensorflow", "keras"))
)
FIRST_PYTHON, LAST_PYTHON = VERSIONS["PYTHON_RELEASES"]
ZARR = "zarr>=3; python_version >= '3.11'"  # Version 3 has no release for Python 3.10.


def long_description() -> str:
    """Return the README for a package index, where links into the repository lead nowhere: their text stays."""
    if not README.exists():
        return ""
    text = re.sub(r"<!--.*?-->\n?", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    name="tflms-sft",
    version=VERSIONS["__version__"],
    description="Train Keras networks that do not fit in memory: a graph compiler that rewrites the joint "
    "graph of a TensorFlow training step (tile loops with recompute) and gives the same training to rounding",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The tflms-sft authors",
    license="Apache-2.0",
    keywords=["TensorFlow", "Keras", "out of memory", "gradient checkpointing", "rematerialization", "swapping"],
    license_files=["LICENSE"],
    packages=[
        "tflms_sft",
        *(
            f"tflms_sft.{name}"
            for name in (
                *("_batches", "_cli", "_cluster", "_image_tiles", "_keras", "_machine", "_params", "_pipeline"),
                *("_barriers", "_planner", "_report", "_rewrite", "_search", "_sources", "_trace", "_util", "_verify"),
            )
        ),
        "rewriters",
        *(
            f"rewriters.{name}"
            for name in (
                *("analysis", "batch_semantics", "canonicalize", "device", "emission", "estimates", "ir"),
                *("pipelining", "rules", "rules.pixel_maps", "scheduling", "swapping", "tiling"),
            )
        ),
    ],
    package_data={"tflms_sft": ["py.typed"], "rewriters": ["py.typed"]},
    entry_points={"console_scripts": ["tflms-sft = tflms_sft._cli.main:main"]},
    zip_safe=False,  # type checkers read py.typed from disk
    python_requires=">={}.{}".format(*FIRST_PYTHON),
    install_requires=[f"tensorflow{TENSORFLOW}", f"keras{KERAS}", "numpy"],
    extras_require={
        "gpu": [f"tensorflow[and-cuda]{TENSORFLOW}"],
        "plot": ["matplotlib"],
        # Formats of `ImageReader`.
        "hdf5": ["h5py"],
        "nifti": ["nibabel"],
        "openslide": ["openslide-bin", "openslide-python"],
        "tiff": ["tifffile", ZARR],
        "zarr": [ZARR],
        "compare": ["matplotlib", "torch"],
        "docs": ["mkdocs-jupyter", "mkdocs-material>=9.5", "mkdocstrings-python"],
        "examples": ["matplotlib", "nibabel", "scikit-image", ZARR],
        "test": [
            "h5py",
            "hypothesis",
            "ipykernel",
            "matplotlib",
            "mypy",
            "nbclient",
            "nibabel",
            "openslide-bin",
            "openslide-python",
            "pytest",
            "pytest-xdist>=3.7",
            "ruff",
            "scikit-image",
            "tensorboard",
            "tifffile",
            "toposort",
            ZARR,
            # test_packaging builds the wheel without build isolation.
            "setuptools>=64",
            "wheel",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(FIRST_PYTHON[1], LAST_PYTHON[1] + 1)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
