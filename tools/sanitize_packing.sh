#!/usr/bin/env bash
# Runs the packing tests on an extension built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   tools/sanitize_packing.sh [PYTHON] [pytest arguments]
#
# PYTHON (default: python3) needs pybind11, setuptools, numpy, pytest and hypothesis. Nothing is written to
# the source tree. Any finding of a sanitizer ends the run with a non-zero exit.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$(command -v "${1:-python3}")
shift || true
CXX=${CXX:-g++}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g -D_GLIBCXX_ASSERTIONS"
echo "== building with $FLAGS"
(
  cd "$ROOT"
  CFLAGS="$FLAGS" LDFLAGS="-fsanitize=address,undefined" "$PYTHON" setup.py -q \
    build_ext --build-lib "$WORK" --build-temp "$WORK/objects"
)
built=$(find "$WORK/megatron_binac" -name '_C*.so')
if [[ -z $built ]]; then
  echo "error: the extension was not built; see the compiler's messages above" >&2
  exit 1
fi
# A copy of the package around the new extension, which comes first on the path.
find "$ROOT/megatron_binac" -maxdepth 1 -name '*.py' -exec cp {} "$WORK/megatron_binac/" \;

# The interpreter has no sanitizer in it, so the runtimes are loaded before it; libstdc++ with them,
# or the interceptor of exceptions finds nothing to call.
preload=""
for library in libasan.so libubsan.so libstdc++.so; do
  preload+="$("$CXX" -print-file-name=$library) "
done
cd "$WORK"
export PYTHONPATH="$WORK" PYTHONMALLOC=malloc OMP_NUM_THREADS=1
# The interpreter frees little at its end: its leaks would hide everything else.
# Reports go to files, since pytest holds the standard streams.
export ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=1:log_path=$WORK/report"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$WORK/report"
run() { LD_PRELOAD="$preload" "$PYTHON" "$@"; }

run - "$WORK" <<'PY'
import sys
from pathlib import Path

from megatron_binac import _C

assert Path(_C.__file__).is_relative_to(sys.argv[1]), f"{_C.__file__} is not the extension just built"
print("== testing", _C.__file__)
PY
if ! run -m pytest -q -p no:cacheprovider -c "$ROOT/pyproject.toml" --rootdir "$ROOT" \
  -k "not reference" "$ROOT/tests/test_packing.py" "$ROOT/tests/test_packing_properties.py" "$@"; then
  cat "$WORK"/report* >&2 2>/dev/null || true
  echo "error: a test failed or a sanitizer found something" >&2
  exit 1
fi
echo "== no finding of AddressSanitizer or UndefinedBehaviorSanitizer"
