"""Compiles the op library and the extension module; everything else about the package is said in pyproject.toml."""

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from find_tensorflow import TensorFlowNotFoundError, find_tensorflow  # noqa: E402

from custom_ops import build_flags  # noqa: E402

OP_LIBRARY, EXTENSION = "custom_ops._tfmem_ops", "custom_ops._extension"
COMMANDS = {
    OP_LIBRARY: (build_flags.compile_command, build_flags.link_command),
    EXTENSION: (build_flags.extension_compile_command, build_flags.extension_link_command),
}


class BuildLibraries(build_ext):
    """Builds `custom_ops/_tfmem_ops.tf<minor>.so`, no Python module and not named like one, and the extension."""

    library = "_tfmem_ops.so"  # its name until TensorFlow is asked, which metadata must not need

    def run(self):
        try:
            self.version = find_tensorflow().__version__
        except TensorFlowNotFoundError as error:
            sys.exit(f"\n{error}\n")
        if not (build_flags.python_include() / "Python.h").exists():
            sys.exit(
                f"\nPython's headers are not in {build_flags.python_include()}; they come with Python's own installers "
                "and version managers, and on Debian: apt-get install python3-dev\n"
            )
        self.library = build_flags.library_name(self.version)
        super().run()

    def get_ext_filename(self, fullname):
        # Of the full name or of its last part.
        name = build_flags.EXTENSION if EXTENSION.endswith(fullname) else self.library
        return str(Path(*fullname.split(".")[:-1], name))

    def build_extension(self, ext):
        compile_command, link_command = COMMANDS[ext.name]
        how = f"{self.version} {compile_command(Path('.cc'), Path('.o'))}"
        # One folder for wheels, editable installs and --inplace, so that none compiles again.
        folder = ROOT / "build" / "objects" / hashlib.sha256(how.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(lambda source: compiled(Path(source), folder, compile_command), ext.sources))
        target = Path(self.get_ext_fullpath(ext.name))
        library = folder / target.name
        if is_older(library, objects):
            print("linking", library.name, flush=True)
            run(link_command(objects, library))
        target.parent.mkdir(parents=True, exist_ok=True)
        if ext.name == OP_LIBRARY and not self.inplace:  # a wheel is for one TensorFlow, whatever was built before
            for other in target.parent.glob(build_flags.library_name("*.*")):
                other.unlink()
        shutil.copy2(library, target)


def compiled(source, folder, compile_command):
    """The object file of `source`, made again only if a file that it includes has changed."""
    stem = build_flags.object_stem(source)
    target, dependencies = folder / f"{stem}.o", folder / f"{stem}.d"
    rule = dependencies.read_text() if dependencies.exists() else ""
    if not rule or is_older(target, rule.partition(":")[2].replace("\\\n", " ").split()):
        print(f"compiling {source}\n", end="", flush=True)
        run([*compile_command(source, target), "-MMD"])
    return target


def is_older(target, sources):
    paths = [target, *map(Path, sources)]
    if not all(path.exists() for path in paths):
        return True
    return any(path.stat().st_mtime > target.stat().st_mtime for path in paths)


def run(command):
    try:
        subprocess.run(command, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        sys.exit(f"\nnot everything was built: {error}\nIt needs g++ (or CXX=...) with C++17.\n")


def extension(name, sources, headers):
    return Extension(
        name,
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        py_limited_api=True,
    )


setup(
    ext_modules=[
        extension(OP_LIBRARY, build_flags.sources(), build_flags.headers()),
        extension(EXTENSION, build_flags.extension_sources(), build_flags.extension_headers()),
    ],
    cmdclass={"build_ext": BuildLibraries},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # the oldest Python; the op library is for any
)
