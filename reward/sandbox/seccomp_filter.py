"""Builds the filter of system calls for a sandboxed program, as a classic BPF program (seccomp(2), mode filter).

If the program may have only one process, the filter also refuses to start another process and to signal any process but
the program's own, so that a fork bomb, a daemon and a signal to the caller are impossible without namespaces or
cgroups.

A call that is in none of the tables answers ENOSYS, so that the C library falls back to an older call. Calls of newer
kernels therefore stay blocked. Numbers are those of the kernel's `asm/unistd_64.h` and `asm-generic/unistd.h`.
"""

from __future__ import annotations

import errno
import functools
import struct

from paceline.errors import InvalidInput

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Maps a value of `platform.machine()` to its column in the tables and its AUDIT_ARCH."""

OWN_PID = 0x7FEEDFEE
"""Placeholder of the program's process id; the launcher, which becomes the program, inserts its own."""

ALLOW, KILL = 0x7FFF0000, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06

CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags of clone(2)
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
PRCTLS = (3, 15, 16, 21, 38, 39, 0x53564D41)
"""Allowed options of prctl: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_SET_NO_NEW_PRIVS,
PR_GET_NO_NEW_PRIVS, PR_SET_VMA."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
OWNER_AND_LEASES = (8, 10, 15, 1024, 1026)
"""Refused commands of fcntl, which send signals: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY."""
X32_BIT = 0x40000000


@functools.cache
def build_filter(machine: str, single_process: bool) -> bytes:
    """Return the BPF program for a value of platform.machine(), 8 bytes an instruction, with OWN_PID as process id.

    Raises InvalidInput for an architecture without known system calls.
    """
    if machine not in ARCHITECTURES:
        raise InvalidInput(
            f"this version filters the system calls of {', '.join(ARCHITECTURES)}, and not those of {machine}; "
            "use sandbox: remote"
        )
    column, architecture = ARCHITECTURES[machine]
    code = [
        *(_op(LOAD, ARCHITECTURE), _op(EQUAL, architecture, 1, 0), _op(RETURN, KILL)),
        *(_op(LOAD, NUMBER), _op(AT_LEAST, X32_BIT, 0, 1), _error(errno.ENOSYS)),
    ]
    for name, numbers in CONDITIONAL.items():
        if numbers[column] is not None:
            code += _when(numbers[column] or 0, _condition(name, single_process))
    for table, answer in (
        (ALLOWED, _op(RETURN, ALLOW)),
        (REFUSED, _error(errno.EPERM)),
        (IGNORED, _error(0)),
        (UNSUPPORTED, _error(errno.EOPNOTSUPP)),
    ):
        for numbers in table.values():
            if numbers[column] is not None:
                code += _when(numbers[column] or 0, [answer])
    return b"".join([*code, _error(errno.ENOSYS)])


def _condition(name: str, single_process: bool) -> list[bytes]:
    allow, refuse = _op(RETURN, ALLOW), _error(errno.EPERM)
    match name:
        case "clone3":  # its flags are behind a pointer; the C library falls back to clone
            return [_error(errno.ENOSYS)]
        case "clone" if single_process:
            return [_argument(0), _op(ANY_BIT, CLONE_THREAD, 0, 1), allow, refuse]
        case "clone":
            return [_argument(0), _op(ANY_BIT, CLONE_NAMESPACES, 1, 0), allow, refuse]
        case "fork" | "vfork":
            return [refuse if single_process else allow]
        case "kill" | "tgkill" | "rt_sigqueueinfo" | "rt_tgsigqueueinfo":
            own = [_argument(0), _op(EQUAL, OWN_PID, 0, 1), allow, refuse]
            return own if single_process else [allow]
        case "socketpair":  # a datagram socket could send to any path
            unix = [_argument(0), _op(EQUAL, AF_UNIX, 1, 0), refuse]
            return [*unix, *(_argument(1), _op(AND, SOCK_TYPE_MASK), _op(EQUAL, SOCK_STREAM, 0, 1), allow, refuse)]
        case "prctl":
            return [*_any_of(0, PRCTLS, allow), refuse]
        case "prlimit64" | "sched_setaffinity":
            return [_argument(0), _op(EQUAL, 0, 0, 1), allow, refuse]
        case "ioctl":
            return [*_any_of(1, (TIOCSTI, TIOCLINUX), refuse), allow]
        case "fcntl":
            return [*_any_of(1, OWNER_AND_LEASES, refuse), allow]
    raise AssertionError(f"{name} has no condition")


def _any_of(argument: int, values: tuple[int, ...], answer: bytes) -> list[bytes]:
    tests = [part for value in values for part in (_op(EQUAL, value, 0, 1), answer)]
    return [_argument(argument), *tests]


def _when(number: int, block: list[bytes]) -> list[bytes]:
    """Return a test of the call's number, then `block` for a call with this number. `block` must end with a return."""
    return [_op(EQUAL, number, 0, len(block)), *block]


