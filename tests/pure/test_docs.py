"""What the documentation names exists: files, headings, commands, options, names. Its tables are the results'."""

from __future__ import annotations

import ast
import builtins
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tfmem
from custom_ops.expr import reference
from custom_ops.expr.text import from_text
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.options import RecurrentOptions
from tfmem.cli.main import parser
from tfmem.options import Options

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "docs").is_dir():
    pytest.skip("the documentation is not installed; run from a checkout", allow_module_level=True)

OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted(ROOT.glob("docs/**/*.md"))]
FOLDERS = ("tfmem", "graph_passes", "custom_ops", "benchmarks", "examples", "tests", "tools", "docs", "bazel")
SOURCE = re.compile(r"[\w./*-]+\.(?:py|cc|cuh|h|md|bzl)")
OF_EACH_PASS = {"plan.py", "apply.py", "options.py"}
OF_OTHERS = {"ConvLSTM2D", "NASCell", "dynamic_rnn", "element_spec", "go_backwards", "static_rnn"}  # TensorFlow's and
OF_OTHERS |= {"global_clipnorm", "parallel_iterations", "set_visible_devices"}  # Keras's
OF_OTHERS |= {"AdamW", "BackupAndRestore", "gradient_accumulation_steps", "mixed_bfloat16", "mixed_float16"}
OF_OTHERS |= {"CentralStorageStrategy", "OneDeviceStrategy", "distribute_values_from_function"}  # tf.distribute's
OF_OTHERS |= {"SUPPORTED_TENSORFLOW_OPS", "cc_library"}  # TensorFlow Serving's and Bazel's
OF_OTHERS |= {"cudaMemPrefetchAsync", "NVIDIA_TF32_OVERRIDE", "WORKSPACE"}  # CUDA's and Bazel's
OF_OTHERS |= {
    "RematScope",
    "TF_LoadLibrary",
    "ds_report",
    "save_on_cpu",
}  # of the peers in docs/features.md, and the C API
OF_TENSORFLOW = {"InvalidArgumentError", "ResourceExhaustedError", "UnavailableError", "InternalError", "NotFoundError"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def quoted(page: Path) -> Iterator[str]:
    """What stands between single backticks, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for found in re.findall(r"`([^`]+)`", text):
        yield " ".join(found.split())


def sources() -> str:
    """All of the project's Python."""
    return "\n".join(file.read_text() for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))


@cache
def identifiers() -> set[str]:
    """All that occur outside of the tests, in Python, C++, CUDA and what builds these."""
    code = [file for folder in FOLDERS if folder != "tests" for file in (ROOT / folder).rglob("*.*")]
    code = [file for file in code if file.suffix in {".py", ".cc", ".h", ".cuh", ".bzl"}]
    texts = [file.read_text() for file in (*code, ROOT / "Makefile", ROOT / "WORKSPACE", ROOT / "pyproject.toml")]
    return set(re.findall(r"[A-Za-z_]\w*", "\n".join(texts)))


@cache
def names_of_tests() -> set[str]:
    """All functions that pytest collects."""
    code = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^ *def (test_\w+)", code, re.MULTILINE))


@pages
def test_files_exist(page: Path) -> None:
    folders = tuple(f"{folder}/" for folder in FOLDERS)
    named = [text.partition(":")[0] for text in quoted(page)]
    paths = {text for text in named if SOURCE.fullmatch(text) or text.startswith(folders)} - OF_EACH_PASS
    paths = {path for path in paths if not re.search(r"[ <]|\.so$", path)}
    missing = [path for path in sorted(paths) if not any(ROOT.glob(path.rstrip("/")))]
    assert not missing, "name files from the repository's root"


def test_the_tree_of_the_architecture_is_the_tree():
    text = (ROOT / "docs/architecture.md").read_text()
    top, shown = "", set()
    for indent, folder in re.findall(r"^( {4}| {6})(\w+)/ ", text, re.MULTILINE):
        top = folder if len(indent) == 4 else top
        shown.add(top if folder == top else f"{top}/{folder}")
    code = [file for layer in ("tfmem", "graph_passes", "custom_ops") for file in (ROOT / layer).rglob("*.*")]
    folders = [file.relative_to(ROOT).parent for file in code if file.suffix in {".py", ".cc", ".cuh"}]
    assert shown == {"/".join(folder.parts[:2]) for folder in folders}


