"""Plans of budgets in files: those that users save, and a cache that later processes read.

A plan is found again by its step, its budget, the rates of the machine, the kernels of its device, and the code of this
package. What a file says is checked like any other plan: a stored plan whose predicted peak exceeds the budget is not
used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path

import tensorflow as tf

import rewriters
from rewriters.device.gpu_kernels import computes_channels_last, workspace_limit
from tflms_sft._machine.calibration import cache_directory
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._rewrite.plan_recipe import Recipe, step_key
from tflms_sft._search.traced_step import TracedStep
from tflms_sft._util.files import write_json

VARIABLE = "TFLMS_SFT_PLAN_CACHE"
"""Environment variable: `off`, or a directory for the cache."""


def cached_recipe(traced: TracedStep, params: AutoParams) -> Recipe | None:
    """Return the stored plan of a step under a budget; `None` if there is none."""
    path = _path(traced, params)
    return None if path is None else read_recipe(path)


def store_recipe(traced: TracedStep, params: AutoParams, recipe: Recipe) -> None:
    """Store the plan of a step under a budget; a cache that cannot be written is left as it is."""
    path = _path(traced, params)
    if path is not None:
        with contextlib.suppress(OSError):
            write_json(path, recipe)


def read_recipe(path: Path) -> Recipe | None:
    """Return the plan in a file; `None` if the file does not exist or holds no plan."""
    with contextlib.suppress(OSError, ValueError):
        recipe = json.loads(path.read_text(encoding="utf-8"))
        return recipe if isinstance(recipe, dict) and "step" in recipe else None
    return None


@functools.cache
def code_hash() -> str:
    """Return a hash of the code. Between two releases it may change, and plans with it."""
    digest = hashlib.sha256()
    for folder in (Path(rewriters.__file__).parent, Path(__file__).parents[1]):
        for path in sorted(folder.rglob("*.py")):
            digest.update(repr((str(path.relative_to(folder)), path.read_bytes())).encode())
    return digest.hexdigest()


def _path(traced: TracedStep, params: AutoParams) -> Path | None:
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    folder = Path(named) if named else cache_directory() / "plans"
    budget = dataclasses.replace(params, plan=None)
    # Nominal rates are the same with and without oneDNN, whose kernels need other memory.
    model = traced.device
    device: tuple[object, ...] = (model.name, model.unfolds_convolutions, model.intra_op_threads)
    if model.is_gpu:
        device += (computes_channels_last(tf.float32, model), workspace_limit())
    parts = (step_key(traced), budget, traced.rates, traced.excess_bytes, device, code_hash())
    return folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"
