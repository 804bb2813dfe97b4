"""The kernel for compute capability 9.0: wgmma and TMA, in Gluon."""