@pages
def test_each_item_of_a_list_begins_a_line(page: Path) -> None:
    """A paragraph that is wrapped again takes in the items below it."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r"[.;:]\s- (?:\*\*|`|\w).{0,30}", re.sub(r"\n(?=\s*- )", "\n\n", text)) == []


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], target


def test_every_feature_links_to_its_test() -> None:
    """A row of docs/features.md names a test function, and the file in which it is."""
    page = ROOT / "docs/features.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for row in rows:
        (link,) = re.findall(r"\[`(test_\w+)`\]\((\.\./tests/[\w/]+\.py)\) \|$", row)
        assert re.search(rf"^ *def {link[0]}\(", (page.parent / link[1]).read_text(), re.MULTILINE), row


@pages
def test_commands_exist(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for module, arguments in re.findall(r"python3? -m\s+([\w.]+)([^`\n#]*)", text):
        top = module.partition(".")[0]
        if top not in FOLDERS:
            continue
        file = ROOT / (module.replace(".", "/") + ".py")
        file = file if file.exists() else ROOT / module.replace(".", "/") / "__main__.py"
        assert file.exists(), f"python -m {module}"
        shared = (ROOT / "benchmarks/runs.py").read_text()
        if module == "tfmem":
            shared += "".join(source.read_text() for source in (ROOT / "tfmem/cli").glob("*.py"))
        for option in re.findall(r"--[a-z][a-z0-9-]*", arguments):
            assert f'"{option}"' in file.read_text() + shared, f"python -m {module} {option}"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^    |`)make ([a-z]+)", text, re.MULTILINE):
        assert target in targets, f"make {target}"


@pages
def test_commands_of_tfmem_are_parsed(page: Path) -> None:
    for line in re.findall(r"^    (tfmem .*)$", page.read_text(), re.MULTILINE):
        parser().parse_args(shlex.split(line, comments=True)[1:])  # exits if an option is wrong


@pages
def test_public_names_exist(page: Path) -> None:
    for name in re.findall(r"\btfmem\.(?!json)([A-Za-z]\w*)", page.read_text()):
        assert name in tfmem.__all__ or any((ROOT / "tfmem").glob(f"{name}*")), f"tfmem.{name}"


@pages
def test_names_in_code_exist(page: Path) -> None:
    """Functions, classes, fields, options and ops, between backticks alone or as a call."""
    named = {name for text in quoted(page) for name in re.findall(r"^_?[A-Za-z]\w*(?=\(.*\)$|$)", text)}
    missing = named - identifiers() - names_of_tests() - OF_OTHERS
    assert not missing, sorted(missing)


@pages
def test_variables_and_errors_exist(page: Path) -> None:
    text, code = page.read_text(), sources() + (ROOT / "WORKSPACE").read_text() + (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"\bTFMEM_[A-Z_]+[A-Z]\b", text)):
        assert name in code, name
    for name in set(re.findall(r"\b[A-Z][A-Za-z]*Error\b", text)) - OF_TENSORFLOW:
        assert hasattr(builtins, name) or f"class {name}(" in code, name


@pytest.mark.parametrize(
    ("page", "of"), [("options.md", Options), ("options.md", OffloadOptions), ("recurrent.md", RecurrentOptions)]
)
def test_every_option_has_a_row_with_its_default(page: str, of: type) -> None:
    text = (ROOT / "docs" / page).read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`([^`]*)`|[^|]*) \|", text, re.MULTILINE))
    for field in fields(of):
        assert field.name in rows, f"{of.__name__}.{field.name}"
        if rows[field.name] and isinstance(field.default, str | int | bool | tuple):
            written = rows[field.name].replace('"', "'")
            assert written == repr(field.default), f"{of.__name__}.{field.name}"


def between(page: str, markers: tuple[str, str], expected: str) -> None:
    """Whether `page` has `expected` between its markers, and each of these once."""
    text = (ROOT / page).read_text()
    assert [text.count(marker) for marker in markers] == [1, 1]
    assert text.partition(markers[0])[2].partition(markers[1])[0].strip() == expected


def test_tables_are_those_of_the_results():
    from benchmarks import sample
    from benchmarks.applications import __main__ as applications
    from benchmarks.dynamic import applications as dynamic_applications
    from benchmarks.dynamic import tables as make_dynamic_tables
    from benchmarks.fusion import statistics, ulps
    from benchmarks.fusion import tables as make_fusion_tables
    from benchmarks.matmul import cases
    from benchmarks.offload import first_steps
    from benchmarks.offload import tables as make_tables
    from benchmarks.recurrent import tables as make_recurrent_tables

    def read(name: str) -> dict:
        return json.loads((ROOT / "benchmarks/results" / name).read_text())

    others = [f"recurrent_{name}.json" for name in ("search_h200", "keras_h200", "cpu")]
    recurrent = make_recurrent_tables.tables(read("recurrent_h200.json"), *map(read, others))
    matmul = "\n".join(cases.table(read("matmul_h200.json")["cases"]))
    networks = "\n".join(applications.table(read("applications_cpu.json")["cases"]))
    offload = make_tables.tables(read("offload_h200.json"))
    fusion = make_fusion_tables.tables(*(read(f"fusion_{name}.json") for name in ("cpu", "h100", "h200")))
    named = ("offload", "recurrent", "recurrent_keras")
    samples = sample.tables(*([read(f"{name}_{of}.json") for name in named] for of in ("sample_h100", "h200")))
    dynamic = make_dynamic_tables.tables(*(read(f"dynamic_{name}.json") for name in ("cpu", "host", "h200")))
    between("docs/benchmarks.md", sample.MARKERS, samples)
    elementwise = ulps.tables(read("fusion_ulps_h100.json"))
    between("docs/benchmarks_elementwise.md", ulps.MARKERS, elementwise)
    between("docs/benchmarks_dynamic.md", make_dynamic_tables.MARKERS, dynamic)
    of_applications = dynamic_applications.text(read("dynamic_applications_cpu.json"))
    between("docs/benchmarks_dynamic.md", dynamic_applications.MARKERS, of_applications)
    between("docs/benchmarks_offload.md", (make_tables.BEGIN, make_tables.END), offload)
    first = first_steps.table(read("offload_first_steps_cpu.json")["cases"])
    between("docs/benchmarks_offload.md", first_steps.MARKERS, first)
    between("docs/benchmarks_recurrent.md", make_recurrent_tables.MARKERS, recurrent)
    between("docs/benchmarks_fusion.md", make_fusion_tables.MARKERS, fusion)
    kernels = statistics.tables(read("fusion_statistics.json"))
    between("docs/benchmarks_fusion.md", statistics.MARKERS, kernels)
    assert f"\n{networks}\n\n" in (ROOT / "docs/benchmarks_offload.md").read_text()
    assert matmul in (ROOT / "docs/benchmarks_matmul.md").read_text()


def test_the_long_run_of_the_page_is_the_results() -> None:
    text = (ROOT / "docs/benchmarks_fusion.md").read_text()
    results = json.loads((ROOT / "benchmarks/results/fusion_long_run_cpu.json").read_text())
    case = results["cases"]["logistic"]
    moved, permuted, stitched = case["moved"], case["permuted"], case["stitched"]
    assert stitched == max(moved), "the page says that TensorFlow strays as far"
    numbers = (stitched, min(moved), max(moved), moved[0], min(permuted), max(permuted))
    first, *others = (f"{number:.2e}".replace("e-0", "e-") for number in numbers)
    as_far = sum(each == stitched for each in moved)
    for sentence in (
        f"from TensorFlow's:\n{first}.",
        f"strays {others[0]} to {others[1]}: moved away from zero\n{others[2]}, and",
        f"in {len(moved) - 1} ways, of which {as_far} stray as far",
        f"in five other orders it strays {others[3]} to {others[4]}.",
    ):
        assert sentence in text, sentence


def test_the_entry_that_the_architecture_shows_is_the_tables():
    (entry,) = re.findall(r"^    Op\(.*\n(?:       .*\n)+", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert entry.rstrip() in (ROOT / "custom_ops/expr/activations.py").read_text()


def test_the_program_that_the_architecture_shows_is_softmax():
    block = re.search(r"^    program 1\n(    .*\n)+", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    lines = [re.split("  +", line.strip())[0] for line in block[0].splitlines()]
    logits = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    (found,) = reference.run(from_text("\n".join(lines) + "\n"), [logits])
    np.testing.assert_allclose(found, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), rtol=1e-5)


def test_make_sanitize_runs_tests_that_exist() -> None:
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^sanitize_tests = (.*)$", text, re.MULTILINE)
    lists = dict(re.findall(r"\$\(patsubst %,tests/(\w+)/test_%\.py,([^)]*)\)", line))
    assert lists.keys() == {"tf", "jit"}
    missing = [
        name
        for folder, names in lists.items()
        for name in names.split()
        if not (ROOT / f"tests/{folder}/test_{name}.py").exists()
    ]
    assert missing == []
    assert {"dynamic_ops", "fusion_op", "matmul_op", "memops", "recurrent_op"} <= set(lists["tf"].split())


def test_the_reference_names_what_is_there():
    """`make docs` fails on a name that has moved; this says so without building the site."""
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        whole = ROOT / name.replace(".", "/")
        if whole.with_suffix(".py").is_file() or (whole / "__init__.py").is_file():
            continue
        module, _, member = name.rpartition(".")
        folder = ROOT / module.replace(".", "/")
        files = (folder.with_suffix(".py"), folder.with_suffix(".pyi"), folder / "__init__.py")
        file = next(filter(Path.is_file, files))
        assert re.search(rf"(def |class |import .*)\b{member}\b|^    {member},$", file.read_text(), re.MULTILINE), name


def test_the_reference_has_all_public_names() -> None:
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    named = {name.rpartition(".")[2] for name in listed}
    for name in listed:  # a module: all that it defines
        file = ROOT / f"{name.replace('.', '/')}.py"
        named |= set(re.findall(r"^class (\w+)", file.read_text(), re.MULTILINE)) if file.is_file() else set()
    for module in ("tfmem/__init__.py", "tfmem/dynamic/__init__.py", "tfmem/keras.py"):
        public = {
            element.value
            for statement in ast.parse((ROOT / module).read_text()).body
            if isinstance(statement, ast.Assign) and "__all__" in map(ast.unparse, statement.targets)
            for element in ast.walk(statement.value)
            if isinstance(element, ast.Constant)
        }
        assert public <= named, (module, public - named)
