"""What several kernels share: constants, a layout of plans, limits of launches, names of Gluon."""
