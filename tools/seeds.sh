#!/usr/bin/env bash
# Train the quickstart recipes with several seeds at equal sampled tokens, two runs at a time, then compare them:
# OUT/pooled.md and OUT/pooled.png, against the first of the recipes.
#   tools/seeds.sh --seeds 5 --out runs/seeds [--recipes "quickstart quickstart_grpo"] [-- --set key=value ...]
# A seed decides everything: the problems and their order, the warm start, every sample. The recipes of one
# seed start from the same weights. Finished runs are skipped, so that the same command continues.
set -euo pipefail

seeds=5 out=runs/seeds jobs=2
recipes="quickstart quickstart_joint quickstart_fixed_critic quickstart_grpo"
while [ $# -gt 0 ]; do
  case "$1" in
    --seeds) seeds=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --jobs) jobs=$2; shift 2 ;;
    --recipes) recipes=$2; shift 2 ;;
    --) shift; break ;;
    *) echo "seeds.sh: got $1, expected --seeds N, --out DIR, --jobs N, --recipes NAMES or --" >&2; exit 2 ;;
  esac
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$out"

train() {
  local recipe=$1 seed=$2
  shift 2
  local run=$out/$recipe-$seed
  [ ! -e "$run.done" ] || return 0
  python -W ignore -m megatron_binac train "$recipe" --run-dir "$run" --set seed="$seed" \
    --set task.options.seed="$seed" --set warm_start.seed="$seed" \
    --set warm_start.cache_dir="$out/warm_start" "$@" > "$run.txt" 2>&1 && touch "$run.done"
}

for seed in $(seq 1 "$seeds"); do
  for recipe in $recipes; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
    train "$recipe" "$seed" "$@" &
  done
done
wait
runs=()
for recipe in $recipes; do
  for seed in $(seq 1 "$seeds"); do
    runs+=("$out/$recipe-$seed")
    # Asked of the file: the shell forgets how a job ended that was quicker than its next look.
    [ -e "${runs[-1]}.done" ] || { echo "seeds.sh: ${runs[-1]} failed; see ${runs[-1]}.txt" >&2; exit 1; }
  done
done
python -m megatron_binac compare "${runs[@]}" --markdown "$out/pooled.md" --plot "$out/pooled.png"
