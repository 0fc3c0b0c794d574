"""Metadata. The lists are explicit, so that tests and benchmarks are not installed."""

import runpy
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

# Run, not imported: the package itself needs TensorFlow.
VERSION = runpy.run_path(str(HERE / "tflms_sft" / "_version.py"))["__version__"]

# The compiler reads graphs as these releases trace them; a new one is claimed once CI runs it.
TENSORFLOW = ">=2.21,<2.22"
KERAS = ">=3.15,<3.16"

setup(
    name="tflms-sft",
    version=VERSION,
    description="Train Keras networks that do not fit in memory: a graph compiler that rewrites the joint "
    "graph of a TensorFlow training step (tile loops with recompute) and gives the same training to rounding",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=["tflms_sft", "rewriters", "rewriters.rules"],
    package_data={"tflms_sft": ["py.typed"], "rewriters": ["py.typed"]},
    zip_safe=False,  # type checkers read py.typed from disk
    python_requires=">=3.11",  # Keras 3.15 asks for it
    install_requires=[f"tensorflow{TENSORFLOW}", f"keras{KERAS}", "numpy"],
    extras_require={
        "gpu": [f"tensorflow[and-cuda]{TENSORFLOW}"],
        "plot": ["matplotlib"],
        "examples": ["matplotlib", "nibabel", "scikit-image"],
        "test": [
            "hypothesis",
            "matplotlib",
            "mypy",
            "nibabel",
            "pytest",
            "pytest-xdist>=3.7",
            "ruff",
            "scikit-image",
            "tensorboard",
            "toposort",
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
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
