"""Metadata and the one C++ extension; pyproject.toml holds build requirements and tool settings."""

from __future__ import annotations

import re
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The version string, read as text: importing the package must not be needed to build it."""
    text = (ROOT / "megatron_binac" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError('megatron_binac/__init__.py must hold one line: __version__ = "X.Y.Z"')
    return match.group(1)


ParallelCompile("NPY_NUM_BUILD_JOBS", default=2).install()

# optional: without a compiler the package still installs, and megatron_binac.packing logs that it
# runs on the Python reference. No -march=native: a wheel may run on another machine than built it.
packing_extension = Pybind11Extension(
    "megatron_binac._C",
    ["csrc/packing.cpp", "csrc/bindings.cpp"],
    depends=["csrc/packing.h"],
    cxx_std=17,
    extra_compile_args=["-O3", "-pthread", "-Wall", "-Wextra"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(
    name="megatron_binac",
    version=read_version(),
    description=(
        "Bilevel reinforcement learning of an actor and a critic that writes feedback, "
        "on Megatron-Core"
    ),
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_binac", "megatron_binac.*"]),
    package_data={"megatron_binac": ["py.typed", "**/*.json", "**/*.html", "**/*.txt"]},
    ext_modules=[packing_extension],
    cmdclass={"build_ext": build_ext},
    zip_safe=False,
    install_requires=[
        "torch>=2.6",
        # 0.17 and newer need Python 3.12; 0.16.1 is the newest on 3.11. Both are tested.
        "megatron-core>=0.16,<0.20",
        "numpy>=1.26",
        "einops>=0.8",
        "packaging>=24.2",
        "psutil>=5.9",  # distributed checkpointing of megatron-core asks for it
        "sentencepiece>=0.2",
        "rich>=13",
        "matplotlib>=3.8",
        "tensorboard>=2.16",
    ],
    extras_require={
        "vllm": ["vllm>=0.32; platform_system == 'Linux'", "safetensors>=0.4.3"],
        "te": ["transformer-engine[pytorch]>=2.9; platform_system == 'Linux'"],
        # leptonai 0.40 has lost a module that nemo_run imports.
        "launch": ["nemo_run>=0.11", "leptonai>=0.26.6,<0.40"],
        "tasks": ["math-verify>=0.7", "reasoning-gym>=0.1.20", "datasets>=3", "tokenizers>=0.20"],
        # Public models: weights, tokenizers, chat templates; transformers to check against.
        "hf": [
            "transformers>=4.50",
            "tokenizers>=0.20",
            "safetensors>=0.4.3",
            "gguf>=0.10",
            "jinja2>=3.1",
        ],
        "track": ["wandb>=0.18"],
        "kernels": ["triton>=3.6; platform_system == 'Linux'"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "psutil>=5.9",
            "ruff>=0.9",
            "pyright>=1.1.390",
        ],
    },
    entry_points={
        "console_scripts": ["binac = megatron_binac.cli:main"],
        "nemo_run.cli": ["binac = megatron_binac.launch.nemo_cli"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
