"""Figures and tables of the papers that this project builds on, one module for each paper."""

from benchmarks.papers import deft, fasttree, flashforge, tree_attention
from benchmarks.papers.experiment import Experiment, LeftOut

MODULES = (flashforge, fasttree, deft, tree_attention)
EXPERIMENTS: dict[str, Experiment] = {e.name: e for m in MODULES for e in m.EXPERIMENTS}
LEFT_OUT: tuple[LeftOut, ...] = tuple(x for m in MODULES for x in m.LEFT_OUT)
PAPERS = tuple(dict.fromkeys(e.paper for e in EXPERIMENTS.values()))
