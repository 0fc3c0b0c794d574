"""Plans without a step behind them, for tests of reports."""

import dataclasses

from tflms_sft import Plan, PlannedPipeline, PlannedSegment, PlannedStage, PlannedSwap, Prediction

LOOPS = ("sft/segment1/forward/while", "sft/segment1/backward/while")


def prediction(peak, ratio, **options):
    timeline = ((LOOPS[0], peak // 2), (LOOPS[1], peak), ("update", 2**20))
    progress = (0.0, 0.4 * ratio, 0.9 * ratio)
    known = {"timeline": timeline, "progress": progress, "largest": (("conv<1>", peak // 2),)}
    return Prediction(**{"peak_bytes": peak, "fixed_bytes": 2**20, "time_ratio": ratio, **known, **options})


def a_plan(**options):
    counts, rows = (1, 4, 4), ((8, 8), (20, 20))
    names = ("segment1", ("image",), ("pool & co",))
    segment = PlannedSegment(*names, counts, counts, ("conv<1>",), 7, 9, (2**20, 2**21), rows)
    segment = dataclasses.replace(segment, waiting_bytes=(2**26, 2**22), time_share=(0.9, 1.2))
    known = {
        "changed": True,
        "batch": 2,
        "batch_is_fixed": True,
        "segments": (segment,),
        "left_alone": (("layer 'mean' <b>", "it reduces & waits"),),
        "original": prediction(2**28, 1.0),
        "predicted": prediction(2**26, 1.25),
        "memory_budget": 2**27,
        "notes": ("a note with <script>alert(1)</script>",),
        "swaps": (PlannedSwap("a/tensor:0", 2**23, (("reader",),), ("control<op>",)),),
        "swap_tier": "disk",
        "not_swapped": (("other:0", "too small"),),
        "rest_waiting_bytes": (2**23, 2**23),
        "rest_time_share": (0.1, 0.1),
    }
    return Plan(**{**known, **options})


def a_pipeline():
    """Return a plan of two stages on two devices, the first of which is tiled."""
    stages = tuple(
        PlannedStage(
            number=number,
            devices=(f"/device:GPU:{number}",),
            entries=(("image", "pool & co")[number],),
            exit=("pool & co", "")[number],
            forward_ops=7,
            backward_ops=9,
            weight_bytes=2**20,
            waiting_bytes=2**22,
            forward_seconds=0.002,
            backward_seconds=0.004,
            transfer_bytes=2**18,
            transfer_seconds=0.0001,
            segments=(("segment1",), ())[number],
        )
        for number in (0, 1)
    )
    pipeline = PlannedPipeline(
        schedule="gpipe",
        micro_batches=2,
        data_replicas=1,
        stages=stages,
        devices=("/device:GPU:0", "/device:GPU:1"),
        slots=(("F0.0",), ("F0.1",)),
        peak_bytes=(2**24, 2**25),
        seconds=0.02,
        idle=0.25,
        crossing=(("pool & co", 0, 1, 2**18), ("a gradient", 1, 0, 2**18)),
        results=(("Identity:0", "value after the last one"),),
        chart="device 0  F0 F1",
    )
    return a_plan(pipeline=pipeline, swaps=(), not_swapped=(), memory_budget=None)
