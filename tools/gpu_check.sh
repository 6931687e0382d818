#!/bin/sh
# Checks the nccl backend on the NVIDIA GPUs of this machine: builds it, then runs it with one rank
# per GPU (1, 2, 4, ... of them) and with several ranks on one GPU, and prints a small table.
# Without a GPU it says so and exits 0. Environment: PYTHON (an interpreter with torch; default
# .venv/bin/python or python3), BUILD (default build/gpu-check), JOBS, LIMIT_S per run (default 120).
set -u
cd "$(dirname "$0")/.."

if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  echo "no GPU: nothing to check here"
  exit 0
fi
nvidia-smi -L
num_gpus=$(nvidia-smi -L | grep -c '^GPU')

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
build=${BUILD:-build/gpu-check}
limit=${LIMIT_S:-120}
cmake -S tools/gpu_check -B "$build" -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE="$(command -v "$python")" >"$build.log" 2>&1 ||
  { mkdir -p "$build"; cmake -S tools/gpu_check -B "$build" -DCMAKE_BUILD_TYPE=Release \
      -DPython_EXECUTABLE="$(command -v "$python")"; } || exit 1
cmake --build "$build" -j "${JOBS:-$(nproc)}" || exit 1

# run RANKS ON_ONE_GPU [OPTION...]: starts all ranks, ends with the worst exit status.
run() {
  ranks=$1
  on_one_gpu=$2
  shift 2
  store=$(mktemp -d)
  pids=""
  rank=0
  while [ "$rank" -lt "$ranks" ]; do
    if [ "$on_one_gpu" = yes ]; then
      # NCCL refuses two ranks on one GPU of one host; other host names make nodes of them, which
      # talk over sockets. Few channels each, so that all their kernels fit on the GPU.
      NCCL_HOSTID="node$rank" NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_MAX_CTAS=4 \
        timeout "$limit" "$build/nccl_check" --store "$store" --rank "$rank" --ranks "$ranks" \
        --device 0 "$@" &
    else
      timeout "$limit" "$build/nccl_check" --store "$store" --rank "$rank" --ranks "$ranks" \
        --device "$rank" "$@" &
    fi
    pids="$pids $!"
    rank=$((rank + 1))
  done
  worst=0
  for pid in $pids; do
    wait "$pid" || worst=1
  done
  rm -rf "$store"
  return "$worst"
}

failed=0
ranks=1
while [ "$ranks" -le "$num_gpus" ]; do
  echo "== one rank per GPU: $ranks"
  run "$ranks" no || failed=1
  ranks=$((ranks * 2))
done
for ranks in 2 4; do
  echo "== several ranks on one GPU: $ranks"
  # Correctness only: kernels of different processes take turns, so their times mean nothing.
  run "$ranks" yes --no-table || failed=1
done
[ "$failed" -eq 0 ] && echo "GPU check: all right" || echo "GPU check: FAILED"
exit "$failed"
