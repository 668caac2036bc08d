"""Times every kernel beside XLA's path and other projects' kernels in one run: a table and a JSON file.

Exit status: 0 everything ran, 1 an op of ours failed (the others are still reported), 2 bad usage.
"""

import importlib.metadata
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers allocate through PyTorch in this process

import jax
from absl import app, flags
from bench import chunked_logprob, grouped_matmul, indexer_topk, peers, sparse_mla
from bench.rates import rates
from bench.table import table_lines

import pallas_kernels
from longstraw_jax.command import fail, parse_flags
from longstraw_jax.evidence.receipt import describe_code
from longstraw_jax.io.whole_file import write_whole

OPS = {
    "indexer_topk": indexer_topk.bench,
    "sparse_mla": sparse_mla.bench,
    "grouped_matmul": grouped_matmul.bench,
    "chunked_logprob": chunked_logprob.bench,
}
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch", "tokamax", "vllm")
_OPS = flags.DEFINE_list("ops", [*OPS, "peers"], "What to time: of " + ", ".join([*OPS, "peers"]) + ".")
_OUT = flags.DEFINE_string("out", None, "JSON file; by default experiments/results/kernels_<card>.json.")
_FLASHMLA = flags.DEFINE_string("flashmla", None, "FlashMLA's _flashmla_C.abi3.so, where vllm is not installed.")
_DEEP_GEMM = flags.DEFINE_string("deep_gemm", None, "Folder that holds the package deep_gemm, where not installed.")


def _versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": sys.version.split()[0]}


def main(argv: list[str]) -> None:
    if argv[1:]:
        fail(f"arguments: {argv[1:]}; accepted: flags alone")
    unknown = set(_OPS.value) - {*OPS, "peers"}
    if unknown:
        fail(f"--ops: {sorted(unknown)}; accepted: {', '.join([*OPS, 'peers'])}")
    device = jax.devices()[0]
    if device.platform == "cpu":
        fail("device: 'cpu'; accepted: a GPU or a TPU (the shapes are those of one)")
    card = device.device_kind
    default = Path(__file__).parent / "results" / f"kernels_{re.sub(r'[^a-z0-9]+', '_', card.lower())}.json"
    out = Path(_OUT.value) if _OUT.value else default
    matmul_tflops, copy_tbps = rates()
    print(f"{card}: bf16 matmul {matmul_tflops:.0f} TFLOP/s, copy {copy_tbps:.2f} TB/s; {_versions()}", flush=True)
    report = dict(
        card=card,
        versions=_versions(),
        code=describe_code(Path(pallas_kernels.__file__).parent),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        matmul_tflops=matmul_tflops,
        copy_tbps=copy_tbps,
        rows=[],
    )
    failed = False
    for op in _OPS.value:
        try:
            if op == "peers":
                rows = peers.bench(matmul_tflops, copy_tbps, flashmla=_FLASHMLA.value, deep_gemm=_DEEP_GEMM.value)
            else:
                rows = OPS[op](matmul_tflops, copy_tbps)
        except Exception as error:  # one op's failure must not cost the others' figures
            traceback.print_exc()
            failed = True
            rows = [dict(op=op, shape="", backend="", error=" ".join(f"{type(error).__name__}: {error}".split())[:300])]
        report["rows"] += rows
        print("\n".join(["", *table_lines(rows, copy_tbps)]), flush=True)
        write_whole(out, (json.dumps(report, indent=1) + "\n").encode())
    print(f"\n{out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
