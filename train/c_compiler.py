"""Checks that Triton can build the C module with which it launches kernels, as it does at first use."""

import os
import shutil
import subprocess
import sysconfig


def check_c_compiler() -> None:
    """Raises ValueError if there is no C compiler, or it does not find Python's headers.

    Looks where Triton looks (triton/runtime/build.py): CC, then gcc, then clang in PATH.
    """
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None:
        raise ValueError(
            "Triton needs a C compiler, and neither CC is set nor gcc or clang in PATH: install one, as by "
            "apt install gcc, or set CC=/path/to/gcc"
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme)["include"]
    # reads the headers and writes nothing: a few hundredths of a second
    command = [compiler, "-fsyntax-only", "-I", headers, "-x", "c", "-"]
    source, english = "#include <Python.h>\n", {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, input=source, env=english, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(
            f"Triton needs a C compiler, and {compiler!r} cannot be started ({error.strerror}): set "
            "CC=/path/to/gcc, or unset it to have gcc or clang taken from PATH"
        ) from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), "no error message")
        raise ValueError(
            f"Triton needs Python's headers, and {compiler} cannot compile with those in {headers} "
            f"({reason.strip()}): install them, as by apt install python3-dev, or set CC to another compiler"
        )
