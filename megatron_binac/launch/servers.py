"""vLLM servers with nodes of their own, beside the nodes of the ranks and in the same Slurm job.

The first nodes of the job hold the ranks, then come the actor's servers, then the critic's. Ranks
find them by a variable that the config names (`engine.urls=["$BINAC_SERVERS_ACTOR"]`), since hosts
and ports are another life's others: a config, and with it a run, stays the same over requeues.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from megatron_binac.config import Config, RoleConfig
from megatron_binac.launch.site import Site

ROLES = ("actor", "critic")
SHIELD = "megatron_binac.launch.shielded"
STEP = "binac_servers"
"""Start of the names of the servers' steps."""
RESERVED = "/nemo_run"
"""NeMo-Run replaces this text by a job's folder wherever it stands in a script."""
_BACKENDS = {"auto": "binac", "file": "binac", "ipc": "binac_ipc", "nccl": "binac_nccl"}
PORT = "$((30000 + (SLURM_JOB_ID * 16 + ${SLURM_RESTART_COUNT:-0} * 8) % 2700))"
"""Of the first server, below the ports that systems hand out; one more for each further server."""


def parse(text: str | None) -> dict[str, int]:
    """Nodes by role of `actor=1,critic=2`; ValueError for anything else."""
    found: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        role, _, nodes = part.partition("=")
        if role not in ROLES or role in found or not nodes.isdigit() or int(nodes) < 1:
            raise ValueError(
                f"--servers got {text!r}, expected nodes by role: actor=1, critic=1, or "
                "actor=2,critic=1"
            )
        found[role] = int(nodes)
    if text is not None and not found:
        raise ValueError("--servers got nothing, expected nodes by role such as actor=1")
    return found


def variable(role: str) -> str:
    """What holds the addresses of a role's servers inside a job."""
    return f"BINAC_SERVERS_{role.upper()}"


def settings(servers: Mapping[str, int]) -> list[str]:
    """Assignments that make each of these roles sample from its servers."""
    found = []
    for role in servers:
        found += [
            f"{role}.engine.kind=vllm_server",
            f'{role}.engine.urls=["${variable(role)}"]',
            f"{role}.engine.address=$MASTER_ADDR",
        ]
    return found


