"""Installs longstraw_jax and pallas_kernels."""

import setuptools

EXTRAS = {
    "test": [
        "pytest>=8,<9.2",  # with 9.2, xdist 3.8 no longer keeps the tests of a group on one worker
        "pytest-xdist>=3.8,<4",
        "beartype>=0.20,<1",
        "ruff>=0.9,<1",
        "nbmake>=1.5,<2",
        "ipykernel>=6,<8",
    ],
    "hf": ["torch>=2.9,<3", "transformers>=5.13.1,<6", "peft>=0.18,<1"],
    "tasks": ["reasoning-gym>=0.1.25,<0.2"],  # needs a C compiler for pycosat, which has no wheels
    "notebooks": ["jupyterlab>=4,<5", "ipykernel>=6,<8"],
    "cuda": ["jax[cuda13]>=0.10.2,<0.12"],
    "tpu": ["jax[tpu]>=0.10.2,<0.12"],
}

setuptools.setup(
    name="longstraw_jax",
    version="0.1.0",
    description="Reinforcement learning on million-token prompts for GLM-5.2 in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=setuptools.find_packages(include=["longstraw_jax*", "pallas_kernels*"]),
    package_data={"longstraw_jax.evidence": ["*.schema.json", "*.css", "*.txtpb"], "longstraw_jax.io": ["*.jinja"]},
    install_requires=[
        "absl-py>=2.1,<3",
        "flax>=0.12.8,<0.13",
        "jax>=0.10.2,<0.12",
        "jaxtyping>=0.3,<0.4",
        "jinja2>=3.1,<4",
        "jsonschema>=4.20,<5",
        "math-verify>=0.9,<0.10",
        "matplotlib>=3.8,<4",
        "ml_collections>=1.1,<2",
        "numpy>=2.0,<3",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "packaging>=24",
        "pyarrow>=17,<27",
        "safetensors>=0.5,<0.9",
        "scipy>=1.13,<2",
        "tensorboardX>=2.6,<3",
        "tokenizers>=0.21,<0.24",
        "tqdm>=4.66,<5",
    ],
    extras_require=EXTRAS,
)
