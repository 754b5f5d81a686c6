#!/usr/bin/env bash
# A Slurm cluster of several nodes on this machine: real daemons, real srun, for tests and for trying out.
#
#   tools/local_slurm.sh start [--nodes N] [--cpus N] [--memory MIB] [--gpus N] [--port P] [--watch PID]
#                              [--no-accounting] [--no-install]
#   tools/local_slurm.sh install                    the packages only: whether it can be had here
#   tools/local_slurm.sh status | stop | remove     remove: stop, then delete the folder
#   tools/local_slurm.sh env                        lines for eval: SLURM_CONF
#   tools/local_slurm.sh down NODE | up NODE        cut a node's power (nothing on it survives); put it back
#
# Every command takes --root DIR (default /tmp/binac-slurm): config, state and logs. start installs missing
# packages by apt, needs root, can be repeated, and returns when all nodes are idle. With --watch it stops
# by itself once process PID is gone. Each node has a host name, processes and /dev/shm of its own; the
# network is the loopback that all share. Partitions: main, and low (requeued when high needs its nodes).
#
# Exit codes: 0 done, 1 failed (the log is named), 2 wrong use, 3 cannot be had here (the reason is told).
set -euo pipefail

say() { printf 'local_slurm: %s\n' "$*" >&2; }
die() { local code=$1; shift; say "$*"; exit "$code"; }

SELF=$(readlink -f "${BASH_SOURCE[0]}")
command=${1:-help}
shift || true
root=/tmp/binac-slurm nodes=4 cpus=8 memory=4096 gpus=0 port="" watch="" accounting=1 install=1 words=()
while (($#)); do
  case $1 in
    --root) root=${2:?--root needs a folder}; shift 2 ;;
    --nodes) nodes=${2:?--nodes needs a number}; shift 2 ;;
    --cpus) cpus=${2:?--cpus needs a number}; shift 2 ;;
    --memory) memory=${2:?--memory needs MiB}; shift 2 ;;
    --gpus) gpus=${2:?--gpus needs a number}; shift 2 ;;
    --port) port=${2:?--port needs a number}; shift 2 ;;
    --watch) watch=${2:?--watch needs a process id}; shift 2 ;;
    --no-accounting) accounting=0; shift ;;
    --no-install) install=0; shift ;;
    -*) die 2 "unknown option $1; see tools/local_slurm.sh help" ;;
    *) words+=("$1"); shift ;;
  esac