def _argument(index: int) -> bytes:
    """Load the low half of an argument, because the kernel reads all compared arguments as 32 bits."""
    return _op(LOAD, FIRST_ARGUMENT + 8 * index)


def _error(number: int) -> bytes:
    return _op(RETURN, 0x00050000 | number)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _numbers(table: str) -> dict[str, tuple[int | None, int | None]]:
    """Return {name: (x86_64, aarch64)} of words `name:x86_64:aarch64`; None if an architecture has no such call."""
    words = (word.split(":") for word in table.split())
    return {name: (_number(x86_64), _number(aarch64)) for name, x86_64, aarch64 in words}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


ALLOWED = _numbers("""
    access:21:- alarm:37:- arch_prctl:158:- brk:12:214 chdir:80:49 clock_getres:229:114
    clock_gettime:228:113 clock_nanosleep:230:115 close:3:57 close_range:436:436 copy_file_range:326:285
    creat:85:- dup:32:23 dup2:33:- dup3:292:24 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
    epoll_pwait:281:22 epoll_pwait2:441:441 epoll_wait:232:- eventfd:284:- eventfd2:290:19 execve:59:221
    execveat:322:281 exit:60:93 exit_group:231:94 faccessat:269:48 faccessat2:439:439 fadvise64:221:223
    fchdir:81:50 fdatasync:75:83 fgetxattr:193:10 flistxattr:196:13 flock:73:32 fstat:5:80 fstatfs:138:44
    fsync:74:82 ftruncate:77:46 futex:202:98 get_mempolicy:239:236 get_robust_list:274:100 getcpu:309:168
    getcwd:79:17 getdents:78:- getdents64:217:61 getegid:108:177 geteuid:107:175 getgid:104:176
    getgroups:115:158 getitimer:36:102 getpeername:52:205 getpgid:121:155 getpgrp:111:- getpid:39:172
    getppid:110:173 getpriority:140:141 getrandom:318:278 getresgid:120:150 getresuid:118:148
    getrlimit:97:163 getrusage:98:165 getsid:124:156 getsockname:51:204 getsockopt:55:209 gettid:186:178
    gettimeofday:96:169 getuid:102:174 getxattr:191:8 lgetxattr:192:9 link:86:- linkat:265:37
    listxattr:194:11 llistxattr:195:12 lseek:8:62 lstat:6:- madvise:28:233 membarrier:324:283
    mincore:27:232 mkdir:83:- mkdirat:258:34 mlock:149:228 mmap:9:222 mprotect:10:226 mremap:25:216
    msync:26:227 munlock:150:229 munmap:11:215 nanosleep:35:101 newfstatat:262:79 open:2:- openat:257:56
    openat2:437:437 pause:34:- pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 pread64:17:67 preadv:295:69
    preadv2:327:286 pselect6:270:72 pwrite64:18:68 pwritev:296:70 pwritev2:328:287 read:0:63
    readahead:187:213 readlink:89:- readlinkat:267:78 readv:19:65 recvfrom:45:207 recvmsg:47:212
    rename:82:- renameat:264:38 renameat2:316:276 restart_syscall:219:128 rmdir:84:- rseq:334:293
    rt_sigaction:13:134 rt_sigpending:127:136 rt_sigprocmask:14:135 rt_sigreturn:15:139
    rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sched_get_priority_max:146:125
    sched_get_priority_min:147:126 sched_getaffinity:204:123 sched_getparam:143:121
    sched_getscheduler:145:120 sched_rr_get_interval:148:127 sched_yield:24:124 select:23:- sendfile:40:71
    sendmsg:46:211 sendto:44:206 set_robust_list:273:99 set_tid_address:218:96 setitimer:38:103
    setpgid:109:154 setrlimit:160:164 setsid:112:157 shutdown:48:210 sigaltstack:131:132 signalfd:282:-
    signalfd4:289:74 stat:4:- statfs:137:43 statx:332:291 symlink:88:- symlinkat:266:36 sysinfo:99:179
    time:201:- timer_create:222:107 timer_delete:226:111 timer_getoverrun:225:109 timer_gettime:224:108
    timer_settime:223:110 timerfd_create:283:85 timerfd_gettime:287:87 timerfd_settime:286:86
    times:100:153 umask:95:166 uname:63:160 unlink:87:- unlinkat:263:35 wait4:61:260 waitid:247:95
    write:1:64 writev:20:66
""")
"""Allowed calls on the program's own memory, files, threads and time. Landlock or mounts restrict files."""

