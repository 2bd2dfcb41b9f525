"""Compiles the op library; everything else about the package is said in pyproject.toml."""

import hashlib
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from find_tensorflow import TensorFlowNotFoundError, find_tensorflow  # noqa: E402

from custom_ops import build_flags  # noqa: E402


class BuildOpLibrary(build_ext):
    """Builds `custom_ops/_tfmem_ops.tf<minor>.so`: not a Python module, so not named like one."""

    library = "_tfmem_ops.so"  # its name until TensorFlow is asked, which metadata must not need

    def run(self):
        try:
            self.version = find_tensorflow().__version__
        except TensorFlowNotFoundError as error:
            sys.exit(f"\n{error}\n")
        self.library = build_flags.library_name(self.version)
        super().run()

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")[:-1], self.library))

    def build_extension(self, ext):
        how = f"{self.version} {build_flags.compile_command(Path('.cc'), Path('.o'))}"
        # One folder for wheels, editable installs and --inplace, so that none compiles anew.
        folder = ROOT / "build" / "objects" / hashlib.sha256(how.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(max_workers=2) as pool:
            objects = list(pool.map(lambda source: compiled(Path(source), folder), ext.sources))
        library = folder / self.library
        if is_older(library, objects):
            print("linking", library.name, flush=True)
            run(build_flags.link_command(objects, library))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if not self.inplace:  # a wheel is for one TensorFlow, whatever was built in this folder before
            for other in target.parent.glob(build_flags.library_name("*.*")):
                other.unlink()
        shutil.copy2(library, target)


def compiled(source, folder):
    """The object file of `source`, made anew only if a file that it includes has changed."""
    stem = build_flags.object_stem(source)
    target, dependencies = folder / f"{stem}.o", folder / f"{stem}.d"
    rule = dependencies.read_text() if dependencies.exists() else ""
    if not rule or is_older(target, rule.partition(":")[2].replace("\\\n", " ").split()):
        print(f"compiling {source}\n", end="", flush=True)
        run([*build_flags.compile_command(source, target), "-MMD"])
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
        sys.exit(f"\nthe op library was not built: {error}\nIt needs g++ (or CXX=...) with C++17.\n")


class PlatformWheel(bdist_wheel):
    """The library is the platform's, but no particular Python's."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "custom_ops._tfmem_ops",
            sources=[str(path.relative_to(ROOT)) for path in build_flags.sources()],
            depends=[str(path.relative_to(ROOT)) for path in build_flags.headers()],
        )
    ],
    cmdclass={"build_ext": BuildOpLibrary, "bdist_wheel": PlatformWheel},
)
