#!/usr/bin/env bash
# From a fresh clone to trained models, curves and a results table, on the CPU.
#
#   tools/quickstart.sh [--python python3.12] [--run-dir DIR] [--jobs N] [--nproc N]
#                       [--recipes "NAME ..."] [--torch-index URL] [-- binac train arguments ...]
#
#   --python       interpreter of the environment (default: the active environment, else python3)
#   --run-dir      folder of the runs (default runs/quickstart-TIME); a folder of an interrupted
#                  quickstart is continued from its checkpoints
#   --jobs         recipes trained side by side (default: one a core, at most 4)
#   --nproc        ranks of the first recipe (default 2 where there are two cores, actor split by
#                  tensor, critic by pipeline); above 1 it runs alone, before the others
#   --recipes      what is trained, compared and reported
#   --torch-index  where a CPU build of torch is found, if pip's own places have none
set -euo pipefail

# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

python="" torch_index="" run_dir="" nproc="" jobs=""
recipes="quickstart quickstart_grpo quickstart_fixed_critic quickstart_joint"
while (($#)); do
  case $1 in
    --python) python=${2:?--python needs a name or a path}; shift 2 ;;
    --python=*) python=${1#*=}; shift ;;
    --torch-index) torch_index=${2:?--torch-index needs a URL}; shift 2 ;;
    --torch-index=*) torch_index=${1#*=}; shift ;;
    --run-dir) run_dir=${2:?--run-dir needs a folder}; shift 2 ;;
    --run-dir=*) run_dir=${1#*=}; shift ;;
    --jobs) jobs=${2:?--jobs needs a number}; shift 2 ;;
    --jobs=*) jobs=${1#*=}; shift ;;
    --nproc) nproc=${2:?--nproc needs a number}; shift 2 ;;
    --nproc=*) nproc=${1#*=}; shift ;;
    --recipes) recipes=${2:?--recipes needs names}; shift 2 ;;
    --recipes=*) recipes=${1#*=}; shift ;;
    -h | --help) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --) shift; break ;;
    *) die "unknown argument $1; see tools/quickstart.sh --help (arguments of binac train go after --)" ;;
  esac
done
for number in "${nproc:-1}" "${jobs:-1}"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || die "--jobs and --nproc take a positive number, got $number"
done

prepare_environment "$python" "" "$torch_index"
cd "$ROOT"

run_dir=${run_dir:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}
cores=$("$PY" -c 'import os; print(len(os.sched_getaffinity(0)))')
jobs=${jobs:-$((cores < 4 ? cores : 4))}
split=()
if [[ -z $nproc ]]; then
  nproc=$((cores < 2 ? 1 : 2))
  ((nproc == 1)) || split=(--actor-tp 2 --critic-pp 2)
fi
# Thread pools that together exceed the cores slow each other down by a factor.
threads=${OMP_NUM_THREADS:-$((cores > jobs ? cores / jobs : 1))}
read -r -a names <<<"$recipes"
mkdir -p "$run_dir"

declare -A recipe_of=()
failed=() stopping=""

# Job control gives each run a process group of its own, so that Ctrl-C reaches this script alone and
# is passed on exactly once: the runs save, and the wait below sees them end.
set -m
stop() {
  stopping=$1
  say "stopping: the runs save a checkpoint first"
  local pid
  for pid in "${!recipe_of[@]}"; do
    kill -s "$1" "$pid" 2>/dev/null || true
  done
}
trap 'stop INT' INT
trap 'stop TERM' TERM

start() {
  local recipe=$1
  shift
  say "training $recipe (whole output: $run_dir/$recipe.log)"
  OMP_NUM_THREADS=$threads "$PY" -m megatron_binac train "$recipe" --run-dir "$run_dir/$recipe" "$@" \
    > >(tee -a "$run_dir/$recipe.log" | sed -u "s/^/[$recipe] /") 2>&1 &
  recipe_of[$!]=$recipe
}

# Waits until fewer than $1 runs are left.
wait_below() {
  local pid status
  while ((${#recipe_of[@]} >= $1)); do
    # A signal ends this wait early; the loop below then finds nobody gone and waits again.
    wait -n "${!recipe_of[@]}" 2>/dev/null || true
    for pid in "${!recipe_of[@]}"; do
      if ! kill -0 "$pid" 2>/dev/null; then
        status=0
        wait "$pid" 2>/dev/null || status=$?
        if ((status != 0)); then
          failed+=("${recipe_of[$pid]} (exit $status)")
        fi
        unset "recipe_of[$pid]"
      fi
    done
  done
}

training_started=$SECONDS
for index in "${!names[@]}"; do
  [[ -z $stopping ]] || break
  if ((index == 0 && nproc > 1)); then
    threads=$((cores > nproc ? cores / nproc : 1)) start "${names[index]}" --nproc "$nproc" \
      "${split[@]}" "$@"
    wait_below 1
  else
    wait_below "$jobs"
    [[ -z $stopping ]] || break
    start "${names[index]}" "$@"
  fi
done
wait_below 1
trap - INT TERM
set +m

if [[ -n $stopping ]]; then
  say "stopped; go on with: tools/quickstart.sh --run-dir $run_dir"
  [[ $stopping == INT ]] && exit 130
  exit 143
fi
if ((${#failed[@]})); then
  die "failed: ${failed[*]}; the logs are in $run_dir"
fi

say "trained $(((SECONDS - training_started + 30) / 60)) min; results:"
"$PY" -m megatron_binac report "${names[@]/#/$run_dir/}" --out "$run_dir"
say "$run_dir holds the runs; installation and training took $(((SECONDS + 30) / 60)) min together"
