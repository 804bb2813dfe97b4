"""For tools that ask for a setup.py; everything is in pyproject.toml."""

from setuptools import setup

setup()
