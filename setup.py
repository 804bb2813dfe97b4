"""The packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    # `vllm-prefixshare patch` reads the series, which lie beside the package in the repository
    packages=[*find_packages(include=["vllm_prefixshare*"]), "vllm_prefixshare.patches"],
    package_dir={"vllm_prefixshare.patches": "patches"},
)
