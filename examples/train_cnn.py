"""Train one CNN twice from the same seeds, without tfmem and with it under a budget, and compare.

    python -m examples.train_cnn --preset demo
    python -m examples.train_cnn --model resnet152 --batch 128 --memory-budget 16GiB

Each training runs in its own process, so that neither's memory shows in the other's peak. Peaks
are what TensorFlow's own allocator counts during a step. Writes losses, report and a picture."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tfmem
from graph_passes.device_report import duration, size
from graph_passes.report import Report
from tfmem.html_report import write_html

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 8  # steps that trace, observe and replan; they count for losses, not for time or peak
DEFAULT_SHARE = 0.7  # without --memory-budget: this share of what the plain run needed


@dataclass(frozen=True)
class Settings:
    """The settings of a training, equal in both runs."""

    model: str = "vgg19"
    batch: int = 64
    image_size: int = 64
    classes: int = 10
    width: float = 0.25
    images: str = "digits"
    steps: int = 24
    seed: int = 0
    memory_budget: str | None = None
    policy: str | None = None
    deterministic: bool = True


PRESETS = {
    # a quarter of a second a step on two cores; nearly all of its memory is activations
    "demo": Settings(batch=128, steps=16, memory_budget="155MiB", policy="autovm"),  # copies show the spill files
    # AutoVM thesis, section 6.2: 224 x 224 images, 1000 classes, on a GPU
    "thesis": Settings(
        batch=256,
        image_size=224,
        classes=1000,
        width=1.0,
        images="photographs",
        memory_budget="19.5GiB",
        deterministic=False,
    ),
}


@dataclass(frozen=True)
class Run:
    """What one training measured. Bytes and seconds, one entry for each step.

    Peaks are of TensorFlow's allocator, which on a CPU counts allocations from 256 KiB, and not of
    use in the steps that tfmem observes (it resets them); `process_peak` counts everything.
    """

    device: str
    losses: list[float]
    seconds: list[float]
    peaks: list[int]
    process_peak: int

    @property
    def peak(self) -> int:
        """The most memory any step used after warm-up."""
        return max(self.peaks[WARM_UP:])

    @property
    def step_time(self) -> float:
        """Median seconds of a step after warm-up, with the making of its images where the step waits for them."""
        return statistics.median(self.seconds[WARM_UP:])


def main(arguments: list[str] | None = None) -> int:
    """Train twice, compare, draw. Returns 1 if the run with tfmem broke a promise of tfmem's."""
    options = parse(arguments)
    settings = settings_of(options)
    if options.child:
        run = train(settings, options.child == "tfmem", options.output)
        (options.output / f"{options.child}.json").write_text(json.dumps(asdict(run)))
        return 0

    output = options.output or Path(tempfile.mkdtemp(prefix="train_cnn-"))
    output.mkdir(parents=True, exist_ok=True)
    print(
        f"{settings.model}, batch {settings.batch}, {settings.image_size} pixels, "
        f"width {settings.width:g}, {settings.steps} steps on {settings.images}",
        flush=True,
    )
    plain = in_subprocess("plain", settings, output)
    if settings.memory_budget is None:
        settings = replace(settings, memory_budget=str(int(DEFAULT_SHARE * plain.peak)))
    tfmem = in_subprocess("tfmem", settings, output)
    report = Report.from_json((output / "report.json").read_text())

    print("\n" + loss_table(plain, tfmem))
    print("\n" + summary(plain, tfmem, report))
    print("\n" + report.to_text())
    picture = draw(plain, tfmem, report, output / "train_cnn.png")
    page = write_html(report, output / "report.html")
    print(f"\nlosses and report: {output}\npage: {page}\npicture: {picture}")

    if settings.deterministic and "CPU" in plain.device and plain.losses != tfmem.losses:
        print("FAILED: the losses differ, and on a CPU they must not", file=sys.stderr)
        return 1
    if report.transfers and tfmem.peak >= plain.peak:
        print("FAILED: tensors moved, but the measured peak is no lower", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_cnn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Settings()
    parser.add_argument("--preset", choices=sorted(PRESETS), help="start from these settings")
    parser.add_argument("--model", choices=("vgg19", "resnet152", "alexnet"))
    parser.add_argument("--batch", type=_positive, help=f"images a step ({default.batch})")
    parser.add_argument("--image-size", type=_positive, help=f"pixels ({default.image_size})")
    parser.add_argument("--classes", type=_positive, help=f"outputs ({default.classes})")
    parser.add_argument("--width", type=float, help=f"factor on channels ({default.width})")
    parser.add_argument("--images", choices=("digits", "photographs"))
    parser.add_argument("--steps", type=_positive, help=f"training steps ({default.steps})")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--memory-budget",
        help=f"what tfmem.optimize takes, such as 300MiB or 0.5; default: {DEFAULT_SHARE} of what the plain run used",
    )
    parser.add_argument("--policy", help="offload policy; default: tfmem's")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="bit-reproducible kernels (on; off in the preset thesis, where it costs speed)",
    )
    parser.add_argument("--output", type=Path, help="folder for results (a new temporary one)")
    parser.add_argument("--child", choices=("plain", "tfmem"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if settings_of(options).steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}, the steps that are not measured")
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """The preset, changed by the command line."""
    base = PRESETS.get(options.preset, Settings())
    given = {name: getattr(options, name) for name in asdict(base)}
    return replace(base, **{name: value for name, value in given.items() if value is not None})


def in_subprocess(variant: str, settings: Settings, output: Path) -> Run:
    """Train in a fresh process, whose output and progress bar go to this terminal."""
    command = [sys.executable, "-m", "examples.train_cnn", f"--child={variant}"]
    for name, value in (*asdict(settings).items(), ("output", output.resolve())):
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            command.append(f"--{flag}={value}")
    # Errors are raised all the same; without oneDNN, which TensorFlow turns on by itself on some processors
    # only, the CPU's allocator keeps no statistics and there is no peak to measure.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "1", **os.environ}
    # The child imports the tfmem that this process imports, wherever that is.
    places = [str(Path(tfmem.__file__).resolve().parents[1]), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    finished = subprocess.run(command, cwd=output, env=environment, check=False)
    if finished.returncode:
        raise SystemExit(f"training '{variant}' failed with exit status {finished.returncode}")
    return Run(**json.loads((output / f"{variant}.json").read_text()))


def train(settings: Settings, with_tfmem: bool, output: Path) -> Run:
    """One training, in this process."""
    import resource

    from tfmem.quiet import quiet

    name = "with tfmem" if with_tfmem else "plain"
    print(f"{name:>10}: importing TensorFlow", file=sys.stderr, flush=True)
    with quiet():
        import tensorflow as tf
    import keras

    from examples import images, models

    keras.utils.set_random_seed(settings.seed)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)

    shape = (settings.batch, settings.image_size, settings.image_size, 3)
    data = tf.data.Dataset.from_generator(
        lambda: images.batches(settings.images, settings.batch, settings.image_size, settings.steps, settings.seed),
        output_signature=(tf.TensorSpec(shape), tf.TensorSpec(shape[:1], tf.int32)),
    )
    if gpus:
        data = data.prefetch(2)
    else:  # batches that wait in the pipeline would count as the step's memory
        pipeline = tf.data.Options()
        pipeline.experimental_optimization.inject_prefetch = False
        data = data.with_options(pipeline)
    model = models.build(settings.model, settings.image_size, settings.classes, settings.width, settings.seed)
    model = models.compile_model(model)
    if with_tfmem:
        policy = {"policy": settings.policy} if settings.policy else {}
        model = tfmem.optimize(model, memory_budget=settings.memory_budget, **policy)

    device = "GPU:0" if gpus else "CPU:0"
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError as error:
        raise SystemExit(
            f"TensorFlow's allocator keeps no statistics for {device}, so there is no peak to "
            "measure; on a CPU it does with TF_ENABLE_ONEDNN_OPTS=1"
        ) from error
    print(f"{name:>10}: tracing; the first steps are slow", file=sys.stderr, flush=True)
    recorder = make_recorder(device, settings.steps, name)
    model.fit(data, steps_per_epoch=settings.steps, verbose=0, shuffle=False, callbacks=[recorder])
    if with_tfmem:
        report = tfmem.report(model)
        (output / "report.json").write_text(report.to_json())
        (output / "report.txt").write_text(report.to_text(rows=len(report.transfers)) + "\n")
    process_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux counts KiB
    return Run(device, recorder.losses, recorder.seconds, recorder.peaks, process_peak)


def make_recorder(device: str, steps: int, name: str):
    """A Keras callback that keeps each step's loss, seconds and peak memory, and shows progress."""
    import time

    import keras
    import tensorflow as tf
    from tqdm import tqdm

    class Recorder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.seconds: list[float] = []
            self.peaks: list[int] = []
            self.bar = tqdm(total=steps, desc=f"{name:>10}", unit="step")

        def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
            self.model.reset_metrics()  # else Keras reports a running mean of the loss
            tf.config.experimental.reset_memory_stats(device)
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            self.losses.append(float(logs["loss"]))  # waits for the step
            self.seconds.append(time.perf_counter() - self.began)
            self.peaks.append(tf.config.experimental.get_memory_info(device)["peak"])
            self.bar.set_postfix(shown_of(self.losses[-1], self.peaks))
            self.bar.update()

        def on_train_end(self, logs: dict | None = None) -> None:
            self.bar.close()

    return Recorder()


def shown_of(loss: float, peaks: list[int]) -> dict[str, str]:
    """The bar's text about the latest step; without a peak in the first steps, in which tfmem resets the peak."""
    known = len(peaks) > WARM_UP
    return {"loss": f"{loss:.4f}", "peak": size(peaks[-1]) if known else "not yet measured"}


def loss_table(plain: Run, tfmem: Run) -> str:
    lines = ["step   loss without tfmem     loss with tfmem   |difference|"]
    for step, (one, other) in enumerate(zip(plain.losses, tfmem.losses, strict=True), start=1):
        lines.append(f"{step:4}  {one:19.9f} {other:19.9f}  {abs(one - other):13.3g}")
    return "\n".join(lines)


def summary(plain: Run, tfmem: Run, report: Report) -> str:
    difference = max(abs(a - b) for a, b in zip(plain.losses, tfmem.losses, strict=True))
    verdict = "bit for bit the same" if plain.losses == tfmem.losses else "not the same"
    moved = f"{size(report.bytes_out_achieved)} out, {size(report.bytes_in_achieved)} in"
    rows = [
        ("", "without", "with tfmem"),
        ("budget", "-", size(report.budget)),
        ("peak, planned", "-", size(report.peak_predicted)),
        ("peak, measured", size(plain.peak), size(tfmem.peak)),
        ("process at most", size(plain.process_peak), size(tfmem.process_peak)),
        ("moved a step", "-", moved),
        ("stall a step", "-", duration(report.stall_measured_ns)),
        ("step, with its input", f"{plain.step_time:.3f} s", f"{tfmem.step_time:.3f} s"),
    ]
    lines = [f"{name:20}{one:>14}{other:>28}" for name, one, other in rows]
    change = tfmem.peak / plain.peak - 1
    lines.append(f"peak {change:+.1%}; losses: max |difference| {difference:g}, {verdict}")
    return "\n".join(lines)


def draw(plain: Run, tfmem: Run, report: Report, path: Path) -> Path:
    """Memory over one step, losses and step times, without and with tfmem."""
    from tfmem.plot import AFTER, BEFORE, draw_memory, new_figure

    figure = new_figure(9.0, 6.4)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    memory = figure.add_subplot(grid[0, :])
    draw_memory(memory, report)
    memory.set_title(f"memory over one step on {report.device}", loc="left", fontsize=11)

    loss, times = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    steps = range(1, len(plain.losses) + 1)
    loss.plot(steps, plain.losses, color=BEFORE, linewidth=4, alpha=0.4, label="without tfmem")
    loss.plot(steps, tfmem.losses, color=AFTER, linewidth=1.2, label="with tfmem")
    loss.set_title("loss", loc="left", fontsize=11)

    measured = range(WARM_UP + 1, len(plain.losses) + 1)
    for run, colour, name in ((plain, BEFORE, "without tfmem"), (tfmem, AFTER, "with tfmem")):
        label = f"{name}: median {run.step_time:.3f} s"
        times.plot(measured, run.seconds[WARM_UP:], color=colour, marker=".", label=label)
    times.set_ylim(bottom=0)
    times.set_title("step and its input (s)", loc="left", fontsize=11)
    for axes in (loss, times):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    return path


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
