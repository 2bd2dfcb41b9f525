"""Exposes the TensorFlow that pip installed as the repository @tensorflow.

The Python that has it is named by TFMEM_PYTHON, else it is the first python3 on the path.
"""

_FRAMEWORK = "libtensorflow_framework.so.2"

_QUESTION = """
import json, sys, sysconfig
import tensorflow as tf
flags = tf.sysconfig.get_compile_flags()
print(json.dumps({
    "minor": ".".join(tf.__version__.split(".")[:2]),
    "include": tf.sysconfig.get_include(),
    "folder": tf.sysconfig.get_lib(),
    "flags": [flag for flag in flags if not flag.startswith("-I")],
    "python": sys.executable,
    "python_include": sysconfig.get_path("include"),
}))
"""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "framework",
    srcs = ["{framework}"],
    hdrs = glob(["include/**"], exclude = ["include/**/BUILD*"]),
    includes = ["include"],
)

cc_library(
    name = "python_headers",
    hdrs = glob(["python_include/**/*.h"]),
    includes = ["python_include"],
)

py_runtime(
    name = "python",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":python",
)

toolchain(
    name = "python_toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _tensorflow_impl(ctx):
    python = ctx.os.environ.get("TFMEM_PYTHON") or ctx.which("python3")
    answer = ctx.execute([python, "-c", _QUESTION])
    if answer.return_code:
        fail("TFMEM_PYTHON must name a Python that has TensorFlow; %s says:\n%s" % (python, answer.stderr))
    found = json.decode(answer.stdout.strip().split("\n")[-1])

    ctx.symlink(found["include"], "include")
    ctx.symlink(found["python_include"], "python_include")
    ctx.symlink(found["folder"] + "/" + _FRAMEWORK, _FRAMEWORK)
    ctx.file("BUILD", _BUILD.format(framework = _FRAMEWORK, python = found["python"]))
    ctx.file("flags.bzl", "MINOR = %r\nCOPTS = %r\n" % (found["minor"], found["flags"]))

tensorflow = repository_rule(
    implementation = _tensorflow_impl,
    doc = "Targets: framework (headers and library), python_headers, python_toolchain. Values: flags.bzl.",
    environ = ["TFMEM_PYTHON"],
    local = True,
)
