"""Child of `test_other_systems.py`: the project on a simulated macOS or Windows.

TensorFlow, Keras and the modules of the standard library that the project imports are imported as they are. Then all
that the other system lacks is hidden, and only then is the project imported.
"""

import ast
import builtins
import contextlib
import importlib
import io
import json
import mmap
import os
import signal
import sys
import tempfile

import keras
import tensorflow as tf
from children import say
from import_graph import FILES

BOTH = "O_TMPFILE fdatasync posix_fadvise posix_fallocate preadv pwritev sched_getaffinity sched_setaffinity"
LACKS = {
    "darwin": {os: BOTH},
    "win32": {
        os: f"{BOTH} fork getloadavg getpgid getuid geteuid killpg nice pread pwrite setsid sysconf uname wait3",
        mmap: "MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
        signal: "SIGALRM SIGHUP SIGKILL SIGUSR1",
    },
}
"""Names that modules lack. Those that the standard library itself uses on Linux, such as `os.statvfs`, stay."""

NO_MODULES = {"darwin": (), "win32": ("fcntl", "grp", "pwd", "resource", "syslog", "termios")}
NO_FOLDERS = {"darwin": ("/proc", "/sys"), "win32": ("/proc", "/sys", "/dev/fd")}
OURS = ("rewriters", "tflms_sft")


def standard_modules():
    """Return the modules of the standard library that any file of the project imports."""
    names = set()
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
    return sorted(name for name in names if name.partition(".")[0] in sys.stdlib_module_names)


def without_folders(function, folders):
    """Return a function that finds no files in some folders."""

    def call(path=".", *arguments, **options):
        if isinstance(path, (str, os.PathLike)) and f"{os.fspath(path)}/".startswith(tuple(f"{f}/" for f in folders)):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **options)

    return call


def without_free_pages(sysconf):
    """Return `os.sysconf` as macOS has it, which does not know the number of free pages."""

    def call(name):
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return sysconf(name)

    return call


def hide(system):
    """Hide what a system lacks."""
    for name in standard_modules():
        if name not in NO_MODULES[system]:
            importlib.import_module(name)
    assert not any(name.partition(".")[0] in OURS for name in sys.modules)
    tempfile._O_TMPFILE_WORKS = False  # It would use `os.O_TMPFILE`.
    for module, names in LACKS[system].items():
        for name in names.split():
            if hasattr(module, name):  # Not every Linux has all of them.
                delattr(module, name)
    for name in NO_MODULES[system]:
        sys.modules[name] = None
    if system == "darwin":
        os.sysconf = without_free_pages(os.sysconf)
    builtins.open = io.open = without_folders(builtins.open, NO_FOLDERS[system])
    os.listdir = without_folders(os.listdir, NO_FOLDERS[system])
    sys.platform = system


def model_of_volumes():
    """Return a small compiled network, and a batch for it."""
    image = x = keras.Input((48, 48, 8))
    for _ in range(3):
        x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    model = keras.Model(image, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model, tf.random.stateless_normal((4, 48, 48, 8), (1, 2)), tf.ones((4, 1))


def losses(*callbacks):
    """Return the losses of two epochs of training."""
    keras.utils.set_random_seed(0)
    model, images, labels = model_of_volumes()
    history = model.fit(images, labels, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return history.history["loss"]


def refusal(function):
    """Return class and message of the error that a function raises; `None` if it raises none."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def main():
    system = sys.argv[1]
    hide(system)
    for name in FILES:
        if name != "tflms_sft.__main__":
            importlib.import_module(name)
    say("imported", len(FILES))

    from devices import NO_CACHES, planning_with

    import tflms_sft
    from tflms_sft._cli.main import main as command

    # As in `conftest.py`: a network as small as this one needs more scratch memory than its tensors.
    with planning_with(**NO_CACHES):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = command(["doctor", "--json", "--quiet"])
        say("doctor", [code, json.loads(out.getvalue())["lines"]])

        plain = losses()
        say("tiles", [plain, losses(tflms_sft.SFT((2, 2), verbose=0))])
        say("swaps", refusal(lambda: losses(tflms_sft.LMS(min_bytes=1, verbose=0))))
        say("no page cache", refusal(lambda: losses(tflms_sft.LMS(min_bytes=1, page_cache=False, verbose=0))))
        say("auto", refusal(lambda: losses(tflms_sft.MemoryBudget(verbose=0))))
        try:
            losses(tflms_sft.MemoryBudget(100_000, verbose=0))
        except tflms_sft.BudgetError as error:
            say("too small", str(error))
            smallest = error.smallest_bytes
        budget = tflms_sft.MemoryBudget(smallest, max_slowdown=100, verbose=0)
        trained = losses(budget)
        say("budget", [plain, trained, len(budget.plan.segments), len(budget.plan.swaps), list(budget.plan.notes)])


if __name__ == "__main__":
    main()
