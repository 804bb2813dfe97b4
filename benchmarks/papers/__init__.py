"""Figures and tables of the papers that this project builds on, one module for each paper."""

from benchmarks.papers import deft, fasttree, flashforge, tree_attention
from benchmarks.papers.experiment import LEFT_OUT, TEXTS, Experiment

MODULES = (flashforge, fasttree, deft, tree_attention)
EXPERIMENTS: dict[str, Experiment] = {e.name: e for m in MODULES for e in m.EXPERIMENTS}
PAPERS = tuple(TEXTS)

__all__ = ["EXPERIMENTS", "LEFT_OUT", "PAPERS"]
