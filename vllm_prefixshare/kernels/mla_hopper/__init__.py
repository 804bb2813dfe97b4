"""The kernel for latent KV caches (MLA) on Hopper, in Gluon."""
