#!/usr/bin/env bash
# Everything that needs a GPU, in one go: versions, the GPU-marked tests, the kernels' bench.
#
#   tools/gpu_check.sh [--out DIR] [--skip-bench] [pytest arguments ...]
#
# Run it in an environment that has the package and its extras dev and kernels. Writes versions.txt,
# pytest.txt and bench.json to DIR (default gpu_check/); about eight minutes on one H100. Exit code 0
# only if all tests passed and the bench found parity.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PY=${PY:-python3}
out=gpu_check bench=1
while (($#)); do
  case $1 in
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --skip-bench) bench=0; shift ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) break ;;
  esac
done

mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$ROOT"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}

if ! "$PY" - > "$out/versions.txt" <<'PYTHON'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device")
import triton

print(f"python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}")
for index in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(index)
    print(f"cuda:{index} {device.name}, sm_{device.major}{device.minor}, "
          f"{device.multi_processor_count} SMs, {device.total_memory / 2**30:.0f} GiB")
PYTHON
then
  echo "gpu_check: no usable GPU with torch and triton in $PY; nothing was run" >&2
  exit 2
fi
cat "$out/versions.txt"

status=0
"$PY" -m pytest -m "gpu or multi_gpu" -ra --durations=10 "$@" 2>&1 | tee "$out/pytest.txt" || status=1
if ((bench)); then
  "$PY" -m megatron_binac bench kernels --json > "$out/bench.json" || status=1
  "$PY" -c "import json, sys; d = json.load(open(sys.argv[1])); print(d['device'], d['backend']);
[print(r['task'], r['implementation'], round(r['milliseconds'], 3), 'ms') for r in d.get('rows', [])]" \
    "$out/bench.json"
fi
echo "gpu_check: $([[ $status == 0 ]] && echo passed || echo FAILED), results in $out"
exit $status
