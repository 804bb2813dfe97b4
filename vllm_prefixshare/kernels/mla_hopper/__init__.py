"""The kernel for MLA caches on Hopper, in Gluon."""
