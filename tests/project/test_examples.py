"""The training examples: they run as said, and say in one line what is wrong."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import nibabel
import numpy as np
import pytest
from skimage import io

from examples import _training, long_text, resnet50, swin_unet3d, unet3d, vit_pathology

ROOT = Path(__file__).resolve().parents[2]
TINY_CUBES = ["--volume-size", "16", "--steps", "2", "--epochs", "1", "--batch-size", "1"]
TINY_PICTURES = ["--image-size", "32", "--steps", "1", "--epochs", "1", "--batch-size", "2"]


def command(example, arguments):
    return [sys.executable, "-m", f"examples.{example}", *map(str, arguments)]


def run(example, *arguments):
    """Return the output of an example, which must succeed."""
    done = subprocess.run(
        command(example, arguments), cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(example, capsys, *arguments):
    """The line of an example that ends with code 2."""
    try:
        code = _training.command(lambda: example.main(list(map(str, arguments))))
    except SystemExit as end:  # from the parser
        code = end.code
    errors = capsys.readouterr().err
    assert code == 2 and "Traceback" not in errors
    return errors.splitlines()[-1]


def write_volume(path, values):
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    return path


def write_pictures(folder, count=3):
    random = np.random.default_rng(0)
    for name in ("left", "right"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 255, (40, 50, 3), dtype=np.uint8)
            io.imsave(folder / name / f"{number}.png", pixels, check_contrast=False)
    return folder


@pytest.fixture
def scan(tmp_path):
    return write_volume(tmp_path / "scan.nii.gz", np.random.default_rng(0).normal(size=(24, 20, 17)).astype("float32"))


@pytest.fixture
def labels(tmp_path):
    values = np.zeros((24, 20, 17), np.uint8)
    values[4:9, 6:9, 2:9] = 4
    return write_volume(tmp_path / "labels.nii.gz", values)


# They run ---------------------------------------------------------------------------------------------------------


def test_volume_example_with_disk_swaps_equals_plain_bitwise(tmp_path, scan, labels):
    arguments = ["--volume", scan, "--labels", labels, "--lms", "--tier", "disk", "--spill-dir", tmp_path, "--compare"]
    # Eight cubes, since tensors of less than 1 MiB are not swapped.
    out = run("unet3d", "--volume-size", "16", "--steps", "1", "--epochs", "2", "--batch-size", "8", *arguments)
    assert "Volume of 24 x 20 x 17 voxels, labels 0, 4" in out
    assert "swapped to disk" in out and out.count("Epoch 2/2") == 2
    assert "Largest difference from plain training: losses 0, weights 0 (the same bits)" in out
    last = out.splitlines()[-1]
    assert re.match(r"Peak memory of a training step: plain .* predicted, .*; with swapping .* predicted, ", last)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.nii.gz", "scan.nii.gz"]


def test_slides_example_trains_within_budget(tmp_path):
    out = run("resnet50", *TINY_PICTURES, "--images", write_pictures(tmp_path), "--memory-budget", "2GiB")
    assert "Pictures of 2 classes: left, right" in out
    assert re.search(r"with the budget \d+ MiB predicted, ", out.splitlines()[-1])


def largest_difference(out):
    """Return the largest difference from plain training that an example prints."""
    found = re.search(r"Largest difference from plain training: losses (\S+), weights (\S+)", out)
    return max(map(float, found.groups()))


def test_section_example_runs_attention_in_tiles(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (200, 150, 3), dtype=np.uint8)
    io.imsave(tmp_path / "section.png", pixels, check_contrast=False)
    size = ["--tile-size", "128", "--steps", "1", "--epochs", "1", "--image", tmp_path / "section.png"]
    out = run("vit_pathology", *size, "--memory-budget", "10MiB", "--compare")
    assert "Section of 200 x 150 pixels" in out and "segment(s)" in out
    assert largest_difference(out) < 1e-4


def test_windows_example_runs_in_tiles(scan, labels):
    arguments = ["--volume-size", "16", "--steps", "1", "--epochs", "1", "--volume", scan, "--labels", labels]
    out = run("swin_unet3d", *arguments, "--memory-budget", "6MiB", "--compare")
    assert "Volume of 24 x 20 x 17 voxels" in out and "segment(s)" in out
    assert largest_difference(out) < 1e-4


def test_text_example_without_keras_hub_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    assert "pip install keras-hub" in refusal(long_text, capsys, "--length", "64")


@pytest.mark.slow
def test_text_example_runs_attention_in_tiles():
    pytest.importorskip("keras_hub")
    out = run("long_text", "--memory-budget", "40MiB", "--compare", "--epochs", "1", "--steps", "2")
    assert "segment(s)" in out and largest_difference(out) < 1e-4


def test_passages_are_followed_by_their_next_bytes():
    options = long_text.parse_arguments(["--length", "7", "--batch-size", "2", "--epochs", "1", "--steps", "1"])
    ((passages, following),) = long_text.cut_passages(np.arange(100, dtype=np.uint8), options)
    assert np.array_equal(passages["token_ids"] + 1, following) and following.shape == (2, 7)


def test_half_of_the_tiles_have_more_stain():
    section = vit_pathology.read_section(None)
    options = vit_pathology.parse_arguments(["--tile-size", "64", "--steps", "5"])
    data = vit_pathology.cut_tiles(section, vit_pathology.stain_of(section), options)
    labels = np.concatenate([label for _, label in data])
    assert labels.shape == (30, 1) and labels.sum() == 15


def test_interrupted_example_prints_one_line():
    child = subprocess.Popen(
        command("unet3d", [*TINY_CUBES, "--epochs", "10000"]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=not_ignored,
    )
    try:
        wait_for(child.stdout, "Epoch 3")
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert "Interrupted." in errors and "Traceback" not in errors


def not_ignored():
    """Shells have what runs in the background ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(stream, text, seconds=120):
    """Reads until a text has come."""
    read, end = "", time.monotonic() + seconds
    while text not in read and time.monotonic() < end:
        if select.select([stream], [], [], 1)[0]:
            read += os.read(stream.fileno(), 4096).decode()
    assert text in read, read


