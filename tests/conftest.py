"""32 emulated CPU devices for every test and one store of compiled programs; set before JAX starts."""

import atexit
import os
import shutil
import tempfile

import jaxlib.version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Tests compile far longer than they run. jaxlib 0.11 no longer knows the last flag.
FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jaxlib.version.__version_info__ < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # The workers of one run and the processes that tests start share what they compile.
    _programs = tempfile.mkdtemp(prefix="longstraw_programs_")
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

import jax  # noqa: E402

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 32)
