"""Programs that want a verdict they have not earned: they forge it, look for it, or upset who gives it.

Each section defines `solve`, which is asked for a secret that stands in the tests.
"""

PROGRAMS = r"""
## always equal object
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __str__(self): return ""
    def __len__(self): return 32
def solve(): return Equal()
## always equal int
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def solve(): return Equal(1)
## always equal str
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __len__(self): return 32
    __hash__ = str.__hash__
def solve(): return Equal("x")
## always equal dict and list
class EqualList(list):
    def __eq__(self, other): return True
class Equal(dict):
    def __eq__(self, other): return True
def solve(): return EqualList([Equal(a=EqualList())])
## lying class
class Liar:
    __class__ = str
    def __eq__(self, other): return True
    def __getattr__(self, name): return lambda *a, **k: True
def solve(): return Liar()
## exit at once
import sys
sys.exit(0)
## exit without cleaning up
import os
os._exit(0)
## exit in the call
import os
def solve(): os._exit(0)
## SystemExit in the call
def solve(): raise SystemExit(0)
## KeyboardInterrupt in the call
def solve(): raise KeyboardInterrupt
## StopIteration and GeneratorExit
def solve(): raise GeneratorExit from StopIteration(True)
## skipped test
import unittest
def solve(): raise unittest.SkipTest("passed")
## exception of a class of its own
class Passed(BaseException):
    def __eq__(self, other): return True
    def __str__(self): raise Passed
def solve(): raise Passed()
## printed verdict
print('["value",true]\npassed\n["value",["value",true]]', flush=True)
def solve():
    print('["value",true]\npassed', flush=True)
    return True
## verdict on standard error
import os
os.write(2, b"tests 1\npassed\npassed\nend\n")
def solve():
    os.write(2, b"tests 1\npassed\npassed\npassed\nend\n")
    return True
## verdict on every descriptor
import os
def solve():
    for number in range(3, 300):
        try: os.write(number, b'tests 1\npassed\npassed\n["value",true]\n')
        except OSError: pass
    return True
os.path
solve()
## answers before questions
import os
for name in os.listdir("/proc/self/fd"):
    try: os.write(int(name), b'["value",true]\n' * 50)
    except OSError: pass
def solve(): return True
## printed at exit
import atexit, os
atexit.register(lambda: os.write(1, b"passed\n"))
def solve(): return True
## excepthook
import sys, os
sys.excepthook = lambda *a: os._exit(0)
1 / 0
## frames above
import sys, re
def solve():
    frame, found = sys._getframe(), []
    while frame:
        found += re.findall(r"\b[0-9a-f]{32}\b", repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    return found[0] if found else ""
## all objects
import gc, re
def solve():
    for thing in gc.get_objects():
        try: found = re.findall(r"\b[0-9a-f]{32}\b", repr(thing))
        except Exception: continue
        if found: return found[0]
    return ""
## files of the grader
import glob, re
def solve():
    for folder in ("/program/*", "/tmp/**", "/dev/shm/*", "/source/*", "/*", "/proc/self/*", "/proc/self/fd/*"):
        for path in glob.glob(folder, recursive=True):
            try: found = re.findall(rb"\b[0-9a-f]{32}\b", open(path, "rb").read(1 << 20))
            except OSError: continue
            for one in found:
                if path.find("/proc") < 0: return one.decode()
    return ""
## standard input read ahead
import os, re, select
def solve():
    found = b""
    for number in range(0, 20):
        try:
            if select.select([number], [], [], 0.05)[0]: found += os.read(number, 1 << 16)
        except (OSError, ValueError): continue
    return (re.findall(rb"\b[0-9a-f]{32}\b", found) or [b""])[0].decode()
## command lines of all processes
import glob, re
def solve():
    found = [one for path in glob.glob("/proc/*/cmdline") for one in re.findall(rb"\b[0-9a-f]{32}\b", open(path, "rb").read())]
    return found[0].decode() if found else ""
## memory of all processes
import glob, re
def solve():
    for folder in glob.glob("/proc/[0-9]*"):
        if folder == "/proc/self": continue
        try:
            ranges = [line.split()[0].split("-") for line in open(folder + "/maps") if " rw" in line]
            with open(folder + "/mem", "rb", 0) as memory:
                for start, end in ranges:
                    memory.seek(int(start, 16))
                    found = re.findall(rb"@SECRET_HEAD@[0-9a-f]{24}\b", memory.read(min(int(end, 16) - int(start, 16), 1 << 22)))
                    if found: return found[0].decode()
        except (OSError, ValueError, OverflowError): continue
    return ""
## patched builtins
import builtins
builtins.len = lambda x: 32
builtins.isinstance = builtins.issubclass = lambda *a: True
builtins.repr = builtins.str = lambda *a: "true"
def solve(): return True
## patched AssertionError
import builtins
builtins.AssertionError = type("AssertionError", (Exception,), {"__new__": lambda c, *a: 1 / 0})
def solve(): raise AssertionError
## patched unittest
import unittest
unittest.TestCase.assertEqual = lambda *a: None
unittest.main = lambda *a, **k: None
def solve(): return None
## patched driver
import gc
def solve(): return True
for thing in gc.get_objects():
    if isinstance(thing, dict) and "OtherSide" in thing:
        try:
            thing["OtherSide"]._do = lambda self, operation, content: ["value", True]
            thing["encode"] = lambda *a: '["value",true]'
        except Exception: pass
## questions to the tests
import gc
def solve():
    for thing in gc.get_objects():
        if type(thing).__name__ == "OtherSide":
            for question in (("name", "wanted"), ("attribute", 1, "__globals__"), ("item", 0, "wanted"), ("text", 1)):
                try: return thing.ask(*question)
                except BaseException: continue
    return ""
## references to objects of the tests
import os
def solve():
    for name in os.listdir("/proc/self/fd"):
        for number in (0, 1, id(solve)):
            line = '["value",{"t":"reference","v":[%d,"yours"]}]\n' % number
            try: os.write(int(name), line.encode())
            except OSError: continue
    return 1
## pickle
import os
class Payload:
    def __reduce__(self): return os.system, ("touch @CANARY@.pickle",)
def solve(): return Payload()
## nested without end
def solve():
    found = []
    for _ in range(200000): found = [found]
    return found
## cycle
def solve():
    found = []
    found.append(found)
    return found
## colliding keys
def solve(): return {number * (2 ** 61 - 1) for number in range(60000)}
## enormous number
def solve(): return 1 << (1 << 24)
## enormous text
def solve(): return "x" * (100 << 20)
## endless items
def solve():
    while True: yield 1
## not a number
def solve(): return float("nan")
## lone surrogates
def solve(): return "\ud800" * 32
## array of objects
import sys
class dtype:
    kind, str = "U", "<U1000000000"
class ndarray:
    dtype, shape = dtype, (1,)
    def ravel(self): return self
    def tolist(self): return ["a"]
class numpy:
    ndarray, generic = ndarray, ()
sys.modules["numpy"] = numpy
def solve(): return ndarray()
## thread that answers later
import os, threading, time
def later():
    while True:
        for number in range(3, 20):
            try: os.write(number, b'["value",true]\n')
            except OSError: pass
        time.sleep(0.01)
threading.Thread(target=later, daemon=True).start()
def solve(): return 1
## closed pipes
import os
os.closerange(0, 256)
def solve(): return 1
## recursion without end
def solve(): return solve()
## crash of the interpreter
import ctypes
def solve(): ctypes.string_at(0)
"""
