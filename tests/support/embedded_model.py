"""The embedded model, which the examples use as well."""

from examples.embedded_model import embedded_model_path

__all__ = ["embedded_model_path"]
