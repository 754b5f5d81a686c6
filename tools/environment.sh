# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes or finds the Python environment and installs the package into it.
#
#   prepare_environment PYTHON EXTRAS [TORCH_INDEX]
#
# PYTHON is an interpreter name or "" (an active virtual environment, else the newest of python3 that
# will do); EXTRAS is a comma list of setup.py extras or "". Sets the variable PY to the interpreter.
# A stamp in the environment remembers what was installed, so that a second call takes a second.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '== %s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# The interpreter $1 as a path that runs and is new enough, or nothing. A pyenv shim refuses versions
# that are installed but not selected; those are looked up in pyenv's own folder.
find_python() {
  local name=$1 candidate root
  local -a candidates=("$name")
  if [[ $name != */* ]] && command -v pyenv >/dev/null 2>&1; then
    root=$(pyenv root 2>/dev/null || true)
    while IFS= read -r candidate; do
      candidates+=("$candidate")
    done < <(compgen -G "$root/versions/*/bin/$name" | sort -rV)
  fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return 0
    fi
  done
  return 1
}

python_tag() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Everything that decides what an install holds. C++ counts: the extension is built at install time.
install_fingerprint() {
  local extras=$1 torch_index=$2
  {
    printf '%s\n' "$ROOT" "$extras" "$torch_index"
    "$PY" -c 'import platform, sys; print(sys.executable, sys.version, platform.machine())'
    cat "$ROOT/setup.py" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/megatron_binac/__init__.py"
    if [[ -d $ROOT/csrc ]]; then
      find "$ROOT/csrc" -type f \( -name '*.cpp' -o -name '*.h' \) -print0 | sort -z | xargs -0 -r cat
    fi
  } | "$PY" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# pip with a sign of life every 15 seconds; what it says goes to the log.
pip_install() {
  local pid started=$SECONDS status=0
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$PY" -m pip install --progress-bar off -c "$ROOT/constraints.txt" "$@" >>"$LOG" 2>&1 &
  pid=$!
  # shellcheck disable=SC2064
  trap "kill $pid 2>/dev/null; exit 130" INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - started >= 15)); then
      started=$SECONDS
      say "installing ... $((SECONDS - INSTALL_STARTED)) s"
    fi
  done
  wait "$pid" || status=$?
  trap - INT TERM
  return "$status"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

# A CPU build of torch is some 200 MB, the CUDA build several GB with its libraries. A build tagged
# "+cpu" is asked for by that name wherever this pip is configured to look; where there is none, pip's
# plain choice is taken later with the rest.
install_cpu_torch() {
  local torch_index=$1 version
  local -a index=()
  if "$PY" -c 'import importlib.metadata as m; m.version("torch")' >/dev/null 2>&1; then
    return 0
  fi
  version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$ROOT/constraints.txt")
  if [[ -n $torch_index ]]; then
    index=(--extra-index-url "$torch_index")
  fi
  if pip_install ${index[@]+"${index[@]}"} "torch==$version+cpu"; then
    say "installed the CPU build of torch $version"
  elif [[ -n $torch_index ]]; then
    die "no torch $version+cpu at $torch_index (see $LOG); expected an index with CPU builds"
  else
    say "no CPU build of torch $version for this Python was found; pip's own choice follows (it may be the large CUDA one)"
    say "  to get a small one, pass --torch-index URL with the index of CPU builds from PyTorch's install page"
  fi
}

install_package() {
  local extras=$1
  if ! pip_install -e "$ROOT${extras:+[$extras]}"; then
    tail -n 25 "$LOG" >&2
    die "the installation failed; the whole log is $LOG"
  fi
}

prepare_environment() {
  local wanted=$1 extras=$2 torch_index=${3-} found folder stamp fingerprint name
  if [[ -z $wanted && -n ${VIRTUAL_ENV-} && -x $VIRTUAL_ENV/bin/python ]]; then
    folder=$VIRTUAL_ENV
    found=$(find_python "$folder/bin/python") || die "the active environment $folder has $("$folder/bin/python" -V 2>&1), expected Python 3.11 or newer; deactivate it or pass --python"
  else
    if [[ -n $wanted ]]; then
      found=$(find_python "$wanted") || die "--python $wanted does not run or is older than 3.11; pass one that does, such as --python python3.11"
    else
      for name in python3 python3.12 python3.11; do
        found=$(find_python "$name") && break
      done
      [[ -n ${found-} ]] || die "no Python 3.11 or newer was found; install one or pass --python PATH"
    fi
    # One environment a Python version; the first one gets the plain name.
    folder=$ROOT/.venv
    if [[ -x $folder/bin/python && $(python_tag "$folder/bin/python" 2>/dev/null) != $(python_tag "$found") ]]; then
      folder=$ROOT/.venv-$(python_tag "$found")
    fi
    if ! "$folder/bin/python" -c 'import pip' >/dev/null 2>&1; then
      say "making $folder with $("$found" -V)"
      "$found" -m venv --clear "$folder" ||
        die "$found cannot make virtual environments (on Debian: install python3-venv); or activate one and run again"
    fi
  fi
  PY=$folder/bin/python
  LOG=$folder/binac-install.log
  stamp=$folder/.binac-installed-${extras:-base}
  fingerprint=$(install_fingerprint "$extras" "$torch_index")
  if [[ -f $stamp && $(<"$stamp") == "$fingerprint" ]]; then
    say "environment $folder is up to date"
    return 0
  fi
  say "installing into $folder (log: $LOG)"
  : >"$LOG"
  INSTALL_STARTED=$SECONDS
  has_gpu || install_cpu_torch "$torch_index"
  install_package "$extras"
  "$PY" -c 'import megatron_binac' || die "megatron_binac was installed but cannot be imported; see $LOG"
  printf '%s\n' "$fingerprint" >"$stamp"
  # Whoever asked for extras has the base as well.
  printf '%s\n' "$(install_fingerprint "" "$torch_index")" >"$folder/.binac-installed-base"
  say "installed in $((SECONDS - INSTALL_STARTED)) s"
}
