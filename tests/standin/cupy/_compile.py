"""g++ turns a kernel's source into a library, kept on disk under the hash of all that went into it."""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from cupy._state import StandinError

INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-fno-math-errno", "-fno-strict-aliasing"),
    *("-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-nostdinc", "-nostdinc++"),
)
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL] = {}


class CompileException(StandinError):
    """What cupy.cuda.compiler raises when NVRTC refuses a source."""


@cache
def _fingerprint() -> bytes:
    headers = b"".join(path.read_bytes() for path in sorted(INCLUDE.iterdir()))
    if shutil.which("g++") is None:
        raise StandinError("the stand-in for CuPy compiles kernels with g++, which is not installed")
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True, timeout=120).stdout
    return headers + version + " ".join(FLAGS).encode()


@cache
def _folder() -> Path:
    """One for all processes of a test run, also for those that have a temporary folder of their own."""
    temporary = os.environ.get("ZEROSIM_STANDIN_TMPDIR") or tempfile.gettempdir()
    folder = Path(temporary) / f"zerosim-standin-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def library(source: str, name: str, soname: str = "") -> ctypes.CDLL:
    """A library whose `soname`, if it has one, finds it again. Raises: CompileException with the compiler's first
    lines."""
    key = hashlib.sha256(_fingerprint() + soname.encode() + source.encode()).hexdigest()[:32]
    with _lock:
        if key not in _loaded:
            path = _folder() / f"{key}.so"
            if not path.exists():
                _build(source, name, path, (f"-Wl,-soname,{soname}",) if soname else ())
            _loaded[key] = ctypes.CDLL(str(path))
        return _loaded[key]


def _build(source: str, name: str, path: Path, more: tuple[str, ...]) -> None:
    """Safe beside other processes that build the same: each writes its own file and renames it."""
    fresh = path.with_suffix(f".{os.getpid()}.so")
    text = path.with_suffix(f".{os.getpid()}.cpp")
    text.write_text(source, "utf-8")
    try:
        run = subprocess.run(
            ["g++", *FLAGS, *more, "-I", str(INCLUDE), str(text), "-o", str(fresh), "-lm"],
            capture_output=True,
            encoding="utf-8",
            timeout=600,
        )
        if run.returncode:
            errors = [line for line in run.stderr.splitlines() if "error" in line][:8]
            raise CompileException(f"kernel {name} does not compile:\n" + "\n".join(errors))
        os.replace(fresh, path)
    finally:
        text.unlink(missing_ok=True)
