"""The shell text of a job: what each rank runs, and what decides when the job has ended.

NeMo-Run writes the batch script. Two of its hooks are used: the task is a script of ours, and
`setup_lines` put a trap into the batch script that marks a stage as done, or requeues a job that
was stopped or has failed. Values are quoted here, as NeMo-Run would paste them as they are, and it
would turn the names of variables into capitals. Secrets are never written: they come with the
environment of the shell that submits.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_binac.launch import servers
from megatron_binac.launch.site import Site
from megatron_binac.launch.stages import STATE, Stage, draft_of
from megatron_binac.pulse import HANG_SECONDS
from megatron_binac.ranks import EXIT_FILE, STOPPED

HOLD = "hold"
"""File in the state folder that keeps jobs from being requeued: `binac cancel` makes it."""
IDLE_LIVES = 5
"""Lives of a job, one after the other, that may end by a stop without a new checkpoint."""


def of_rank(stage: Stage, site: Site) -> str:
    """The script that srun starts once a rank, or once a node with torchrun."""
    lines = _prologue(stage, site)
    python = shlex.quote(site.python)
    if stage.all_ranks and site.launcher == "torchrun":
        lines += _torchrun(python, site)
    else:
        binac = f'exec {python} -m megatron_binac "$@"'
        lines += [f'if [[ -n $captured ]]; then {binac} >"$captured"; fi', binac]
    return "\n".join(lines) + "\n"


def of_task(stage: Stage, index: int, site: Site, folder: Path, nproc: int) -> str:
    """The script of one task on this machine, without Slurm; it marks the task as done itself."""
    task, record = stage.tasks[index], stage.record(folder, index)
    ranks = f" --nproc {nproc}" if stage.all_ranks and nproc > 1 else ""
    binac = f'{shlex.quote(site.python)} -m megatron_binac "$@"{ranks}'
    lines = [f"export BINAC_TASK={index}", *_prologue(stage, site)]
    lines.append(f'if [[ -n $captured ]]; then {binac} >"$captured"; else {binac}; fi')
    if task.drafted:
        lines.append(f"mv {shlex.quote(str(draft_of(task.makes)))} {shlex.quote(str(task.makes))}")
    lines.append(f"mkdir -p {shlex.quote(str(record.parent))}")
    lines.append(f"echo {task.fingerprint} >{shlex.quote(f'{record}.done')}")
    return "\n".join(lines) + "\n"


def _prologue(stage: Stage, site: Site) -> list[str]:
    """The environment, the place, and the command of this task as "$@"."""
    return [*_environment(site), *_choose(stage), 'mkdir -p "$(dirname "$makes")"']


def _environment(site: Site) -> list[str]:
    # Under NeMo-Run's script srun gives ranks a terminal; a log wants plain lines.
    lines = ["set -euo pipefail", "export TERM=dumb"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.env.items()]
    for name in site.secrets:
        # -v looks without expanding: an echoing shell (set -x) would print the value.
        missing = f"binac: {name} is not in the environment of the job; export it, submit again"
        lines.append(f"[[ -v {name} ]] || {{ echo {shlex.quote(missing)} >&2; exit 2; }}")
    lines += site.setup
    if site.code == "installed":
        lines.append(f"cd {shlex.quote(site.workdir)}")
    else:
        lines.append('export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"')
    return lines


def _choose(stage: Stage) -> list[str]:
    """A case over the tasks: arguments of binac, what is made, where the output goes."""
    lines = ['case "${SLURM_ARRAY_TASK_ID:-${BINAC_TASK:-0}}" in']
    for index, task in enumerate(stage.tasks):
        captured = str(draft_of(task.makes)) if task.captures else ""
        lines += [
            f"  {index})",
            f"    set -- {shlex.join(task.argv)}",
            f"    makes={shlex.quote(str(task.makes))} captured={shlex.quote(captured)} ;;",
        ]
    return [*lines, "esac"]


def _torchrun(python: str, site: Site) -> list[str]:
    """One torchrun a node. It must not act on the signals that Slurm sends to every process: the
    ranks do, and inherit nothing but the ignoring, which they replace by handlers of their own."""
    return [
        "trap '' TERM USR1 USR2",
        "# Ranks that torchrun has started again may never meet (seen with gloo), so that",
        "# restarts inside the job are left to nvidia-resiliency-ext, where it is installed.",
        "runner=torch.distributed.run restarts=0",
        "resilient=nvidia_resiliency_ext.fault_tolerance.launcher",
        f'if {python} -c "import $resilient" 2>/dev/null; then',
        f"  runner=$resilient restarts={site.retries}",
        "fi",
        f'exec {python} -m "$runner" --nnodes "$SLURM_STEP_NUM_NODES" '
        f"--nproc-per-node {site.ranks_per_node} --node-rank \"$SLURM_NODEID\" "
        '--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" '
        f'--rdzv-endpoint "$MASTER_ADDR:$BINAC_PORT" --max-restarts "$restarts" '
        '--signals-to-handle SIGINT -m megatron_binac "$@"',
    ]


def of_servers(stage: Stage, site: Site) -> dict[str, str]:
    """By role, the script of each of its servers."""
    found: dict[str, str] = {}
    first = 0
    for role, nodes in stage.servers.items():
        lines = [*_environment(site), 'case "${SLURM_ARRAY_TASK_ID:-0}" in']
        for index, task in enumerate(stage.tasks):
            place = servers.folder(task.engines, role)
            lines += [
                f"  {index})",
                f"    set -- {shlex.join(task.serves[role])}",
                f"    folder={shlex.quote(str(place))} ;;",
            ]
        tp = stage.server_tp[role]
        lines += ["esac", *servers.of_server(role, first, tp, site)]
        found[role] = "\n".join(lines) + "\n"
        first += nodes * servers.num_per_node(site, tp)
    return found


def of_batch(stage: Stage, site: Site, folder: Path, *, nodes: int = 1) -> str:
    """Lines of the batch script, which runs on the job's first node and outside a container;
    `nodes` are those of the ranks."""
    records = [str(stage.record(folder, index)) for index in range(len(stage.tasks))]
    drafts = [str(draft_of(task.makes)) if task.drafted else "" for task in stage.tasks]
    port = str(site.port) if site.port else _PORT
    exported = ["MASTER_ADDR", "BINAC_PORT", EXIT_FILE, HANG_SECONDS]
    if site.port:
        exported.append("MASTER_PORT")
    lines = [
        "# From here on the script is not echoed any more.",
        "{ set +vx; } 2>/dev/null",
        "# What the shell that submitted may have had of another job.",
        "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"BINAC_PORT={port}",
        *(["MASTER_PORT=$BINAC_PORT"] if site.port else []),
        f"binac_records=({shlex.join(records)})",
        f"binac_fingerprints=({shlex.join(task.fingerprint for task in stage.tasks)})",
        f"binac_makes=({shlex.join(str(task.makes) for task in stage.tasks)})",
        f"binac_drafts=({shlex.join(drafts)})",
        f"binac_hold={shlex.quote(str(folder / STATE / HOLD))}",
        "binac_task=${SLURM_ARRAY_TASK_ID:-0}",
        "binac_record=${binac_records[binac_task]}",
        f"{EXIT_FILE}=$binac_record.exit-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}.json",
        f"{HANG_SECONDS}={site.hang_s:g}",
        f"export {' '.join(exported)}",
        f"binac_retries={site.retries} binac_idle_lives={IDLE_LIVES}",
        f"binac_stopped={shlex.quote(' '.join(map(str, STOPPED)))}",
        _END.replace("@SERVERS@", servers.END if stage.servers else ""),
        "trap binac_end EXIT",
        "# Ended by a signal, bash would hand binac_end the code of whatever came last: 0.",
        "trap : HUP INT QUIT TERM USR1 USR2 XCPU",
        _BEGIN,
    ]
    if stage.servers:
        scripts = of_servers(stage, site)
        lines += servers.of_batch(stage.servers, stage.server_tp, scripts, site, nodes=nodes)
    return "\n".join(lines) + "\n"


_PORT = "$((15000 + (SLURM_JOB_ID * 17 + ${SLURM_RESTART_COUNT:-0} * 5) % 15000))"
"""The meeting point of torchrun; ranks that srun starts come to the like (`ranks.existing`)."""

_BEGIN = r"""
if [[ $(cat "$binac_record.done" 2>/dev/null) == "${binac_fingerprints[binac_task]}" ]]; then
  echo "binac: done already, nothing to do"
  trap - EXIT
  exit 0
