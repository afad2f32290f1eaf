"""One training step of each family, ours and the reference library's, for fmlab.bench.family_step.

Each module offers NAME, make_step(side, precision) with side "fmlab" or "reference", and REFERENCE_IMPORTS.
"""
