"""What the kernel offers to hold a hostile program: a private root, namespaces, seccomp, landlock,
rlimits.

Loaded by path into processes that do nothing else, before any of the rest of the package could be
seen from inside: standard library only. Every function raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Sequence

NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
CLONE_NEW_ANY = 0x7E020080
CLONE_THREAD = 0x00010000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 1, 2, 4, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_GET_SECCOMP, PR_SET_SECCOMP = 1, 4, 21, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

NEVER = {
    # Numbers on x86-64 and on aarch64, None where the architecture has no such call. Processes of
    # others, the file system's shape, the machine, sockets, and memory that no limit counts.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "mknod": (133, None), "mknodat": (259, 33), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58), "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "mbind": (237, 235), "set_mempolicy": (238, 237),
}  # fmt: skip
"""System calls that no program here may make."""
NEW_PROCESS = {"fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)}
"""Refused as well where a program may have one process only."""
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
"""Refused as well where the program shares a process namespace with others."""
CLONE, CLONE3 = (56, 220), (435, 435)
TGKILL, PRLIMIT = (234, 131), (302, 261)
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
NEWEST_KNOWN = 462
"""Calls above it are younger than this list and are refused."""
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column in the tables above, and the kernel's name in a filter."""

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library; OSError where it returns a negative number."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    call("mount", *encoded, ctypes.c_ulong(flags), data.encode())


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter_private_root(paths: Sequence[str]) -> int:
    """Move this process into a root that holds `paths` read-only and nothing else; no network, no
    /proc.

    Afterwards it is nobody on the machine and has all rights inside its own user namespace, which
    it needs for `fork_apart`. Children are in a new process namespace, of which the first one is
    the init process. Returns a descriptor of the machine's /proc for `own_process_namespace`.
    """
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    is_privileged = os.geteuid() == 0 and _try_unshare(flags)
    outer = os.geteuid(), os.getegid()
    if not is_privileged:
        call("unshare", CLONE_NEWUSER | flags)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    if not is_privileged:
        _map_users(proc, outer)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    _build_root(paths)
    if is_privileged:
        # Only now: before, the interpreter may lie where nobody else can look (/root/...). Another
        # user than root, because limits on processes do not bind root, not even root of a
        # namespace.
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
        # With mounts of its own, for /tmp.
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        _map_users(proc, (NOBODY, NOBODY))
    call("unshare", CLONE_NEWPID)
    return proc


def _try_unshare(flags: int) -> bool:
    try:
        call("unshare", flags)
    except PermissionError:
        return False
    return True


def _map_users(proc: int, outer: tuple[int, int]) -> None:
    lines = (("setgroups", "deny"), *zip(("uid_map", "gid_map"), outer, strict=True))
    for name, value in lines:
        text = value if isinstance(value, str) else f"{NOBODY} {value} 1"
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


def _build_root(paths: Sequence[str]) -> None:
    base = next(path for path in ("/tmp", "/mnt", "/var", "/usr") if os.path.isdir(path))
    links, sources = {}, {}
    for path in sorted(set(paths)):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.exists(path) and not any(path.startswith(f"{known}/") for known in sources):
            sources[path] = os.open(path, os.O_PATH)
    devices = {path: os.open(path, os.O_PATH) for path in DEVICES}
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=755")
    for path, source in {**sources, **devices}.items():
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{source}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
        if path in sources:
            _make_read_only(target)
        os.close(source)
    for path, goal in links.items():
        if not os.path.lexists(base + path):
            os.makedirs(os.path.dirname(base + path), exist_ok=True)
            os.symlink(goal, base + path)
    os.mkdir(f"{base}/tmp")
    os.chdir(base)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_read_only(target: str) -> None:
    """Read-only, without devices and set-user-id, whatever is mounted below as well."""
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)
    call(
        "syscall",
        MOUNT_SETATTR,
        AT_FDCWD,
        target.encode(),
        AT_RECURSIVE,
        attributes,
        len(attributes),
    )


def own_process_namespace(proc: int) -> int:
    """A descriptor of the process namespace of this process, for `fork_apart`; closes `proc`."""
    found = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)
    os.close(proc)
    return found


def fork_apart(own_namespace: int) -> int:
    """fork() into a new process namespace: what the child starts dies with it."""
    call("unshare", CLONE_NEWPID)
    child = os.fork()
    if child:
        call("setns", own_namespace, CLONE_NEWPID)
    return child


