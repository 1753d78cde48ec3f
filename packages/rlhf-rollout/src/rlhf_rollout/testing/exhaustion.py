"""Programs that want more than they may have: memory, processes, files, time, output.

Each section defines `solve`, which returns True where it has got more than its limits allow. `@...@` are the limits.
"""

PROGRAMS = r"""
## memory of one process
def solve():
    held = bytearray(2 * @MEMORY@)
    return True
## memory of several processes
import os, time
def solve():
    for _ in range(8):
        if os.fork() == 0:
            held = bytearray(b"x") * (@MEMORY@ // 3)
            time.sleep(60)
    time.sleep(1.0)
    return True
## shared memory mapping
import mmap, time
def solve():
    held = [mmap.mmap(-1, @MEMORY@ // 2) for _ in range(4)]
    for one in held: one.write(b"x" * len(one))
    time.sleep(0.5)
    return True
## memory files
import os, time
def solve():
    for _ in range(40):
        number, written = os.memfd_create("x"), 0
        while written < @FILE_BYTES@: written += os.write(number, bytes(1 << 20))
    time.sleep(0.5)
    return True
## System V shared memory
import ctypes, time
def solve():
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    for _ in range(8):
        number = libc.shmget(0, ctypes.c_size_t(@MEMORY@ // 2), 0o1666)
        if number < 0: return False
        place = libc.shmat(number, None, 0)
        ctypes.memset(place, 1, @MEMORY@ // 2)
        libc.shmdt(ctypes.c_void_p(place))
    time.sleep(0.5)
    return True
## locked memory (true)
import ctypes
def solve():
    held = ctypes.create_string_buffer(8 << 20)
    return ctypes.CDLL(None).mlock(held, 8 << 20) == 0
## forks
import os, time
def solve():
    for _ in range(2 * @PROCESSES@ + 40):
        if os.fork() == 0:
            time.sleep(60)
    time.sleep(0.5)
    return True
## forks without end
import os
while True:
    try: os.fork()
    except OSError: pass
## threads
import threading, time
def solve():
    threading.stack_size(64 << 10)
    for _ in range(2 * @PROCESSES@ + 40): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(0.5)
    return True
## a large file
def solve():
    with open("/program/big", "wb") as file:
        for _ in range(2 * @FILE_BYTES@ >> 20): file.write(bytes(1 << 20))
    return True
## a sparse file
import os
def solve():
    os.truncate(os.open("/tmp/big", os.O_CREAT | os.O_RDWR), 1 << 40)
    return True
## temporary files
def solve():
    for number in range(2 * @FILE_BYTES@ >> 20):
        with open(f"/tmp/{number}", "wb") as file: file.write(bytes(1 << 20))
    return True
## files in shared memory
def solve():
    for number in range(2 * @FILE_BYTES@ >> 20):
        with open(f"/dev/shm/{number}", "wb") as file: file.write(bytes(1 << 20))
    return True
## files elsewhere
def solve():
    for folder in ("/", "/dev", "/run", "/var/tmp", "/home"):
        try:
            with open(folder + "/big", "wb") as file:
                for _ in range(2 * @FILE_BYTES@ >> 20): file.write(bytes(1 << 20))
            return True
        except OSError: continue
    return False
## many files
import time
def solve():
    for number in range(@FILES@ + 100): open(f"/tmp/{number}", "w").close()
    time.sleep(0.5)
    return True
## many links and folders
import os, time
def solve():
    for number in range(@FILES@ // 2 + 100):
        os.mkdir(f"/program/{number}")
        os.symlink("/", f"/program/l{number}")
    time.sleep(0.5)
    return True
## folders in folders
import os, time
def solve():
    for _ in range(@FILES@ + 100):
        os.mkdir("d")
        os.chdir("d")
    time.sleep(0.5)
    return True
## descriptors
import os
def solve():
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(2000)]
    return True
## output
import os
def solve():
    while True: os.write(1, b"x" * 65536)
while True: print("x" * 65536)
## errors
import os
def solve(): return False
while True: os.write(2, b"x" * 65536)
## time
def solve():
    while True: pass
## time asleep
import time
while True: time.sleep(1000)
## time over processes
import os
for _ in range(4): os.fork()
while True: pass
## limits raised
import resource
def solve():
    for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return True
## priority
import os
def solve():
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    return True
## message queues
import ctypes
def solve():
    libc = ctypes.CDLL(None)
    return sum(libc.msgget(0, 0o1666) >= 0 for _ in range(40000)) > 35000
"""
