"""GRNN's kernels beside ours: which configurations, what is patched, and what becomes of programs that fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks.recurrent import grnn
from benchmarks.recurrent.cases import Case
from benchmarks.recurrent.grnn import NAME, Build
from custom_ops.recurrent.search.grnn_model import GrnnTiling
from graph_passes.cost import device

MACHINE = device.machine("h200")
KERNEL = """
    if (tid == 0) {
      syncIn[bidy * gridDim.x + bidx] = sequence_iteration + 1;
    }
      if (tid == 0) {
        while (syncOut[bidy] != sequence_iteration + 1) {
        }
      }
      __syncthreads();
    }
  cudaMalloc((void **) &(this->packed_biases_gpu), bias_footprint); CUDA_ERR;
  cudaMalloc((void **) &(this->gpu_output), this->output_size * this->batch_size * sizeof(T));
  cudaMalloc((void **) &(this->gpu_syncIn), 80 * sizeof(int));
  void * kernel = (void *)gru_rnn<256, 3, 1, 32, 8, 10>;
  if (grid_size > 80 * numBlocks) {
  cudaEventRecord(start);
"""


def test_its_kernels_are_built_for_what_they_can_do() -> None:
    for case in (Case("canonical_gru", units, batch) for units in (64, 256) for batch in (1, 10, 20)):
        builds = grnn.ranked(MACHINE, case, 3)
        assert [build.form for build in builds] == 3 * ["single"] + 3 * ["double"]
        for build in builds:
            assert build.columns * build.tiling.groups == 2 * build.tiling.width
            assert build.form == "single" or case.units % build.tiling.width == 0
    assert not grnn.ranked(MACHINE, Case("canonical_gru", 1024, 64), 3)  # too much for registers


def test_its_kernels_are_patched() -> None:
    build = Build(Case("canonical_gru", 64, 5), "single", GrnnTiling(width=16, height=1, groups=16, group_size=8))
    text = grnn.patched_kernel(KERNEL, build)
    assert "gru_rnn<64, 2, 1, 16, 8, 5>" in text
    assert "__threadfence();\n    __syncthreads();\n    if (tid == 0) {\n      syncIn" in text
    assert "__syncthreads();\n    }\n    __threadfence();" in text
    assert "&(this->packed_biases_gpu), 4 * bias_footprint);" in text
    assert "&(this->gpu_syncIn), 1024 * sizeof(int));" in text
    assert "&(this->gpu_output), 200 * this->output_size * this->batch_size * sizeof(T));" in text
    assert "grid_size > 132 * numBlocks" in text
    assert text.index("cudaMemset(this->gpu_syncOut, 0") < text.index("cudaEventRecord(start)")


def test_the_fastest_program_counts_and_cases_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(build: Build, source: Path, place: Path, arch: str) -> Path:
        assert (source, arch) == (Path("src"), "sm_90")
        place.mkdir(parents=True)
        program = place / "program"
        if build.tiling.groups == build.tiling.width:
            program.write_text(f"#!/bin/sh\necho {build.tiling.width / 100} ms\n")
        else:
            program.write_text("#!/bin/sh\necho 'CUDA error: 700'\necho inf ms\n")
        program.chmod(0o755)
        if build.case.batch == 20:
            raise subprocess.CalledProcessError(2, "nvcc", stderr="no host compiler")
        return program if build.case.batch == 1 else place / "missing"

    monkeypatch.setattr(grnn, "compiled", compiled)
    output = tmp_path / "results.json"
    one: dict[str, Any] = {"systems": {"loop, plain": {"status": "ok", "ms": 9.0}}}
    output.write_text(json.dumps({"format": 1, "cases": {"canonical_gru/256/1": one}}))
    arguments = ["--source", "src", "--output", str(output), "--only"]
    assert grnn.main([*arguments, "canonical_gru/256/10"]) == 1
    assert grnn.main([*arguments, "canonical_gru/256/1", "--top", "2"]) == 1
    cases = json.loads(output.read_text())["cases"]
    assert cases["canonical_gru/256/1"]["systems"]["loop, plain"]["ms"] == 9.0
    found = cases["canonical_gru/256/1"]["systems"][NAME]
    assert found["status"] == "ok"
    assert found["ms"] == found["tiling"]["width"] / 100
    assert found["failed"]
    assert all("CUDA error: 700" in message for message in found["failed"])
    assert cases["canonical_gru/256/10"]["status"] == "incomplete"
    assert cases["canonical_gru/256/10"]["systems"][NAME]["status"] == "error"
    assert "FileNotFoundError" in cases["canonical_gru/256/10"]["systems"][NAME]["message"]
    assert grnn.main([*arguments, "canonical_gru/256/20"]) == 1
    found = json.loads(output.read_text())["cases"]["canonical_gru/256/20"]["systems"][NAME]
    assert found["message"].endswith("no host compiler")