# Data -------------------------------------------------------------------------------------------------------------


def test_phantom_files_give_back_the_phantom(tmp_path):
    paths = unet3d.write_phantom(tmp_path, 0)
    assert all(path.read_bytes()[:2] == b"\x1f\x8b" for path in paths), "gzip"
    scan, classes, values = unet3d.load_scan(*paths, edge=16)
    assert scan.shape == classes.shape == unet3d.PHANTOM_SHAPE and values == [0, 1, 2, 3]
    means = [scan[classes == value].mean() for value in values]
    assert means == sorted(means) and abs(scan.mean()) < 1e-3
    counts = np.bincount(classes.ravel())
    assert (counts > 0).all() and counts.argmax() == 0


def test_every_second_crop_holds_a_labelled_voxel(tmp_path):
    classes = np.zeros((40, 32, 24), np.uint8)
    classes[-1, 0, 5] = 1
    options = unet3d.parse_arguments(["--volume-size", "8", "--steps", "20"])
    corners = unet3d.draw_corners(classes, options)
    assert len(corners) == 3 * 20 * 2 and (corners >= 0).all() and (corners + 8 <= classes.shape).all()
    for row, column, slice_ in corners[::2]:
        assert classes[row : row + 8, column : column + 8, slice_ : slice_ + 8].any()
    assert np.array_equal(corners, unet3d.draw_corners(classes, options))


def test_crops_come_from_all_classes(tmp_path):
    resnet50.write_crops(tmp_path, 0)
    options = resnet50.parse_arguments(["--image-size", "32", "--batch-size", "32"])
    batches, names = resnet50.load_pictures(tmp_path, options)
    ((pictures, classes),) = batches
    assert names == list(resnet50.PHOTOGRAPHS)
    assert np.bincount(classes).tolist() == [resnet50.CROPS] * 4
    assert pictures.shape == (32, 32, 32, 3) and -1 <= np.min(pictures) < 0 < np.max(pictures) <= 1


# What is wrong is said in one line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("example", (resnet50, unet3d, vit_pathology))
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tier", "disk"], "--tier says where to swap to: give --lms or --memory-budget as well"),
        (["--spill-dir", "."], "--spill-dir says where to swap to: give --lms or --memory-budget as well"),
        (["--lms", "--tier", "host", "--spill-dir", "."], "--spill-dir is for the disk tier: leave out --tier host"),
        (["--lms", "--spill-dir", "no/such"], "--spill-dir: no such directory. Received: no/such"),
        (["--compare"], "--compare compares with plain training: give --lms or --memory-budget as well"),
        (["--batch-size", "0"], "--batch-size: expected a whole number of at least 1. Received: 0"),
        (["--seed", "-1"], "--seed: expected a whole number from 0 to 4294967295. Received: -1"),
        (["--memory-budget", "2 potatoes"], "error: `memory_budget` must be a positive number followed by one of"),
    ],
)
def test_invalid_options_are_refused(example, arguments, text, capsys):
    assert text in refusal(example, capsys, *arguments)


@pytest.mark.slow
def test_example_with_too_small_budget_exits_with_1(capsys):
    line = refusal(unet3d, capsys, *TINY_CUBES, "--memory-budget", "4MiB")
    assert line.startswith("error: ") and "smallest" in line


def test_invalid_swap_options_are_refused(capsys):
    # Every tensor of so small a network is below the smallest that is swapped.
    line = refusal(unet3d, capsys, *TINY_CUBES, "--lms", "--tier", "disk")
    assert line.startswith("error: The parameters exclude all ") and "Lower `min_bytes` (1.00 MiB)" in line