fi
rm -f "${binac_drafts[binac_task]:-$binac_record.none}"
"""

_END = r"""
binac_newest() { # the newest checkpoint of what this task makes, if it makes any
  ls "${binac_makes[binac_task]}/checkpoints" 2>/dev/null | grep '^step_' | sort | tail -n 1
}
binac_end() { # runs when the batch script ends, however it ends
  local code=$? said="" draft newest idle failures state pulse
  set +e
  trap - EXIT
@SERVERS@  if [[ -s $BINAC_EXIT_FILE ]]; then
    said=$(sed -n 's/.*"code": *\([0-9]*\).*/\1/p' "$BINAC_EXIT_FILE")
    echo "binac: the ranks say: $(cat "$BINAC_EXIT_FILE")"
  fi
  said=${said:-$code}
  if [[ $code == 0 && $said == 0 ]]; then
    draft=${binac_drafts[binac_task]}
    if [[ -n $draft ]]; then mv "$draft" "${binac_makes[binac_task]}" || exit 1; fi
    echo "${binac_fingerprints[binac_task]}" >"$binac_record.done.draft"
    mv "$binac_record.done.draft" "$binac_record.done"
    echo "binac: done"
    exit 0
  fi
  if [[ $code == 0 ]]; then code=$said; fi
  state=$(scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p')
  if [[ $state != RUNNING ]]; then
    echo "binac: ended with $code, and Slurm calls the job $state: left as it is"
  elif [[ -e $binac_hold ]]; then
    echo "binac: ended with $code and held; go on with binac resume"
  elif [[ " $binac_stopped " == *" $said "* ]]; then
    newest=$(binac_newest)
    idle=0
    if [[ "$newest" == "$(head -n 1 "$binac_record.lives" 2>/dev/null)" ]]; then
      idle=$(($(tail -n 1 "$binac_record.lives") + 1))
    fi
    printf '%s\n%d\n' "$newest" "$idle" >"$binac_record.lives"
    if ((idle >= binac_idle_lives)); then
      echo "binac: stopped $idle times without a new checkpoint: give the job a longer time, or" \
        "stop_before_s a smaller number"
    else
      echo "binac: stopped with ${newest:-no checkpoint}; back into the queue"
      scontrol requeue "$SLURM_JOB_ID" || echo "binac: Slurm does not requeue it; binac resume does"
    fi
  elif [[ $said == 2 ]]; then
    echo "binac: wrong use, which trying again does not mend"
  elif [[ $said == 3 ]]; then
    echo "binac: the run has ended early and says why in its log.txt; trying again gives the same"
  else
    echo "$SLURM_JOB_ID ${SLURM_RESTART_COUNT:-0} $code" >>"$binac_record.failures"
    failures=$(wc -l <"$binac_record.failures")
    # A hung rank ends by SIGALRM, srun then ends the others by SIGTERM and gives the highest code.
    pulse=${binac_makes[binac_task]}/pulse
    if [[ $code == 143 && -n $(find "$pulse" -name '*.stack' -size +0 2>/dev/null) ]]; then
      code=142
    fi
    case $code in
      142) echo "binac: hung: no phase began for $BINAC_HANG_SECONDS s; binac status --stacks" ;;
      143) echo "binac: a rank has failed, and srun has ended the others" ;;
      137) echo "binac: a rank was killed (kill -9, or out of memory)" ;;
      *) echo "binac: failed with $code" ;;
    esac
    if ((failures <= binac_retries)); then
      echo "binac: failure $failures of at most $((binac_retries + 1)); back into the queue"
      scontrol requeue "$SLURM_JOB_ID" || echo "binac: Slurm does not requeue it; binac resume does"
    fi
  fi
  exit "$code"
}
"""


def array(stage: Stage, todo: Sequence[int]) -> str | None:
    """Slurm's --array for the tasks that are left; None where the stage is a single job."""
    return None if len(stage.tasks) == 1 else ",".join(map(str, todo))
