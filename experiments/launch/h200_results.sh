#!/usr/bin/env bash
# The README's measurements on one NVIDIA H200 (139 GiB; steps devices_* need two), step by step:
#
#   experiments/launch/h200_results.sh OUT              # all steps for one GPU, in the order of --list
#   experiments/launch/h200_results.sh OUT long_2m peer # these
#   experiments/launch/h200_results.sh --list           # names, minutes, what each shows
#
# Every step writes to OUT/NAME and OUT/NAME.log as it goes, has a time limit of its own and does not stop the others.
# OUT/summary.tsv holds a line a step: name, exit status (124: out of time), seconds. Minutes are estimates from the
# kernels' measured rates, compilation included; compiled programs are kept between steps and runs.
#
# Needs the cuda extra; step peer also the hf extra and 30 GB in the folder SCRATCH, best in memory. PYTHON names the
# interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."

# name | minutes | limit in seconds | what it shows
steps='tests|3|580|the kernels and the transaction on the card agree with the specifications
long_2m|8|580|2,097,152 tokens, all 256 experts, groups of 2, 8 and 16 over one captured prompt
exact_262k|3|500|exact mode at 262,144 tokens, all 256 experts
exact_1m|5|580|exact mode at 1,048,576 tokens
peer|7|900|transformers + PEFT beside the transaction at 4K to 32K tokens
parity_32k|4|580|gradient parity at 32,768 tokens in bf16
prefix_gradient|4|580|what the detached gradient leaves out, 4K to 262K tokens
exact_2m|7|900|exact mode at 2,097,152 tokens
long_4m|6|900|4,456,448 tokens (4.25 x 2^20)
layers_78|6|900|all 78 layers with 8 experts each, 524,288 tokens, pages in host memory
parity_65k|5|580|gradient parity at 65,536 tokens in bf16
parity_fp32|6|900|gradient parity at 8,192 tokens in fp32
detached_262k|2|400|detached mode beside exact
detached_1m|2|400|the same at 1,048,576 tokens
detached_2m|4|580|the same at 2,097,152 tokens
frozen_262k|2|400|frozen mode beside the others
frozen_1m|2|400|the same at 1,048,576 tokens
frozen_2m|4|580|the same at 2,097,152 tokens
kernels|4|580|every kernel beside XLA
sampling|6|580|decode of groups of 1, 8 and 64 at 65,536 and 1,048,576 tokens beside the floor of bytes
ragged|3|400|members that end early: 8 of 64 at a time beside all at once
reader|2|400|the shipped reader measured without training
positions|8|900|the reader by position of the evidence: in its window, and at twice its window with untrained YaRN
refresh|6|900|refresh policies on the reader at 65,520 tokens
plan|10|1800|the programs of the full model compiled for 32 GPUs
devices_slice|5|580|two GPUs beside one: 2 full-width layers at 65,536 tokens (needs 2 GPUs)
devices_tiny|3|400|two GPUs beside one: the tiny random model at 16,384 tokens (needs 2 GPUs)
plots|1|120|plots of the receipts that are there'

if [[ ${1:-} == --list ]]; then
    printf '%s\n' "$steps" | awk -F'|' '{ printf "%-16s %3d min  %s\n", $1, $2, $4 }'
    exit 0
fi
out=${1:?usage: h200_results.sh OUT [STEP ...], or --list}
shift
if (($# == 0)); then
    mapfile -t chosen < <(printf '%s\n' "$steps" | cut -d'|' -f1 | grep -v '^devices_')
else
    chosen=("$@")
fi
for name in "${chosen[@]}"; do
    # No grep -q behind a pipe: it may end before printf has written all, which pipefail takes for a step not found.
    if [[ $'\n'$steps != *$'\n'"$name|"* ]]; then
        echo "error: step '$name' is not known; accepted: $(printf '%s\n' "$steps" | cut -d'|' -f1 | xargs)" >&2
        exit 2
    fi
done

python=${PYTHON:-.venv/bin/python}
scratch=${SCRATCH:-${TMPDIR:-/tmp}}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # a checkout serves that is not installed
export PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.95}
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$scratch/longstraw_programs}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-1}

long() { # OUT/NAME, then flags
    "$python" experiments/long_context.py --workdir="$1" --over_plan "${@:2}"
}

parity() { # OUT/NAME, then flags
    mkdir -p "$1"
    "$python" experiments/gradient_parity.py --config=experiments/configs/parity_slice.py --out="$1/parity.json" "${@:2}"
}

