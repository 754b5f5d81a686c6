"""`binac bench kernels`: parity first, then speed against the floor of the card and against others.

Three parts, each also alone: the offline compile (no GPU needed), the paper roofline (bytes and
operations of each kernel, and the microseconds below which no H100 or H200 can go), and the
measurement, which refuses to print a speed unless every parity check has passed in the same run.

Shapes: T tokens, H hidden, V vocabulary, N rows, S sequences.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_binac import kernels
from megatron_binac.algo import advantages, distill, losses
from megatron_binac.algo.losses import PolicyLossConfig
from megatron_binac.arguments import Parser, whole
from megatron_binac.kernels.reference import BACKWARD_ROWS

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """Dense bfloat16 operations and memory bytes a second, by the maker's data sheet.

    Example: ``Card(name="H100 SXM", flops=989.4e12, bandwidth=3.35e12)``
    """

    name: str
    flops: float
    bandwidth: float


CARDS = (
    Card(name="H100 SXM", flops=989.4e12, bandwidth=3.35e12),
    Card(name="H200 SXM", flops=989.4e12, bandwidth=4.8e12),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The problem: ``Size(num_tokens=8192, hidden=4096, vocab=131072)``."""

    num_tokens: int
    hidden: int
    vocab: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """What a kernel has to compute and to move, all its launches for one batch together."""

    kernel: str
    flops: float
    num_bytes: float
    floor_us: dict[str, float]
    """By card: the larger of compute and memory time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """One comparison with float64: the worst error relative to the largest true element."""

    check: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # nan fails


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One measured implementation."""

    task: str
    implementation: str
    milliseconds: float
    teraflops: float
    flops_share: float
    """Of the measured matrix product of this device."""
    gigabytes_per_second: float
    bandwidth_share: float
    """Of the measured copy of this device; of the bytes that the floor counts."""
    extra_mebibytes: float
    """Peak memory of the step above what was allocated before it; nan where it is not measured (on
    a CPU), which is null in JSON and a dash in the table."""


TURNS, TREES = 4096, 128
"""Of a step: what the group and tree kernels of the paper roofline work on."""


