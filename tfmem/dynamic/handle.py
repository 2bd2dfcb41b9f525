"""`specialize` compiles a dynamic network and returns a `Handle`, which runs batches."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from custom_ops.dynamic.codegen.plan import Plan
from custom_ops.dynamic.codegen.program import DynamicProgram
from custom_ops.dynamic.op import forward, forward_backward, seed_of, step
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import DynamicError, warn
from tfmem.api import load_ops
from tfmem.capture.early_results import call_unrecorded, with_early_results
from tfmem.dynamic.batch import (
    Batch,
    Node,
    as_batch,
    flatten,
    from_bytes,
    from_lists,
    from_roots,
    listed,
    node_type,
)
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.gpu import Programs
from tfmem.dynamic.kinds import NodeKind, State, record
from tfmem.dynamic.optimizers import Optimizer, checked
from tfmem.dynamic.parts import Parts, Run, apply, in_halves, in_parts
from tfmem.dynamic.recorded import RecordedKinds
from tfmem.dynamic.recorder import parameter_of
from tfmem.dynamic.slots import Slots
from tfmem.options import Options, merged


@dataclass(frozen=True)
class Outcome:
    """The results of a batch.

    Attributes:
        losses: the loss of each example, float32 `[examples]`.
        gradients: the gradients of the sum of the losses, for each parameter in order: a tensor of its shape, or
            `tf.IndexedSlices` for a table that is only looked up. Empty if the call returns none.
        outputs: the outputs of the node kinds, float32 `[nodes, width]`; 0 for a node whose kind has none. A gradient
            through them raises `GradientError`.
        states: the states of all nodes, float32 `[nodes, width]`, if `states` was set.
    """

    losses: tf.Tensor
    gradients: tuple[tf.Tensor | tf.IndexedSlices, ...] = ()
    outputs: tuple[tf.Tensor, ...] = ()
    states: tuple[tf.Tensor, ...] = ()


def specialize(
    parameters: Sequence[tf.Variable],
    kinds: Mapping[str, NodeKind] | None = None,
    *,
    state: State | int | None = None,
    optimizer: Optimizer | None = None,
    options: Options | None = None,
) -> Handle:
    """Compile a network whose graph differs from example to example.

    Args:
        parameters: all variables of the net, float32 of one dimension or two, each once. `Handle.step` does not change
            those with `trainable=False`.
        kinds: the kinds of nodes by name, made by `tfmem.dynamic.trace` or `tfmem.dynamic.node`. None: graphs are
            recorded op by op, which is slower.
        state: the widths of a node's state; an integer for one vector.
        optimizer: the update rule of `Handle.step`.
        options: the device that runs the net and the directory of its GPU kernels; other fields are not used. None:
            environment variables decide.

    Returns:
        The handle that runs batches.

    Raises:
        DynamicError: shapes do not fit, a kind uses a variable that is no parameter, or the op has no such optimizer.
        OpLibraryError: the op library is not built.
        OptionsError: there is no such device, or an environment variable has a value that its option does not take.
    """
    seen: set[int] = set()
    for variable in parameters:
        if id(variable) in seen:
            raise DynamicError(f"parameter '{variable.name}' is listed twice; list each variable once")
        seen.add(id(variable))
    if isinstance(state, int):
        state = (state,)
    return Handle(tuple(parameters), kinds, state, checked(optimizer), merged(options, None, None))


class Handle(tf.Module):
    """A compiled network. Several threads may call it.

    `tf.train.Checkpoint(net=handle)` saves its parameters and its optimizer's variables (`slots`). So does a SavedModel
    of a `tf.Module` that contains the handle.
    """

    def __init__(
        self,
        parameters: tuple[tf.Variable, ...],
        kinds: Mapping[str, NodeKind] | None,
        state: State | None,
        optimizer: Optimizer | None,
        options: Options,
    ) -> None:
        """Use `specialize`."""
        super().__init__()
        self.parameters = parameters
        self.optimizer = optimizer
        self._ops = load_ops().ops
        self._kinds = MappingProxyType(dict(kinds or {}))
        self._state = state
        self._recorded = None if kinds is not None else RecordedKinds(parameters)
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        for parameter in parameters:
            parameter_of(parameter)
        self._training = self._spec(training=True)
        # The number of each kind, of its children, and of children and arguments: all that making a node needs.
        forms = {
            name: (number, len(kind.children), len(kind.children) + len(kind.arguments))
            for number, (name, kind) in enumerate(zip(self._kinds, self._training.kinds, strict=True))
        }
        self._node = node_type(
            tuple((each.name, each.children, each.state, each.arguments) for each in self._training.kinds)
        )
        self._forms = MappingProxyType(forms)  # TensorFlow does not track this type in checkpoints
        self._inference = self._spec(training=False)
        self._programs = Programs(options)
        self._programs.of(self._training)
        self.slots = None if optimizer is None else Slots(optimizer, parameters)
        self._traced = _Traced()

    def _spec(self, *, training: bool) -> Spec:
        recorded = tuple(
            record(name, kind, self.parameters, self._state, training=training) for name, kind in self._kinds.items()
        )
        spec = Spec(tuple(map(parameter_of, self.parameters)), recorded)
        _ = spec.text  # which is checked before the first batch
        return spec

    @property
    def text(self) -> str:
        """All kinds as the op reads them (`custom_ops/dynamic/spec.py`)."""
        return self._training.text

    @property
    def spec(self) -> Spec:
        """All kinds, for training."""
        return self._training

    @property
    def plan(self) -> Plan | None:
        """The plan of what the GPU kernel keeps on chip; None on a CPU."""
        program = self._programs.of(self._training)
        return None if program is None else program.plan

    @property
    def choosing(self) -> bool:
        """True while eager `step` calls still time several GPU kernels, roughly the first hundred calls."""
        return self._programs.is_choosing(self._training.of_step)

    # ---- batches ----

    def node(self, kind: str, *given: Any) -> Node:
        """A node of a kind: its children, then its integer arguments.

        Raises:
            DynamicError: there is no such kind, or it has another number of children or arguments.
        """
        try:
            number, children, count = self._forms[kind]
        except (KeyError, TypeError):
            raise DynamicError(f"there is no kind of node {kind!r}; expected one of {', '.join(self._kinds)}") from None
        if len(given) != count:
            raise DynamicError(
                f"node('{kind}', ...) got {len(given)} values; expected {count}: {children} children, then "
                f"{count - children} integer arguments"
            )
        return self._node(number, given[:children], given[children:])

    def batch(self, examples: Sequence[Any]) -> Batch:
        """A batch as tensors.

        Args:
            examples: for each graph its root, a `node`, or the list of its roots; or lists of kinds, children and
                arguments; or, without kinds, its recorded loss.

        Raises:
            DynamicError: an example is none of these, or a node depends on itself.
        """
        examples = listed(examples)
        if self._recorded is not None:
            with self._lock:
                columns = self._recorded.flatten(tuple(examples))
                known = len(self._training.kinds)
                self._training = self._recorded.spec(training=True)
                self._inference = self._recorded.spec(training=False)
            new = self._training.kinds[known:]
            if known and new and self._programs.on_gpu:
                warn(
                    f"recorded graphs have {len(new)} new kinds of ops, so the GPU kernel is compiled again, which "
                    "takes seconds. To avoid this, pass kinds= to specialize, or use every op in the first batch"
                )
            return from_bytes(columns)
        roots: list[Any] = [[example] if isinstance(example, Node) else example for example in examples]
        if all(map(_are_roots, roots)):
            return from_roots(roots, self._node)
        return from_lists(flatten(*each, own=self._node) if _are_roots(each) else each for each in roots)

    def _as_batch(self, given: Any) -> Batch:
        if isinstance(given, list) and (not given or isinstance(given[0], Expression | Node) or _are_roots(given[0])):
            return self.batch(given)
        return as_batch(given)

    # ---- calls ----

    def forward_backward(
        self, batch: Any, *, loss_weights: tf.Tensor | None = None, seed: int | tf.Tensor = 0
    ) -> Outcome:
        """Losses of a batch and the gradients of their sum, in one call.

        Args:
            batch: see `Handle.batch` and `Batch`.
            loss_weights: float32 `[examples]`, the factors of the losses in the sum; None: 1.
            seed: the seed of dropout.

        Raises:
            tf.errors.InvalidArgumentError: a kind, child or argument is out of range, nodes depend on each other, or a
                parameter's shape changed; names the example and the node.
        """
        tensors = self._as_batch(batch)
        run = in_parts if tf.executing_eagerly() else _at_once
        losses, outputs, gradients = run(self._forward_backward, tensors, loss_weights, seed)
        return Outcome(losses, gradients, outputs)

    def _forward_backward(self, tensors: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor) -> Parts:
        program = self._programs.of(self._training)
        with self._programs.place(program):
            return forward_backward(self._ops, self._training, self.parameters, tensors, seed, loss_weights, program)

    def forward(
        self, batch: Any, *, training: bool = False, states: bool = False, seed: int | tf.Tensor = 0
    ) -> Outcome:
        """Losses, outputs and states of a batch; `tf.GradientTape` differentiates losses and states if `training`.

        Args:
            batch: see `Handle.batch` and `Batch`.
            training: apply dropout, and keep what the gradient needs.
            states: also return the states of all nodes; the last node of an example is at
                `batch.kinds.row_limits() - 1`.
            seed: the seed of dropout.

        Raises:
            tf.errors.InvalidArgumentError: as for `forward_backward`.
        """
        tensors = self._as_batch(batch)
        spec = self._training if training else self._inference
        kind = 0 if states and spec.kinds else -1
        program = self._programs.of(spec)
        if program is None and not training:
            spec = spec.forward_only
        with self._programs.place(program):
            losses, outputs, found = forward(
                self._ops, spec, self.parameters, tensors, seed, state_of=kind, training=training, program=program
            )
        return Outcome(losses, (), outputs, found)

    def step(
        self, batch: Any, *, loss_weights: tf.Tensor | None = None, seed: int | tf.Tensor | None = None
    ) -> Outcome:
        """Train on a batch: forward, backward and update of the parameters in one call.

        Args:
            batch: see `Handle.batch` and `Batch`.
            loss_weights: float32 `[examples]`, the factors of the losses in the sum; None: 1.
            seed: the seed of dropout. None uses the step counter, so every step drops other values.

        Raises:
            DynamicError: `specialize` was given no optimizer.
            tf.errors.InvalidArgumentError: as for `forward_backward`; no parameter was written.
        """
        if self.optimizer is None:
            raise DynamicError("the net has no optimizer; pass specialize(..., optimizer=tfmem.dynamic.Adam())")
        tensors = self._as_batch(batch)
        if not tf.executing_eagerly():
            program = self._programs.of(self._training.of_step)
            losses, outputs = self._step(tensors, loss_weights, seed, program)
            return Outcome(losses, (), outputs)
        # Several ops and their Python take longer than a small batch runs on a GPU; one call of a graph does not.
        given = [part for ragged in tensors for part in (ragged.values, _long(ragged.row_splits))]
        if loss_weights is not None:
            given.append(tf.convert_to_tensor(loss_weights, tf.float32))
        if seed is not None:
            given.append(seed_of(seed))
        with self._step_lock:  # threads that share the handle take their numbers one by one
            choice = self._programs.choice(self._training.of_step)
            program = self._programs.of(self._training.of_step) if choice is None else choice.program
            traced = self._traced_step(program, loss_weights is not None, seed is not None)
            try:
                losses, *found = call_unrecorded(traced, given)
            except tf.errors.ResourceExhaustedError:
                if int(tensors.kinds.row_splits.shape[0]) < 3:  # one example
                    raise
                return self._step_in_halves(tensors, loss_weights, seed)
            if choice is not None:
                choice.ran(int(given[0].shape[0]), losses.numpy)
        return Outcome(losses, (), tuple(found))

    def _step_in_halves(self, tensors: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor | None) -> Outcome:
        """A step with a batch that memory is short for, in halves; nothing was written yet."""
        assert self.optimizer is not None
        assert self.slots is not None
        number = self.slots.steps + 1
        losses, outputs, gradients = in_halves(
            self._forward_backward, tensors, loss_weights, number if seed is None else seed
        )
        apply(self.optimizer, number, self.parameters, self.slots.in_order, gradients)
        self.slots.steps.assign(number)
        return Outcome(losses, (), outputs)

    def _traced_step(
        self, program: DynamicProgram | None, has_weights: bool, has_seed: bool
    ) -> tf.types.experimental.ConcreteFunction:
        """A step as a graph of flat tensors: values and splits, weights if it has some, a seed if it has one."""
        key = self._training.text, 0 if program is None else program.rows, has_weights, has_seed
        with self._lock:
            if key not in self._traced:
                signature = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int64)] * 3
                signature += [tf.TensorSpec([None], tf.float32)] * has_weights + [
                    tf.TensorSpec([], tf.int64)
                ] * has_seed
                self._traced[key] = with_early_results(
                    tf.function(
                        lambda *given: self._flat_step(given, program, has_weights, has_seed), input_signature=signature
                    ).get_concrete_function()
                )
            return self._traced[key]

    def _flat_step(
        self, given: tuple[tf.Tensor, ...], program: DynamicProgram | None, has_weights: bool, has_seed: bool
    ) -> tuple[tf.Tensor, ...]:
        parts = (tf.RaggedTensor.from_row_splits(*given[i : i + 2], validate=False) for i in (0, 2, 4))
        losses, outputs = self._step(
            Batch(*parts), given[6] if has_weights else None, given[-1] if has_seed else None, program
        )
        return losses, *outputs

    def _step(
        self,
        tensors: Batch,
        loss_weights: tf.Tensor | None,
        seed: int | tf.Tensor | None,
        program: DynamicProgram | None,
    ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        assert self.optimizer is not None
        assert self.slots is not None
        with tf.device("/CPU:0"):
            number = self.slots.steps + 1
            rates = self.optimizer.rates(number)
        with self._programs.place(program):
            losses, outputs, done = step(
                self._ops,
                self._training.of_step,
                (*self.parameters, *self.slots.in_order),
                tensors,
                number if seed is None else seed,
                loss_weights,
                self.optimizer.rule,
                rates,
                number,
                program,
            )
        with tf.device("/CPU:0"):
            self.slots.steps.assign(done)
        return losses, outputs


class _Traced(dict[tuple[str, int, bool, bool], Any]):
    """Steps as concrete functions; TensorFlow would take a plain `dict` for a part of a checkpoint."""


def _at_once(run: Run, batch: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor) -> Parts:
    return run(batch, loss_weights, seed)


def _long(splits: tf.Tensor) -> tf.Tensor:
    return splits if splits.dtype == tf.int64 else tf.cast(splits, tf.int64)


def _are_roots(example: Any) -> bool:
    return isinstance(example, list) and bool(example) and isinstance(example[0], Node)