def num_per_node(site: Site, tp: int) -> int:
    """Servers on one node: each takes `tp` GPUs; without GPUs it is one."""
    return max(1, site.gpus_per_node // tp)


def command(config: Config, role: str, run_dir: Path) -> tuple[str, ...]:
    """Arguments of the interpreter that start one server of a role, without host and port.

    The server has no weights until the run sends them; the model's shape is in a folder that the
    run writes when it starts.
    """
    own: RoleConfig = getattr(config, role)
    raw = config.rollout.temperature == 1.0
    return (
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(folder(run_dir, role)),
        "--enable-scale-out", "--skip-tokenizer-init", "--load-format", "dummy",
        "--dtype", "float32" if own.precision == "fp32" else "bfloat16",
        "--max-model-len", str(own.model.max_sequence_length),
        "--tensor-parallel-size", str(own.engine.tp),
        "--gpu-memory-utilization", f"{own.engine.memory_share:g}",
        "--logprobs-mode", "raw_logprobs" if raw else "processed_logprobs",
        "--enable-prefix-caching",
        "--worker-extension-cls", "megatron_binac.rollout.vllm_engine.WorkerExtension",
        "--weight-transfer-config", f'{{"backend": "{_BACKENDS[own.engine.transport]}"}}',
    )  # fmt: skip


def folder(run_dir: Path, role: str) -> Path:
    """Where a run writes the config.json that its servers start from."""
    return run_dir / "engines" / role / "model"


def of_server(role: str, first: int, tp: int, site: Site) -> list[str]:
    """Lines of one server's script, behind those that give its arguments as "$@" and its folder:
    `first` is the number of the role's first server in the job."""
    lines = ["until [[ -s $folder/config.json ]]; do sleep 1; done"]
    if site.gpus_per_node:
        lines += [
            f"gpu=$((SLURM_LOCALID * {tp}))",
            f"export CUDA_VISIBLE_DEVICES=$(seq -s, $gpu $((gpu + {tp} - 1)))",
        ]
    python = shlex.quote(site.servers_python or site.python)
    return [
        *lines,
        "export VLLM_SERVER_DEV_MODE=1",
        f"port=$((BINAC_SERVE_PORT + {first} + SLURM_PROCID))",
        f'echo "binac: server $SLURM_PROCID of the {role} on $(hostname), port $port"',
        f'exec {python} -m {SHIELD} "$@" --host 0.0.0.0 --port "$port" '
        + shlex.join(site.servers_args),
    ]


def of_batch(
    servers: Mapping[str, int], tps: Mapping[str, int], scripts: Mapping[str, str], site: Site,
    *, nodes: int,
) -> list[str]:  # fmt: skip
    """Lines of the batch script that start all servers and export where they are; `nodes` are the
    ranks' own, `scripts` what each server of a role runs."""
    lines = [
        _SERVE.strip(),
        'mapfile -t binac_hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f"export BINAC_SERVE_PORT={PORT}",
    ]
    at_node, at_server = nodes, 0
    for role, count in servers.items():
        each = num_per_node(site, tps[role])
        num, name = count * each, variable(role)
        lines += [
            f"{name}=",
            f"for ((i = 0; i < {num}; i++)); do",
            f"  {name}+=${{{name}:+,}}http://${{binac_hosts[{at_node} + i / {each}]}}"
            f":$((BINAC_SERVE_PORT + {at_server} + i))",
            "done",
            f"export {name}",
            f'echo "binac: servers of the {role}: ${name}"',
            f"binac_serve {role} {at_node} {count} --nodes={count} --ntasks={num} "
            f"--ntasks-per-node={each} "
            + "".join(f"{word} " for word in _place(site))
            + f"bash -c {shlex.quote(scripts[role])} &",
            "binac_guards+=($!)",
        ]
        at_node, at_server = at_node + count, at_server + num
    return lines


_SERVE = f"""
binac_steps() {{ # WANTED: kill the servers' steps, or all others
  squeue --steps --noheader --job "$SLURM_JOB_ID" --format '%i %j' | while read -r step name; do
    case $name in
      {STEP}_*) if [[ $1 == servers ]]; then scancel --signal=KILL "$step" 2>/dev/null; fi ;;
      batch | extern | interactive) ;;
      *) if [[ $1 == ranks ]]; then scancel --signal=KILL "$step" 2>/dev/null; fi ;;
    esac
  done
}}
binac_serve() {{ # ROLE FIRST NUM SRUN-WORDS: the servers of a role; without them the ranks end too
  local role=$1 hosts
  hosts=$(IFS=,; echo "${{binac_hosts[*]:$2:$3}}")
  shift 3
  srun --overlap --mem=0 --nodelist="$hosts" --job-name={STEP}_"$role" --kill-on-bad-exit=1 \
    --output="$binac_record.servers-$role-%t-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}.out" \
    "$@" </dev/null
  echo "binac: the servers of the $role ended with $?, and so do the ranks"
  while true; do
    binac_steps ranks
    sleep 2
  done
}}
binac_guards=()
"""

END = """
  # Servers do not hear the TERM of a job's end and would be waited for.
  kill "${binac_guards[@]}" 2>/dev/null
  binac_steps servers
"""
"""Lines for the end of the batch script."""


def _place(site: Site) -> list[str]:
    """Options of srun: the container, and the folder of the code that travels with the job."""
    words = []
    code = f"{RESERVED}/code" if site.code == "git" else ""
    if site.container_image:
        words += [f"--container-image={site.container_image}"]
        words += [f"--container-mounts={','.join(site.mounts)}"]
        words += [f"--container-workdir={code}"] if code else []
    elif code:
        words.append(f"--chdir={code}")
    return [shlex.quote(word) for word in words]
