"""Sets of checkpoints at frontiers between levels, for tests of segments with barriers."""

MAX_STRIDE = 4


def checkpoint_sets(selection):
    """Return tensors to save: first all that may be dropped, then those at every second level, at every third, ..."""
    droppable, lives = selection.droppable(), selection.live_ranges
    last = max((live.forward for live in lives.values()), default=0)
    sets = [droppable]
    for stride in range(2, MAX_STRIDE + 1):
        cuts = range(stride, last + 1, stride)
        end = max(cuts, default=0)
        saved = {t for t in droppable if any(lives[t].producer < cut <= lives[t].forward for cut in cuts)}
        saved |= {t for t in droppable if lives[t].producer >= end}
        sets += [saved] if saved not in sets else []
    return sets


def dropping_sets(barriers):
    """Return for each selection of the levels the tensors that its sets of checkpoints drop."""
    return [
        [frozenset(selection.droppable() - saved) for saved in checkpoint_sets(selection)]
        for selection in barriers.selections
    ]


def smallest_segment(barriers):
    """Return the segment with the fewest checkpoints of those that store every expensive tensor."""
    return barriers.segment("segment1", barriers.selections[0], dropping_sets(barriers)[0][-1])