def roofline(size: Size) -> list[Floor]:
    """Operations and bytes of the kernels as they are scheduled, for bfloat16 with a main_grad.

    Bytes are those that must pass between memory and the chip: operands once for each pass that the
    schedule makes over them, results once. The backward reads weight and main_grad once for each
    row chunk.
    """
    T, H, V = size.num_tokens, size.hidden, size.vocab
    chunks = -(-T // BACKWARD_ROWS)
    product = 2.0 * T * H * V
    rows: list[tuple[str, float, float]] = [
        ("linear log-prob: forward", product, 2.0 * (T * H + V * H) + 4.0 * 4 * T),
        (
            "linear log-prob: logit gradients",
            product,
            2.0 * (T * H + chunks * V * H) + 2.0 * T * V,
        ),
        (
            "linear log-prob: grad of hidden",
            product,
            2.0 * T * V + 2.0 * chunks * V * H + 2.0 * T * H,
        ),
        (
            "linear log-prob: grad of weight into main_grad",
            product,
            2.0 * T * V + 2.0 * T * H + 8.0 * chunks * V * H,
        ),
        ("log-prob of given logits: forward", 6.0 * T * V, 2.0 * T * V),
        ("log-prob of given logits: backward", 6.0 * T * V, 4.0 * T * V),
        ("policy loss, gradient and statistics", 60.0 * T, 4.0 * 6 * T + T),
        ("GAE", 20.0 * T, 4.0 * 4 * T + T),
        # Reward, group and valid in, advantage and trainable out; ids are compared pairwise, twice.
        (f"group advantage, {TURNS} turns", 4.0 * TURNS**2, (4.0 + 8 + 1 + 4 + 1) * TURNS),
        # A reward, a flag and a credit for each attempt, revision and probe; two for a feedback.
        (f"tree credit, {TREES} trees of 8 x 4 x 4 x 2", 20.0 * 72 * TREES, 9.0 * 88 * TREES),
        ("spread to tokens", 2.0 * T, 4.0 * T + T),
        ("top-k divergence: tail, two policies", 12.0 * T * V, 4.0 * T * V),
    ]
    return [
        Floor(
            kernel=name,
            flops=flops,
            num_bytes=num_bytes,
            floor_us={
                # Pointwise work runs on the plain units, where it never is the limit.
                card.name: 1e6
                * max(
                    flops / card.flops if name.startswith("linear") else 0.0,
                    num_bytes / card.bandwidth,
                )
                for card in CARDS
            },
        )
        for name, flops, num_bytes in rows
    ]


def check_parity(device: torch.device) -> list[Parity]:
    """Every public op against float64, forward and gradients, small and odd shapes."""
    torch.manual_seed(0)
    found: list[Parity] = []

    def compare(check: str, got: Tensor, want: Tensor, tolerance: float) -> None:
        want = want.detach().double().cpu()
        scale = max(float(want.abs().max()), 1e-6)
        error = float((got.detach().double().cpu() - want).abs().max()) / scale
        found.append(Parity(check=check, error=error, tolerance=tolerance))

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
        name = str(dtype).removeprefix("torch.")
        hidden = torch.randn(63, 72, device=device).to(dtype).requires_grad_()
        weight = torch.randn(1003, 72, device=device).to(dtype).requires_grad_()
        labels = torch.randint(0, 1000, (63,), device=device)
        factor = torch.randn(63, dtype=torch.float64)
        logprob, entropy = kernels.token_logprob(
            hidden, weight, labels, temperature=0.9, num_real_columns=1000, with_entropy=True
        )
        assert entropy is not None
        (logprob * factor.to(logprob)).sum().add(entropy.sum()).backward()
        hidden64 = hidden.detach().cpu().double().requires_grad_()
        weight64 = weight.detach().cpu().double().requires_grad_()
        logp = ((hidden64 @ weight64.T)[:, :1000] / 0.9).log_softmax(-1)
        want_entropy = -(logp.exp() * logp).sum(-1)
        want = logp.gather(1, labels.cpu()[:, None])[:, 0]
        (want * factor).sum().add(want_entropy.sum()).backward()
        compare(f"linear log-prob {name}", logprob, want, 1e-5)
        compare(f"linear entropy {name}", entropy, want_entropy, 1e-5)
        assert hidden.grad is not None and hidden64.grad is not None
        assert weight.grad is not None and weight64.grad is not None
        compare(f"linear grad of hidden {name}", hidden.grad, hidden64.grad, tolerance)
        compare(f"linear grad of weight {name}", weight.grad, weight64.grad, tolerance)

    logits = (3 * torch.randn(63, 1003, device=device)).requires_grad_()
    labels = torch.randint(0, 1003, (63,), device=device)
    logprob, entropy = kernels.logprob_from_logits(logits, labels, with_entropy=True)
    assert entropy is not None
    (logprob.sum() + entropy.sum()).backward()
    logits64 = logits.detach().cpu().double().requires_grad_()
    logp = logits64.log_softmax(-1)
    want = logp.gather(1, labels.cpu()[:, None])[:, 0]
    want_entropy = -(logp.exp() * logp).sum(-1)
    (want.sum() + want_entropy.sum()).backward()
    assert logits.grad is not None and logits64.grad is not None
    compare("log-prob of logits", logprob, want, 1e-5)
    compare("log-prob of logits, gradient", logits.grad, logits64.grad, 1e-5)

    teacher = 3 * torch.randn(63, 1003, device=device)
    student = logits.detach().clone().requires_grad_()
    divergence = kernels.topk_divergence(student, teacher, top_k=20, alpha=0.5)
    divergence.sum().backward()
    student64 = logits.detach().cpu().double().requires_grad_()
    logq, logp = student64.log_softmax(-1), teacher.cpu().double().log_softmax(-1)
    ids = logq.topk(20, dim=-1).indices
    want = distill.topk_divergence(logq.gather(1, ids), logp.gather(1, ids), 0.5)
    want.sum().backward()
    assert student.grad is not None and student64.grad is not None
    compare("top-k divergence", divergence, want, 1e-5)
    compare("top-k divergence, gradient", student.grad, student64.grad, 1e-4)

    tokens = {
        name: torch.randn(1000)
        for name in ("logprob_T", "old_logprob_T", "advantage_T", "ref_logprob_T")
    }
    mask = torch.rand(1000) < 0.7
    cfg = PolicyLossConfig(kl_coef=0.1, dual_clip=2.0)
    grads, sums = [], []
    for run, put in (
        (kernels.policy_loss, lambda x: x.to(device)),
        (losses.policy_loss, lambda x: x.double() if x.is_floating_point() else x),
    ):
        given = {name: put(value.clone()) for name, value in tokens.items()}
        given["logprob_T"].requires_grad_()
        loss, _ = run(mask_T=put(mask), cfg=cfg, **given)  # type: ignore[operator]
        loss.backward()
        grads.append(given["logprob_T"].grad)
        sums.append(loss.detach()[None])
    compare("policy loss", sums[0], sums[1], 1e-5)
    compare("policy loss, gradient", grads[0], grads[1], 1e-5)

    reward, group, valid = torch.rand(500), torch.randint(0, 90, (500,)), torch.rand(500) < 0.9
    for kind in ("leave_one_out", "std_normalized"):
        got, _ = kernels.group_advantage(
            reward.to(device),
            group.to(device),
            valid.to(device),
            kind,  # type: ignore[arg-type]
        )
        want, _ = getattr(advantages, kind)(reward.double(), group, valid)
        compare(f"group advantage {kind}", got, want, 1e-4)
    bounds = torch.tensor([0, 300, 300, 1000], dtype=torch.int32)
    reward, value = torch.randn(2, 1000)
    got, _ = kernels.gae(
        reward.to(device), value.to(device), bounds.to(device), 0.99, 0.95, mask.to(device)
    )
    want, _ = advantages.gae(reward.double(), value.double(), bounds, 0.99, 0.95, mask)
    compare("GAE", got, want, 1e-5)
    return found


def linear_steps(size: Size, device: torch.device) -> Iterator[tuple[str, str, Step]]:
    """(task, implementation, step) of the linear log-prob; others only where they are installed."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(size.num_tokens, size.hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(size.vocab, size.hidden, device=device).to(dtype)
    weight = weight.mul_(size.hidden**-0.5).requires_grad_()
    labels = torch.randint(0, size.vocab, (size.num_tokens,), device=device)
    main_grad = torch.zeros(weight.shape, dtype=torch.float32, device=device)
    weight.main_grad = main_grad  # type: ignore[attr-defined]

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return -kernels.token_logprob(hidden, weight, labels, accumulate_into_main_grad=True)[0]

    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"megatron_binac": ours, "eager": eager}
    if device.type == "cuda":
        found["torch.compile"] = torch.compile(eager)
    with contextlib.suppress(ImportError):
        module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
        liger = module.LigerFusedLinearCrossEntropyLoss(reduction="none")
        found["Liger"] = lambda hidden, weight: liger(weight, hidden, labels)
    with contextlib.suppress(ImportError):
        cce = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        found["cut-cross-entropy"] = lambda hidden, weight: cce(
            hidden, weight, labels, reduction="none"
        )

    for name, score in found.items():

        def forward(score: Callable[[Tensor, Tensor], Tensor] = score) -> object:
            with torch.no_grad():
                return score(hidden, weight)

        def both(score: Callable[[Tensor, Tensor], Tensor] = score) -> object:
            hidden.grad = weight.grad = None
            score(hidden, weight).sum().backward()
            return hidden.grad

        yield "linear log-prob, forward", name, forward
        yield "linear log-prob, forward + backward", name, both


def small_steps(size: Size, device: torch.device) -> Iterator[tuple[str, str, Step]]:
    """The ops that launches, not bytes, decide: ours and the eager functions they replace."""
    T = size.num_tokens
    logprob, old, advantage, reference = torch.randn(4, T, device=device)
    mask = torch.rand(T, device=device) < 0.7
    cfg = PolicyLossConfig(kl_coef=0.1)
    for name, run in (("megatron_binac", kernels.policy_loss), ("eager", losses.policy_loss)):

        def step(run: Callable[..., tuple[Tensor, object]] = run) -> object:
            x = logprob.detach().requires_grad_()
            run(x, old, advantage, mask, cfg, ref_logprob_T=reference)[0].backward()
            return x.grad

        yield "policy loss, forward + backward", name, step
    bounds = torch.arange(0, T + 1, max(1, T // 16), dtype=torch.int32, device=device)
    bounds[-1] = T
    for name, run_gae in (("megatron_binac", kernels.gae), ("eager", advantages.gae)):
        yield "GAE", name, lambda run=run_gae: run(old, advantage, bounds, 0.99, 0.95, mask)
    group = torch.arange(T, device=device) // 8
    for name, run_group in (
        ("megatron_binac", lambda: kernels.group_advantage(old, group, mask, "leave_one_out")),
        ("eager", lambda: advantages.leave_one_out(old, group, mask)),
    ):
        yield "group advantage", name, run_group


def measure(step: Step, device: torch.device, repeats: int) -> tuple[float, float]:
    """(median milliseconds, peak extra MiB or nan)."""
    if device.type == "cuda":
        from triton.testing import do_bench

        milliseconds = do_bench(step, warmup=100, rep=40 * repeats, return_mode="median")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20
    step()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times), float("nan")


def ceilings(device: torch.device, repeats: int) -> tuple[float, float]:
    """Measured FLOP/s of a large matrix product and bytes/s of a large copy on this device."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    milliseconds, _ = measure(lambda: torch.mm(a, a, out=out), device, repeats)
    flops = 2.0 * n**3 / (1e-3 * milliseconds)
    source = torch.empty(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    milliseconds, _ = measure(lambda: target.copy_(source), device, repeats)
    return flops, 2.0 * 4 * source.numel() / (1e-3 * milliseconds)


def measure_all(size: Size, device: torch.device, repeats: int) -> list[Speed]:
    """Speeds of everything that is installed. Only after ``check_parity`` has passed."""
    top_flops, top_bandwidth = ceilings(device, repeats)
    floors = {floor.kernel: floor for floor in roofline(size)}
    linear = [f for name, f in floors.items() if name.startswith("linear")]
    counted = {
        "linear log-prob, forward": (linear[0].flops, linear[0].num_bytes),
        # One forward product and two of the backward: making logits again is not useful work.
        "linear log-prob, forward + backward": (
            3 * linear[0].flops,
            sum(f.num_bytes for f in linear),
        ),
        "policy loss, forward + backward": (
            0.0,
            floors["policy loss, gradient and statistics"].num_bytes,
        ),
        "GAE": (0.0, floors["GAE"].num_bytes),
        "group advantage": (0.0, 13.0 * size.num_tokens),
    }
    speeds = []
    for task, implementation, step in (*linear_steps(size, device), *small_steps(size, device)):
        milliseconds, extra = measure(step, device, repeats)
        flops, num_bytes = counted[task]
        rate, bandwidth = flops / (1e-3 * milliseconds), num_bytes / (1e-3 * milliseconds)
        speeds.append(
            Speed(
                task=task,
                implementation=implementation,
                milliseconds=milliseconds,
                teraflops=rate / 1e12,
                flops_share=rate / top_flops,
                gigabytes_per_second=bandwidth / 1e9,
                bandwidth_share=bandwidth / top_bandwidth,
                extra_mebibytes=extra,
            )
        )
    return speeds


def compile_table(arches: Sequence[str]) -> list[dict[str, object]]:
    """Registers, shared memory, spills and matrix instructions of every launch, by architecture.

    Raises ValueError for an architecture that the kernels are not tested for (LLVM would abort the
    process on one it does not know), RuntimeError under TRITON_INTERPRET=1, ImportError without
    Triton.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "TRITON_INTERPRET=1 is set, and an interpreted kernel cannot be compiled"
        )
    from megatron_binac.kernels import offline

    unknown = [arch for arch in arches if arch not in offline.ARCHES]
    if unknown:
        raise ValueError(f"--arch {unknown[0]}: expected one of {', '.join(offline.ARCHES)}")
    launches = offline.default_launches()
    return [asdict(offline.compile_launch(x, arch)) for arch in arches for x in launches]


def print_compiled(rows: Sequence[dict[str, object]]) -> None:
    print(f"{'kernel':<66} {'arch':>6} {'regs':>4} {'smem':>7} {'spill':>5} {'warps':>5}  matrix")
    for row in rows:
        print(
            f"{str(row['name'])[:66]:<66} {row['arch']:>6} {row['registers']:>4} "
            f"{row['shared_bytes']:>7} {row['spill_store_bytes']:>5} {row['num_warps']:>5}  "
            f"{row['matrix_instruction'] or '-'}"
        )


def print_roofline(floors: Sequence[Floor], size: Size) -> None:
    print(
        f"\nFloor at T = {size.num_tokens}, H = {size.hidden}, V = {size.vocab}, bfloat16: no card "
        "is faster than this (data-sheet peaks, dense)"
    )
    names = [card.name for card in CARDS]
    print(f"{'kernel':<48} {'GFLOP':>9} {'MB':>9} " + " ".join(f"{n + ' us':>12}" for n in names))
    for floor in floors:
        times = " ".join(f"{floor.floor_us[name]:>12.2f}" for name in names)
        print(f"{floor.kernel:<48} {floor.flops / 1e9:>9.1f} {floor.num_bytes / 1e6:>9.1f} {times}")


def print_parity(checks: Sequence[Parity]) -> None:
    print(f"\n{'parity with float64':<40} {'error':>9} {'allowed':>9}")
    for check in checks:
        verdict = "" if check.passed else "   FAILED"
        print(f"{check.check:<40} {check.error:>9.1e} {check.tolerance:>9.1e}{verdict}")


def print_speeds(speeds: Sequence[Speed]) -> None:
    print(
        f"\n{'task':<38} {'implementation':<18} {'ms':>9} {'TFLOP/s':>8} {'of mm':>6} "
        f"{'GB/s':>8} {'of copy':>7} {'extra MiB':>9}"
    )
    for s in speeds:
        print(
            f"{s.task:<38} {s.implementation:<18} {s.milliseconds:>9.3f} {s.teraflops:>8.2f} "
            f"{s.flops_share:>6.1%} {s.gigabytes_per_second:>8.1f} {s.bandwidth_share:>7.1%} "
            + (f"{'-':>9}" if math.isnan(s.extra_mebibytes) else f"{s.extra_mebibytes:>9.1f}")
        )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="binac bench kernels", description=__doc__)
    parser.add_argument("--compile-only", action="store_true", help="only the offline compile")
    text = "with --compile-only; default sm_90"
    parser.add_argument("--arch", nargs="+", metavar="sm_NN", help=text)
    parser.add_argument("--roofline", action="store_true", help="only the paper roofline")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help="default auto")
    parser.add_argument("--tokens", type=whole(1, 2**24), help="default 8192")
    parser.add_argument("--hidden", type=whole(1, 2**17), help="default 4096")
    parser.add_argument("--vocab", type=whole(2, 2**24), help="default 131072")
    text = "a median is over this many; default 5"
    parser.add_argument("--repeats", type=whole(1), help=text)
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    args = parser.parse_args(argv)
    if args.arch and not args.compile_only:
        parser.error("--arch is of --compile-only; add that or leave --arch out")
    other = {"--compile-only": ("roofline", "tokens", "hidden", "vocab"), "--roofline": ()}
    mode = "--compile-only" if args.compile_only else "--roofline" if args.roofline else None
    for name in (*other[mode], "device", "repeats") if mode else ():
        if getattr(args, name):
            parser.error(f"got {mode} and --{name}, which it does not use; leave one of them out")
    for name, default in (("tokens", 8192), ("hidden", 4096), ("vocab", 131072), ("repeats", 5)):
        setattr(args, name, getattr(args, name) or default)
    args.arch = args.arch or ["sm_90"]
    args.device = args.device or "auto"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where parity failed (no speed is printed then); 2 for wrong use."""
    args = _options(argv)
    size = Size(num_tokens=args.tokens, hidden=args.hidden, vocab=args.vocab)
    if args.compile_only:
        try:
            rows = compile_table(args.arch)
        except (ValueError, RuntimeError, ImportError) as error:
            print(f"binac bench kernels: {error}", file=sys.stderr)
            return 2
        if args.json:
            print(json.dumps({"rows": rows}))
        else:
            print_compiled(rows)
        return 0

    floors = roofline(size)
    result: dict[str, object] = {"roofline": [asdict(floor) for floor in floors]}
    has_cuda = torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        print("binac bench kernels: --device cuda, but torch sees no CUDA device", file=sys.stderr)
        return 2
    device = None
    if args.device != "auto" or has_cuda:
        device = torch.device("cuda" if args.device == "auto" else args.device)
    if args.roofline or device is None:
        result["device"] = None
        if args.json:
            print(json.dumps(result))
        else:
            print_roofline(floors, size)
            if not args.roofline:
                print("\nNo CUDA device: nothing was measured (--device cpu times the reference).")
        return 0

    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result["backend"] = kernels.choose_backend(device.type)
    checks = check_parity(device)
    passed = all(check.passed for check in checks)
    result["parity"] = [asdict(check) | {"passed": check.passed} for check in checks]
    if not args.json:
        print_roofline(floors, size)
        print(f"\nDevice {result['device']}, kernels: {result['backend']}")
        print_parity(checks)
    if passed:
        speeds = measure_all(size, device, args.repeats)
        result["rows"] = [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in map(asdict, speeds)
        ]
        if not args.json:
            print_speeds(speeds)
    elif not args.json:
        print("\nParity failed: no speed is printed for kernels that compute something else.")
    if args.json:
        print(json.dumps(result))
    return 0 if passed else 1
