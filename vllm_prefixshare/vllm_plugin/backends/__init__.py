"""The attention backends, one folder per platform or kind of attention."""
