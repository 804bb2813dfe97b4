"""PREFIX_SHARE on CPUs."""
