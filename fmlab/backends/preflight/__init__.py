"""Pre-flight: what of a model, its data and its training step will hurt on a static-shape chip.

It runs on any machine: two or three steps of the real program are watched, operator by operator.

    report = preflight(model, loader, chip="trn2")
    print(report)

Each finding says what, where (file and line, module), and what to do. It finds what shows in the steps it
watches; it compiles nothing and knows nothing of speed.
"""

from fmlab.backends.preflight.check import preflight
from fmlab.backends.preflight.finding import Finding, Report, Severity
from fmlab.backends.preflight.shapes import Signatures, signatures

__all__ = ["Finding", "Report", "Severity", "Signatures", "preflight", "signatures"]