CONDITIONAL = _numbers("""
    clone:56:220 clone3:435:435 fcntl:72:25 fork:57:- ioctl:16:29 kill:62:129 prctl:157:167
    prlimit64:302:261 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 sched_setaffinity:203:122
    socketpair:53:199 tgkill:234:131 vfork:58:-
""")
"""Calls that are allowed depending on their arguments."""

REFUSED = _numbers("""
    accept:43:202 accept4:288:242 acct:163:89 add_key:248:217 adjtimex:159:171 bind:49:200 bpf:321:280
    chroot:161:51 clock_adjtime:305:266 clock_settime:227:112 connect:42:203 delete_module:176:106
    fanotify_init:300:262 finit_module:313:273 fsconfig:431:431 fsmount:432:432 fsopen:430:430
    fspick:433:433 init_module:175:105 inotify_init:253:- inotify_init1:294:26 io_uring_enter:426:426
    io_uring_register:427:427 io_uring_setup:425:425 ioperm:173:- iopl:172:- ioprio_set:251:30
    kcmp:312:272 kexec_load:246:104 keyctl:250:219 listen:50:201 memfd_create:319:279 memfd_secret:447:447
    migrate_pages:256:238 mknod:133:- mknodat:259:33 mount:165:40 mount_setattr:442:442 move_mount:429:429
    move_pages:279:239 mq_open:240:180 msgget:68:186 name_to_handle_at:303:264 open_by_handle_at:304:265
    open_tree:428:428 perf_event_open:298:241 personality:135:92 pidfd_getfd:438:438 pidfd_open:434:434
    pidfd_send_signal:424:424 pivot_root:155:41 process_madvise:440:440 process_vm_readv:310:270
    process_vm_writev:311:271 ptrace:101:117 quotactl:179:60 reboot:169:142 request_key:249:218
    sched_setattr:314:274 sched_setparam:142:118 sched_setscheduler:144:119 seccomp:317:277 semget:64:190
    setdomainname:171:162 setgid:106:144 setgroups:116:159 sethostname:170:161 setns:308:268
    setpriority:141:140 setregid:114:143 setresgid:119:149 setresuid:117:147 setreuid:113:145
    setsockopt:54:208 settimeofday:164:170 setuid:105:146 shmget:29:194 socket:41:198 swapoff:168:225
    swapon:167:224 syslog:103:116 tkill:200:130 truncate:76:45 umount2:166:39 unshare:272:97
    userfaultfd:323:282 vhangup:153:58
""")
"""Calls that answer EPERM: sockets, other processes, the kernel's configuration, memory that no limit counts."""

IGNORED = _numbers("""
    chmod:90:- chown:92:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 fchown:93:55 fchownat:260:54
    futimesat:261:- lchown:94:- utime:132:- utimensat:280:88 utimes:235:-
""")
"""Calls that answer success and do nothing, because Landlock does not restrict owners, modes and times of files."""

UNSUPPORTED = _numbers("""
    fallocate:285:47 fremovexattr:199:16 fsetxattr:190:7 lremovexattr:198:15 lsetxattr:189:6
    removexattr:197:14 setxattr:188:5
""")
