"""Compiles the op library and the extension module; everything else about the package is said in pyproject.toml."""

import fcntl
import hashlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import build_units  # noqa: E402
from compile_units import Job, compile_all, is_older, run, write  # noqa: E402
from find_tensorflow import TensorFlowNotFoundError, find_tensorflow  # noqa: E402

from custom_ops import build_flags  # noqa: E402

OBJECTS = ROOT / "build" / "objects"
OP_LIBRARY, EXTENSION = "custom_ops._tfmem_ops", "custom_ops._extension"
COMMANDS = {
    OP_LIBRARY: (build_flags.compile_command, build_flags.link_command),
    EXTENSION: (build_flags.extension_compile_command, build_flags.extension_link_command),
}
UNITS = {OP_LIBRARY: build_units.units, EXTENSION: build_units.one_by_one}


@dataclass(frozen=True)
class Library:
    """A library that is compiled and linked in a folder for its flags.

    Attributes:
        path: the library in that folder.
        jobs: what the compiler makes for it, what other jobs need first.
        objects: its object files.
    """

    path: Path
    jobs: list[Job]
    objects: list[Path]


class BuildLibraries(build_ext):
    """Builds `custom_ops/_tfmem_ops.tf<minor>.so`, no Python module and not named like one, and the extension."""

    library = "_tfmem_ops.so"  # its name until TensorFlow is asked, which metadata must not need
    user_options: ClassVar = [*build_ext.user_options, ("werror", None, "compiler warnings are errors")]
    boolean_options: ClassVar = [*build_ext.boolean_options, "werror"]

    def initialize_options(self):
        super().initialize_options()
        self.werror = False

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
        # setuptools passes the full name or its last part.
        name = build_flags.EXTENSION if EXTENSION.endswith(fullname) else self.library
        return str(Path(*fullname.split(".")[:-1], name))

    def build_extensions(self):
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with (OBJECTS / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another build may run, which would write the same files
            self.build_libraries()

    def build_libraries(self):
        libraries = {ext.name: self.planned(ext) for ext in self.extensions}
        jobs = [job for library in libraries.values() for job in library.jobs]
        jobs.sort(key=lambda job: job.header is not None)  # what can run while the header is compiled
        compile_all(jobs, ["-Werror"] if self.werror else [])
        for name, library in libraries.items():
            if is_older(library.path, library.objects):
                print("linking", library.path.name, flush=True)
                run(COMMANDS[name][1](library.objects, library.path))
            target = Path(self.get_ext_fullpath(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            if name == OP_LIBRARY and not self.inplace:  # a wheel is for one TensorFlow, whatever was built before
                for other in target.parent.glob(build_flags.library_name("*.*")):
                    other.unlink()
            shutil.copy2(library.path, target)

    def planned(self, ext):
        """The `Library` of an extension of setuptools'; the texts of its units are written."""
        compile_command = COMMANDS[ext.name][0]
        how = f"{self.version} {compile_command(Path('.cc'), Path('.o'))}"
        # One folder for wheels, editable installs and --inplace, so that they share what is compiled.
        folder = OBJECTS / hashlib.sha256(how.encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        jobs, objects = [], []
        header = folder / build_flags.PRECOMPILED.name
        compiled_header = folder / f"{header.name}.gch"
        units = UNITS[ext.name]([ROOT / source for source in ext.sources], ROOT)
        if any(unit.sees_tensorflow for unit in units):
            write(header, build_units.include(build_flags.PRECOMPILED, ROOT))
            jobs.append(Job("TensorFlow's headers", compiled_header, build_flags.precompile_command(compiled_header)))
        for unit in units:
            source, target = folder / f"{unit.name}.cc", folder / f"{unit.name}.o"
            write(source, unit.text(ROOT))
            command = compile_command(source, target)
            if unit.sees_tensorflow:
                command += build_flags.precompiled_flags(header)
            files = len(unit.sources)
            label = unit.name if files == 1 else f"{unit.name} ({files} files)"
            jobs.append(Job(label, target, command, compiled_header if unit.sees_tensorflow else None))
            objects.append(target)
        return Library(folder / Path(self.get_ext_filename(ext.name)).name, jobs, objects)


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
