"""32 emulated CPU devices, one store of compiled programs, files that share them together; tokenizers of two kinds."""

import atexit
import gc
import json
import os
import pathlib
import shutil
import tempfile

import jaxlib.version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Tests compile far longer than they run there. jaxlib 0.11 no longer knows the last flag.
    FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if jaxlib.version.__version_info__ < (0, 11):
        FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # The workers of one run and the processes that tests start share what they compile.
    _programs = tempfile.mkdtemp(prefix="longstraw_programs_")
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
# Low enough for the many small programs, which together compile for seconds in every process.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")

import jax  # noqa: E402
import pytest  # noqa: E402
import tokenizers  # noqa: E402

from longstraw_jax.io import prompt  # noqa: E402
from longstraw_jax.io import tokenizer as tokenizer_lib  # noqa: E402

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 32)

MOST_MAPPINGS = 25_000  # vm.max_map_count is 65,530; past it the compiler ends the process

# Files that run the same programs, which one worker then traces, compiles and loads once; the others stand alone.
# The dearest come first, so that no worker is left alone with one at the end.
TOGETHER = (
    (
        *("test_train_grpo", "test_train_grpo_config", "test_train", "test_rollout"),
        *("test_refresh", "test_refresh_policy", "test_residency", "test_build_prompt"),
    ),
    ("test_exact_gradient",),
    ("test_replay", "test_capture", "test_sampling", "test_freshness", "test_prefix_pages"),
    ("test_parity",),
    ("test_notebooks",),
    ("test_long_context", "test_prefix_gradient"),
)


@pytest.hookimpl(tryfirst=True)  # before xdist, which reads the groups
def pytest_collection_modifyitems(items):
    """Groups for --dist=loadgroup, in the order of TOGETHER; the others as they were collected."""
    places = {name: place for place, name in enumerate(name for names in TOGETHER for name in names)}
    groups = {name: names[0] for names in TOGETHER for name in names}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups.get(item.path.stem, item.path.stem)))
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish():
    """Tracing makes millions of short-lived objects: a tenth of the time went into looking for cycles among them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Programs of files that are done with go before their mappings of memory reach what Linux lets a process have."""
    if nextitem is None or nextitem.path != item.path:
        mappings = pathlib.Path("/proc/self/maps")
        if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
            jax.clear_caches()
            gc.collect()


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    return tokenizer_lib.save_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer.json trained on Python's documentation."""
    folder = tmp_path_factory.mktemp("bpe")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(tokenizer_lib.GLM_SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([prompt.python_documentation_text(30_000)], trainer)
    # Published files carry such settings; obeyed, they would cut prompts in silence.
    bpe.enable_truncation(max_length=16)
    bpe.enable_padding(length=32)
    bpe.save(str(folder / "tokenizer.json"))
    eos = [bpe.token_to_id(token) for token in tokenizer_lib.GLM_EOS_TOKENS]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return folder


@pytest.fixture(scope="module")
def bpe_tokenizer(bpe_folder):
    return tokenizer_lib.load_tokenizer(bpe_folder)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")
