"""Whether and how a model runs, and whether a draft model fits a target: mostly from configs."""

from specdec.check.model import ModelReport, WeightCheck, check
from specdec.check.pair import PairReport, check_pair

__all__ = ["ModelReport", "PairReport", "WeightCheck", "check", "check_pair"]