run_tests() {
    JAX_PLATFORMS=cuda "$python" -m pytest -m gpu \
        tests/test_indexer_topk.py tests/test_sparse_mla.py tests/test_grouped_matmul.py tests/test_gpu_transaction.py
}
run_long_2m() { long "$1" --tokens=2097152 --group=2,8,16; }
run_mode() { # OUT/MODE_LENGTH
    local name=${1##*/}
    local -A tokens=([262k]=262144 [1m]=1048576 [2m]=2097152)
    long "$1" --mode="${name%_*}" --tokens="${tokens[${name#*_}]}"
}
run_long_4m() { long "$1" --tokens=4456448; }
# Each decoded token and each pass of a replay copies all pages from the host once: short responses.
run_layers_78() {
    long "$1" --tokens=524288 --layers=78 --experts=8 --prefix_store=host --chunk=16384 --response=16
}
run_peer() {
    local dir=$scratch/longstraw_peer status=0
    mkdir -p "$1"
    "$python" experiments/compare_peer.py ours --dir="$dir" --experts=64 &&
        "$python" experiments/peers/hf_full_sequence.py --dir="$dir" &&
        "$python" experiments/compare_peer.py table --dir="$dir" || status=$?
    cp "$dir"/*.json "$1"
    return $status
}
run_parity_32k() { parity "$1" --tokens=32768 --modes=detached,exact; }
run_parity_65k() { parity "$1" --tokens=65536 --modes=exact; }
run_parity_fp32() {
    parity "$1" --tokens=8192 --modes=exact --config.model.architecture.dtype=float32 \
        --config.model.architecture.n_routed_experts=16
}
run_prefix_gradient() {
    "$python" experiments/prefix_gradient.py --tokens=4096,16384,65536,262144 --experts=64 --out="$1"
}
run_kernels() {
    mkdir -p "$1"
    "$python" experiments/bench_kernels.py --out="$1/kernels.json"
}
run_sampling() { "$python" experiments/bench_sampling.py --out="$1/sampling.json"; }
run_ragged() {
    "$python" experiments/bench_sampling.py --tokens=65536 --groups=64 --slots=0,8 --end_chance=0.03 --response=128 \
        --out="$1/ragged.json"
}
run_reader() { "$python" experiments/pretrain_tiny.py --evaluate=experiments/reader --workdir="$1"; }
positions() { # OUT/positions, name, tokens, flags
    "$python" experiments/eval_positions.py --config=experiments/configs/grpo.py \
        --config.model.checkpoint=experiments/reader --config.grpo.max_new_tokens=16 --config.capture.chunk=8192 \
        --tokens="$3" --control_tokens=4080 --kinds=needle,needles --distractors=16 --seeds=8 \
        --prompts="$1/$2_prompts.jsonl" --out="$1/$2.json" "${@:4}"
}
run_positions() {
    positions "$1" window 65520 && positions "$1" beyond 131056 --positions=early,middle,late,beyond \
        --config.model.yarn_positions=131072
}
run_refresh() {
    "$python" experiments/build_tasks.py --checkpoint=experiments/reader --tokens=65520 --kinds=needles \
        --positions=middle --distractors=16 --seeds=2 --out="$1/rows.jsonl" &&
        "$python" experiments/refresh_policy.py --config.model.checkpoint=experiments/reader --tokens=0 \
            --config.data.paths="(\"$1/rows.jsonl\",)" --config.data.document=none --config.grpo.max_new_tokens=16 \
            --config.reward.functions='("exact_match", "longstraw_jax.tasks.rewards:leading_share")' \
            --config.reward.weights="(1.0, 0.5)" --config.optimizer.learning_rate=1e-3 --config.capture.chunk=8192 \
            --seeds=0,1,2 --out="$1"
}
run_plan() {
    "$python" experiments/compile_plan.py --config=glm52 --tokens=2097152 --topology=cuda:4x8x1 --out="$1"
}
run_devices_slice() {
    "$python" experiments/compare_devices.py --devices=2 --tokens=65536 --layers=2 --out="$1/devices.json"
}
run_devices_tiny() {
    local checkpoint=$1/checkpoint
    "$python" experiments/make_tiny_checkpoint.py --out="$checkpoint" &&
        "$python" experiments/compare_devices.py --devices=2 --architecture="$checkpoint/config.json" --layers=8 \
            --tokens=16384 --group=8 --response=16 --chunk=2048 --mode=frozen --rank=4 --out="$1/devices.json"
}
run_plots() {
    local receipts peer=""
    receipts=$(ls "$out"/*/receipt.json | paste -sd,)
    [[ -f $out/peer/peer.json ]] && peer=$out/peer/peer.json
    "$python" experiments/results_plots.py --receipts="$receipts" --peer="$peer" --out="$1"
}

# A step runs in a shell of its own, which timeout can end with all that it started.
export python scratch out
export -f long parity positions run_mode
for name in "${chosen[@]}"; do
    limit=$(printf '%s\n' "$steps" | awk -F'|' -v name="$name" '$1 == name { print $3 }')
    action=run_$name
    [[ $name =~ ^(frozen|detached|exact)_ ]] && action=run_mode
    export -f "${action?}"
    echo "== $name (at most $limit s)"
    started=$SECONDS status=0
    timeout --kill-after=20 "$limit" bash -c "set -uo pipefail; $action \"\$1\"" _ "$out/$name" 2>&1 |
        tee "$out/$name.log" || status=$?
    printf '%s\t%s\t%s\n' "$name" "$status" $((SECONDS - started)) | tee -a "$out/summary.tsv"
done