def test_sizes_that_do_not_fit_the_network_are_refused(scan, labels, capsys):
    line = refusal(unet3d, capsys, "--volume-size", "30")
    assert "must be divisible by 8, as the network needs. Received: 30; nearest: 24 and 32" in line
    line = refusal(swin_unet3d, capsys, "--volume-size", "24")
    assert "must be divisible by 16, as the network needs. Received: 24; nearest: 16 and 32" in line
    line = refusal(vit_pathology, capsys, "--tile-size", "100")
    assert "--tile-size must be divisible by --patch-size. Received: 100 and 8" in line
    assert "more than the section has, 512 x 512" in refusal(vit_pathology, capsys, "--tile-size", "1024")
    assert "--length must be less than" in refusal(long_text, capsys, "--length", "10000000")
    assert "nearest: 8" in refusal(unet3d, capsys, "--volume-size", "3")
    line = refusal(unet3d, capsys, "--volume", scan, "--labels", labels, "--volume-size", "24")
    assert line == "error: --volume-size 24 is more than the volume has, 24 x 20 x 17: the largest that fits is 16"
    assert "--image-size: expected a whole number of at least 32" in refusal(resnet50, capsys, "--image-size", "31")


def test_invalid_volumes_are_refused(tmp_path, scan, labels, capsys):
    def line(volume, segmentation):
        return refusal(unet3d, capsys, "--volume", volume, "--labels", segmentation, "--volume-size", "8")

    four = write_volume(tmp_path / "four.nii.gz", np.zeros((9, 9, 9, 2), np.float32))
    other = write_volume(tmp_path / "other.nii.gz", np.zeros((24, 20, 16), np.uint8))
    holes = write_volume(tmp_path / "holes.nii.gz", np.full((24, 20, 17), np.nan, np.float32))
    broken = tmp_path / "broken.nii.gz"
    broken.write_bytes(scan.read_bytes()[:2000])
    text = tmp_path / "text.nii.gz"
    text.write_text("not a volume")

    assert "--volume: no such file. Received: no.nii.gz" in line("no.nii.gz", labels)
    assert f"--volume: {broken} cannot be read: " in line(broken, labels)
    assert f"--volume: {text} cannot be read: " in line(text, labels)
    assert f"--volume: expected a volume with 3 axes. Received: {four} with 4, 9 x 9 x 9 x 2" in line(four, labels)
    assert "holes.nii.gz has voxels that are infinite or not a number" in line(holes, labels)
    expected = "--labels must have the shape of the volume, 24 x 20 x 17. Received: 24 x 20 x 16"
    assert expected in line(scan, other)
    expected = r"--labels: expected 2 to 100 different whole numbers. Received: \d+ different values from -\d"
    assert re.search(expected, line(scan, scan))
    assert "--volume and --labels belong together" in refusal(unet3d, capsys, "--volume", scan)


def small_model(image_size, classes):
    """Return a small model in place of ResNet-50, for tests of the data."""
    image = keras.Input((image_size, image_size, 3))
    model = keras.Model(image, keras.layers.Dense(classes)(keras.layers.GlobalAveragePooling2D()(image)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def test_invalid_folders_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(resnet50, "build_model", small_model)

    def line(folder, *more):
        return refusal(resnet50, capsys, *TINY_PICTURES, "--images", folder, *more)

    empty, one = tmp_path / "empty", tmp_path / "one"
    empty.mkdir()
    pictures = write_pictures(tmp_path / "two")
    write_pictures(one)
    for path in (one / "right").iterdir():
        path.unlink()
    (one / "right").rmdir()

    assert "--images: no such directory. Received: no" in line("no")
    assert f"--images: there are no pictures in {empty}: " in line(empty)
    assert f"expected at least two subfolders, one per class. Received: {one} with left" in line(one)
    assert line(pictures, "--batch-size", "7") == "error: --batch-size 7 is more than the 6 pictures"
    (pictures / "left" / "1.png").write_text("not a picture")
    assert line(pictures, "--batch-size", "6") == (
        f"error: --images: this picture cannot be decoded: {pictures / 'left' / '1.png'}"
    )


def test_slide_trains_within_its_budget_and_draws(tmp_path):
    printed = run("slide", "--sizes", 320, "--steps", 2, "--budget", "64MiB", "--output", tmp_path)
    assert re.search(r"unet, 320 x 320: 1 segment\(s\) in \d+ rows x \d+ columns of tiles", printed), printed
    assert len(re.findall(r"  ok: \d+ MiB in the last step", printed)) == 2, printed
    for network in ("unet", "resnet"):
        assert io.imread(tmp_path / f"slide-memory-{network}.png").std() > 10
