"""Finding out why: traces of runs read back, and the first token at which drafting changed an output."""

from specdec.debug.divergence import Report, diverge
from specdec.debug.read_trace import read_trace

__all__ = ["Report", "diverge", "read_trace"]