def mount_tmp(size: int) -> None:
    """An empty /tmp of `size` bytes, until `unmount_tmp`."""
    flags = MS_NOSUID | MS_NODEV
    mount("tmpfs", "/tmp", "tmpfs", flags, f"size={size},nr_inodes=1000,mode=777")


def unmount_tmp() -> None:
    """Throw /tmp and what is in it away."""
    call("umount2", b"/tmp", MNT_DETACH)


def drop_rights() -> None:
    """Give up every capability, and the way to new ones."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", struct.pack("II", 0x20080522, 0), bytes(24))


def set_limits(
    *, memory: int, cpu_seconds: int, file_bytes: int, open_files: int, tasks: int | None
) -> None:
    """Resource limits of this process, hard and soft; None leaves the number of tasks as it is."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: 64 << 20,
    }
    if tasks is not None:
        limits[resource.RLIMIT_NPROC] = tasks
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bound, bound))


def has_seccomp() -> bool:
    """Whether the kernel takes filters and the numbers of this architecture are known here."""
    try:
        return (
            call("prctl", PR_GET_SECCOMP, 0, 0, 0, 0) >= 0 and platform.machine() in ARCHITECTURES
        )
    except OSError:
        return False


def has_landlock() -> bool:
    """Whether the kernel can restrict files by landlock."""
    try:
        return call("syscall", LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1) > 0
    except OSError:
        return False


def build_filter(*, may_fork: bool, apart: bool) -> bytes:
    """A seccomp program for this process. OSError on an architecture whose call numbers are not
    known here.

    `NEVER` is refused. Processes are not made unless `may_fork`; where the process is not `apart`
    in a namespace of its own, signals and limits reach only itself.
    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"no seccomp filter is known for {platform.machine()}")
    column, architecture = ARCHITECTURES[platform.machine()]
    load, equal, above, test, answer = 0x20, 0x15, 0x25, 0x45, 0x06
    allow, refuse = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050001)
    unknown, kill = (answer, 0, 0, 0x00050026), (answer, 0, 0, 0x80000000)
    load_number, load_architecture, load_argument = (
        (load, 0, 0, 0),
        (load, 0, 0, 4),
        (load, 0, 0, 16),
    )
    code = [
        load_architecture, (equal, 1, 0, architecture), kill,
        load_number, (above, 0, 1, NEWEST_KNOWN), unknown,
    ]  # fmt: skip

    def rule(numbers: tuple[int | None, ...], *body: tuple[int, int, int, int]) -> None:
        """What happens to one call; `body` ends in an answer: behind it the number is loaded."""
        number = numbers[column]
        if number is not None:
            code.extend([(equal, 0, len(body), number), *body])

    refused = NEVER | ({} if may_fork else NEW_PROCESS) | ({} if apart else SIGNALS)
    for numbers in refused.values():
        rule(numbers, refuse)
    # The C library falls back to clone, whose flags a filter can see.
    rule(CLONE3, unknown)
    threads_only = () if may_fork else ((test, 1, 0, CLONE_THREAD), refuse)
    rule(CLONE, load_argument, (test, 0, 1, CLONE_NEW_ANY), refuse, *threads_only, allow)
    if not apart:
        own = os.getpid()
        rule(TGKILL, load_argument, (equal, 1, 0, own), refuse, allow)
        rule(PRLIMIT, load_argument, (equal, 2, 0, own), (equal, 1, 0, 0), refuse, allow)
    return b"".join(struct.pack("HBBI", *line) for line in [*code, allow])


def apply_filter(program: bytes) -> None:
    """Put a program of `build_filter` in force, for good; `drop_rights` comes first."""
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, len(header)), 0, 0)


def restrict_files(readable: Sequence[str], folder: str | None) -> int:
    """Landlock: read `readable`, write below `folder`, no TCP; returns the kernel's version of it.

    OSError where the kernel has none; `drop_rights` comes first.
    """
    version = call("syscall", LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    everything, reading, writing = (1 << bits) - 1, 0b1101, 0b0110 | (1 << 14 if bits > 14 else 0)
    attributes = struct.pack("QQQ", everything, 3, 3)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    rules = call("syscall", LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    grants = [*((path, reading) for path in readable), *((path, writing) for path in DEVICES)]
    for path, rights in [*grants, (folder, everything)]:
        if path is not None and os.path.exists(path):
            file = os.open(path, os.O_PATH)
            allowed = rights if os.path.isdir(path) else rights & (0b0111 | 3 << 14) & everything
            call("syscall", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, file), 0)
            os.close(file)
    call("syscall", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)
    return version