done
for number in "$nodes" "$cpus" "$memory" "${port:-1}"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || die 2 "got $number, expected a positive number"
done
[[ $root == /* ]] || root=$PWD/$root
((${#root} <= 60)) || die 2 "--root $root is too long for the sockets in it; use at most 60 characters"
export SLURM_CONF=$root/etc/slurm.conf
unset SLURM_JOB_ID SLURM_STEP_ID

# Small parts

is_up() { # FILE with a pid: that process lives and is no zombie
  local pid state
  pid=$(cat "$1" 2>/dev/null) && [[ -n $pid ]] || return 1
  state=$(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) || return 1
  [[ -n $state && $state != Z* ]]
}

await() { # SECONDS WHAT COMMAND...: generous, as the machine may be busy with other things
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < until)) || die 1 "waited in vain for $what; the logs are in $root/log"
    sleep 0.2
  done
}

end() { # FILE [SIGNAL]: end the process named there and wait for it
  local pid tries=0
  if is_up "$1"; then
    pid=$(<"$1")
    kill -s "${2:-TERM}" "$pid" 2>/dev/null || true
    while [[ -e /proc/$pid && $(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) != Z* ]]; do
      ((tries++ < 100)) || kill -s KILL "$pid" 2>/dev/null || true
      ((tries < 150)) || break
      sleep 0.1
    done
  fi
  rm -f "$1"
}

node_names() { seq -f 'node%g' 1 "$nodes"; }
node_address() { echo "127.0.91.${1#node}"; }

# Set-up

check_machine() {
  [[ $(id -u) == 0 ]] || die 3 "cannot be had here: needs root, this is $(id -un)"
  [[ -r /etc/debian_version ]] || command -v slurmctld >/dev/null ||
    die 3 "cannot be had here: Slurm is not installed and this is no Debian to install it with apt"
  unshare --uts --mount --ipc --pid --fork --mount-proc true 2>/dev/null ||
    die 3 "cannot be had here: this container may not make namespaces (needs CAP_SYS_ADMIN)"
}

install_packages() {
  local -a wanted=(slurmctld slurmd slurm-client munge) missing=()
  ((!accounting)) || wanted+=(slurmdbd mariadb-server-core mariadb-client-core)
  local name
  for name in "${wanted[@]}"; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  if ((!install)) || ! command -v apt-get >/dev/null; then
    die 3 "cannot be had here: ${missing[*]} not installed"
  fi
  say "installing ${missing[*]}"
  # Services must not start by themselves; packages ask this program.
  local policy=/usr/sbin/policy-rc.d own_policy=""
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    own_policy=1
  fi
  local code=0
  {
    timeout 300 apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive timeout 900 apt-get install -y -qq --no-install-recommends \
        -o DPkg::Lock::Timeout=300 "${missing[@]}"
  } >"$root/log/apt.log" 2>&1 </dev/null || code=$?
  [[ -z $own_policy ]] || rm -f "$policy"
  ((code == 0)) ||
    die 3 "cannot be had here: apt could not install ${missing[*]}: $(tail -n 1 "$root/log/apt.log")"
}

free_port() { # a base with nobody near it, below the range that the system hands out
  local base offset
  while :; do
    base=$((20000 + RANDOM % 9000))
    for offset in 0 1 $(seq 11 $((10 + nodes))); do
      if (exec 3<>"/dev/tcp/127.0.0.1/$((base + offset))") 2>/dev/null; then continue 2; fi
    done
    echo "$base"
    return
  done
}

write_config() {
  local name gres=""
  echo "$nodes" "$cpus" "$memory" "$gpus" "$port" "$accounting" >"$root/etc/settings"
  {
    printf '127.0.0.1 localhost %s\n' "$(hostname -s)"
    for name in $(node_names); do printf '%s %s\n' "$(node_address "$name")" "$name"; done
  } >"$root/etc/hosts"
  if ((gpus)); then
    gres=" Gres=gpu:$gpus"
    mkdir -p "$root/dev"
    for name in $(seq 0 $((gpus - 1))); do
      [[ -e $root/dev/gpu$name ]] || mknod "$root/dev/gpu$name" c 1 3 # a /dev/null that is counted
      printf 'Name=gpu File=%s\n' "$root/dev/gpu$name"
    done >"$root/etc/gres.conf"
  fi
  {
    cat <<END
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
# The controller stays on loopback. srun must not: inside a job it would listen on its node's address
# alone, while the other nodes call back on 127.0.0.1.
CommunicationParameters=NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired; two minutes by default, at least 5 s (a
# smaller number is logged as invalid, and two minutes it is).
AuthInfo=socket=$root/run/munge.socket,cred_expire=5
StateSaveLocation=$root/state/controller
SlurmdSpoolDir=$root/state/%n
SlurmctldPidFile=$root/run/slurmctld.pid
SlurmdPidFile=$root/run/slurmd-%n.pid
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
# Without cgroups: processes are found through /proc, nothing is bound or limited.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
# Nodes may claim more than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1
ReturnToService=2
JobRequeue=1
# What no partition can hold is refused, not left waiting.
EnforcePartLimits=ALL
# Two clusters on one loopback should not give their jobs the same ports, which come from job ids.
FirstJobId=$((1000 + RANDOM % 50000))
# A node counts as lost soon, but not because this machine was busy for a moment.
SlurmdTimeout=30
KillWait=5
MessageTimeout=30
BatchStartTimeout=60
MinJobAge=86400
CompleteWait=0
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,bf_continue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
END
    if ((accounting)); then
      cat <<END
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((port + 1))
AccountingStoragePass=$root/run/munge.socket
AccountingStorageEnforce=associations,limits
END
      ((!gpus)) || echo "AccountingStorageTRES=gres/gpu"
    fi
    ((!gpus)) || echo "GresTypes=gpu"
    for name in $(node_names); do
      printf 'NodeName=%s NodeHostname=%s NodeAddr=%s Port=%d CPUs=%d RealMemory=%d%s\n' \
        "$name" "$name" "$(node_address "$name")" $((port + 10 + ${name#node})) "$cpus" "$memory" "$gres"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=240 DefaultTime=10"
    echo "PartitionName=low Nodes=ALL MaxTime=240 DefaultTime=10 PriorityTier=1 PreemptMode=REQUEUE"
    echo "PartitionName=high Nodes=ALL MaxTime=240 DefaultTime=10 PriorityTier=10 PreemptMode=OFF"
  } >"$SLURM_CONF"
}

start_munge() {
  is_up "$root/run/munged.pid" && return 0
  [[ -s $root/etc/munge.key ]] || (umask 077 && head -c 512 /dev/urandom >"$root/etc/munge.key")
  rm -f "$root/run/munge.socket" "$root/run/munge.socket.lock"
  # force: it runs as root, below a folder that others may write to (/tmp).
  munged --force --key-file "$root/etc/munge.key" --socket "$root/run/munge.socket" \
    --pid-file "$root/run/munged.pid" --log-file "$root/log/munged.log" \
    --seed-file "$root/run/munge.seed" >>"$root/log/munged.out" 2>&1 </dev/null
  await 60 munged test -S "$root/run/munge.socket"
}

start_accounting() {
  ((accounting)) || return 0
  if ! is_up "$root/run/mariadb.pid"; then
    if [[ ! -d $root/db/mysql ]]; then
      mariadb-install-db --no-defaults --user=root --datadir="$root/db" --skip-test-db \
        >"$root/log/mariadb-install.log" 2>&1 || die 1 "mariadb-install-db failed: $root/log/mariadb-install.log"
    fi
    printf '%s\n' "CREATE DATABASE IF NOT EXISTS slurm_acct_db;" \
      "CREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY 'local';" \
      "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';" >"$root/etc/accounting.sql"
    setsid mariadbd --no-defaults --user=root --datadir="$root/db" --skip-networking \
      --socket="$root/run/mariadb.socket" --pid-file="$root/run/mariadb.pid" \
      --init-file="$root/etc/accounting.sql" --log-error="$root/log/mariadb.log" \
      --innodb-buffer-pool-size=64M --innodb-flush-log-at-trx-commit=0 --innodb-doublewrite=0 \
      >>"$root/log/mariadb.out" 2>&1 </dev/null &
    await 120 mariadb test -S "$root/run/mariadb.socket"
    await 60 "mariadb's pid file" test -s "$root/run/mariadb.pid"
  fi
  if ! is_up "$root/run/slurmdbd.pid"; then
    (
      umask 077 # slurmdbd insists
      cat >"$root/etc/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$root/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$((port + 1))
CommunicationParameters=NoInAddrAny
SlurmUser=root
LogFile=$root/log/slurmdbd.log
PidFile=$root/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=local
StorageLoc=slurm_acct_db
END
    )
    # The client library of mariadb takes its socket from this variable.
    MYSQL_UNIX_PORT=$root/run/mariadb.socket setsid slurmdbd >>"$root/log/slurmdbd.out" 2>&1 </dev/null
    await 120 slurmdbd sacctmgr --noheader list cluster
  fi
  # Each of these says so and does nothing where it is there already.
  sacctmgr -i add cluster local >/dev/null 2>&1 || true
  sacctmgr -i add account project Description=project Organization=local >/dev/null 2>&1 || true
  sacctmgr -i add user root Account=project >/dev/null 2>&1 || true
  await 60 "the account in the database" bash -c \
    'sacctmgr -n -P show assoc user=root format=account | grep -qx project'
}

start_controller() {
  is_up "$root/run/slurmctld.pid" && return 0
  # It binds the address that its own host name has in our hosts file.
  setsid unshare --mount bash -c '
    mount --make-rprivate / && mount --bind "$1/etc/hosts" /etc/hosts && exec slurmctld -f "$SLURM_CONF"' \
    _ "$root" >>"$root/log/slurmctld.out" 2>&1 </dev/null
  await 120 slurmctld scontrol ping
}

start_node() { # NAME
  local name=$1
  is_up "$root/run/$name.pid" && return 0
  mkdir -p "$root/state/$name"
  rm -f "$root/run/slurmd-$name.pid"
  # kill-child: with the process outside, the first one inside goes, and with it the whole node.
  setsid unshare --uts --mount --ipc --pid --fork --mount-proc --kill-child=KILL \
    bash "$SELF" inside "$name" --root "$root" >>"$root/log/$name.out" 2>&1 </dev/null &
  echo $! >"$root/run/$name.pid"
}

inside() { # NAME: the first process of a node
  hostname "$1"
  mount --make-rprivate /
  mount --bind "$root/etc/hosts" /etc/hosts
  mount -t tmpfs tmpfs /dev/shm
  slurmd -D -f "$SLURM_CONF" -N "$1" &
  wait $!
}

all_idle() {
  [[ $(sinfo --noheader -p main -t idle,mixed,allocated -o %D | awk '{n += $1} END {print n + 0}') == "$nodes" ]]
}

load_settings() {
  [[ -r $root/etc/settings ]] || return 1
  read -r nodes cpus memory gpus port accounting <"$root/etc/settings"
}

start() {
  check_machine
  mkdir -p "$root"/{etc,log,run,state/controller}
  chmod 755 "$root"
  # One at a time; 9>&-: a daemon that inherits the lock would hold it for ever.
  exec 9>"$root/run/lock"
  flock -w 300 9 || die 1 "another start of $root has been going on for 5 minutes"
  {
    local started=$SECONDS name
    if is_up "$root/run/slurmctld.pid"; then
      load_settings
    else
      stop
      install_packages
      [[ -n $port ]] || port=$(free_port)
      write_config
    fi
    start_munge
    start_accounting
    start_controller
    for name in $(node_names); do start_node "$name"; done
    await 120 "$nodes idle nodes" all_idle
    say "$nodes nodes after $((SECONDS - started)) s: export SLURM_CONF=$SLURM_CONF"
    if [[ -n $watch ]]; then
      setsid bash "$SELF" watcher "$watch" --root "$root" >/dev/null 2>&1 </dev/null &
    fi
  } 9>&-
}

watcher() { # PID
  while kill -0 "$1" 2>/dev/null; do
    [[ -e $SLURM_CONF ]] || exit 0
    sleep 2
  done
  stop
}

stop() {
  local file
  for file in "$root"/run/node*.pid; do
    [[ ! -e $file ]] || end "$file" KILL
  done
  rm -f "$root"/run/slurmd-*.pid
  for file in slurmctld slurmdbd mariadb munged; do end "$root/run/$file.pid"; done
}

status() {
  local name
  for name in munged mariadb slurmdbd slurmctld $(node_names); do
    if is_up "$root/run/$name.pid"; then
      echo "$name up, process $(<"$root/run/$name.pid")"
    else
      echo "$name down"
    fi
  done
  is_up "$root/run/slurmctld.pid" && sinfo --Node --long
}

need_node() {
  load_settings || die 2 "there is no cluster in $root; start one"
  ((${#words[@]} == 1)) || die 2 "expected the name of one node"
  node_names | grep -qx "${words[0]}" || die 2 "there is no ${words[0]}, only $(node_names | tr '\n' ' ')"
}

case $command in
  start) start ;;
  install) check_machine && mkdir -p "$root/log" && install_packages ;;
  stop) stop ;;
  remove) stop && rm -rf "$root" ;;
  status) load_settings && status ;;
  env) printf 'export SLURM_CONF=%q\n' "$SLURM_CONF" ;;
  down)
    need_node
    end "$root/run/${words[0]}.pid" KILL
    # The controller would find out by itself after SlurmdTimeout.
    scontrol update nodename="${words[0]}" state=down reason="power is off"
    ;;
  up)
    need_node
    start_node "${words[0]}"
    await 120 "$nodes idle nodes" all_idle
    ;;
  inside) inside "${words[0]}" ;;
  watcher) watcher "${words[0]}" ;;
  help | -h | --help) sed -n '2,/^set /p' "$SELF" | sed '$d; s/^# \{0,1\}//' ;;
  *) die 2 "unknown command $command; expected start, install, stop, status, env, down, up or remove" ;;
esac
