"""What the figures of the README come from: each beside its alternative, in one run.

A row measures ours and theirs in turns (A B A B …), so that a busy machine slows both, and judges
the median of the ratios of neighbours. Nothing here is a timed test: a missed goal is shown, not
failed.
"""
