"""A compiled dynamic network, which makes batches and runs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from custom_ops.dynamic.codegen.gpu_program import DynamicProgram
from custom_ops.dynamic.codegen.on_chip import ChipPlan
from custom_ops.dynamic.op import forward, forward_backward, step
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import DynamicError, warn
from tfmem.api import load_ops
from tfmem.capture.early_results import call_unrecorded
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
from tfmem.dynamic.dtypes import is_updated_outside, type_of
from tfmem.dynamic.extension import Expression, node_maker
from tfmem.dynamic.families import expanded, families, member
from tfmem.dynamic.flat_steps import FlatSteps, flat_tensors
from tfmem.dynamic.gpu import Programs
from tfmem.dynamic.inputs import placed
from tfmem.dynamic.kinds import NodeKind, State, record
from tfmem.dynamic.mirrored import require_alone
from tfmem.dynamic.node_makers import NodeMaker, no_such_node
from tfmem.dynamic.optimizers import Given
from tfmem.dynamic.outcome import Outcome
from tfmem.dynamic.parts import InParts, Parts, Run, apply, in_halves, in_parts
from tfmem.dynamic.recorded import RecordedKinds
from tfmem.dynamic.recorder import parameter_of, parameters_of
from tfmem.dynamic.slots import Slots
from tfmem.options import Options

# AutoGraph would translate them where a user's `tf.function` calls a handle; methods that users call stay as they are,
# since AutoGraph fails on such a method that is an argument's default.
_untranslated = tf.autograph.experimental.do_not_convert


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
        optimizer: Given,
        options: Options,
    ) -> None:
        """Use `specialize`."""
        super().__init__()
        self.parameters = parameters
        self.optimizer = optimizer
        self._ops = load_ops().ops
        self._families = MappingProxyType(families(kinds or {}))
        self._kinds = MappingProxyType(expanded(kinds or {}))
        self._state = state
        self._recorded = None if kinds is not None else RecordedKinds(parameters)
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        for parameter in parameters:
            parameter_of(parameter)
        self._dtype = type_of(parameters)
        self._is_updated_outside = is_updated_outside(self._dtype, parameters)
        views: dict[int, int] = {}
        self._training = self._spec(views, training=True)
        # The number of each kind, of its children, and of children and arguments: all that making a node needs.
        forms = {
            name: (number, len(kind.children), len(kind.children) + len(kind.arguments))
            for number, (name, kind) in enumerate(zip(self._kinds, self._training.kinds, strict=True))
        }
        self._node = node_type(
            tuple((each.name, each.children, each.state, each.arguments) for each in self._training.kinds)
        )
        self._forms = MappingProxyType(forms)  # TensorFlow does not track this type in checkpoints
        members = {
            family: MappingProxyType({form[2]: form for form in (forms[member(family, count)] for count in counts)})
            for family, counts in self._families.items()
        }
        self._makes: Mapping[str, Any] = MappingProxyType({**forms, **members})  # as `node_maker` takes them
        self._inference = self._spec(views, training=False)
        self._programs = Programs(options, self._dtype)
        self._programs.of(self._training)
        of_keras = isinstance(optimizer, keras.optimizers.Optimizer)
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.build([variable for variable in parameters if variable.trainable])
        self.slots = None if optimizer is None or of_keras else Slots(optimizer, parameters)
        self._flat = FlatSteps(self._dtype)

    def _spec(self, views: dict[int, int], *, training: bool) -> Spec:
        given = self.parameters, self._state, views
        recorded = tuple(record(name, kind, *given, training=training) for name, kind in self._kinds.items())
        spec = Spec(parameters_of(self.parameters, views), recorded)
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
    def plan(self) -> ChipPlan | None:
        """The plan of what the GPU kernel keeps on chip; None on a CPU."""
        program = self._programs.of(self._training)
        return None if program is None else program.plan

    @property
    def choosing(self) -> bool:
        """True while eager `step` calls still time several GPU kernels, roughly the first hundred calls."""
        return self._programs.is_choosing(self._training.of_step)

    # ---- batches ----

    @cached_property  # it is called for each node of each graph, so no Python lies between the caller and C++
    def node(self) -> NodeMaker:
        """Makes a node: `handle.node("pair", left, right, label)`, of a kind, its children, then its integer arguments.

        Raises:
            DynamicError: there is no such kind, or it has another number of children or arguments.
        """
        return node_maker(self._node, self._makes, partial(no_such_node, self._makes, self._kinds, self._families))

    def number_of(self, kind: str, children: int | None = None) -> int:
        """The number of a kind in a batch of tensors; `children` where the kind has a range of them."""
        name = kind if children is None else member(kind, children)
        if name not in self._forms:
            raise DynamicError(f"there is no kind of node '{name}'; expected one of {', '.join(self._forms)}")
        return int(self._forms[name][0])

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

    @_untranslated
    def _as_batch(self, given: Any) -> Batch:
        if isinstance(given, list) and (not given or isinstance(given[0], Expression | Node) or _are_roots(given[0])):
            return self.batch(given)
        return as_batch(given)

    # ---- calls ----

    def forward_backward(
        self,
        batch: Any,
        *,
        inputs: Sequence[Any] | None = None,
        loss_weights: tf.Tensor | None = None,
        seed: int | tf.Tensor = 0,
    ) -> Outcome:
        """Losses of a batch and the gradients of their sum, in one call.

        Args:
            batch: see `Handle.batch` and `Batch`.
            inputs: the rows of each parameter that `tfmem.dynamic.inputs` made; see there.
            loss_weights: `[examples]`, the factors of the losses in the sum; None: 1.
            seed: the seed of dropout.

        Raises:
            tf.errors.InvalidArgumentError: a kind, child or argument is out of range, nodes depend on each other, or a
                parameter's shape changed; names the example and the node.
        """
        tensors = self._as_batch(batch)
        run = in_parts if tf.executing_eagerly() else _at_once
        tensors, parameters = placed(self._training, self.parameters, tensors, inputs)
        losses, outputs, gradients = run(partial(self._forward_backward, parameters), tensors, loss_weights, seed)
        return Outcome(losses, gradients, outputs)

    @_untranslated
    def _forward_backward(
        self, parameters: Sequence[Any], tensors: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor
    ) -> Parts:
        program = self._programs.of(self._training)
        with self._programs.place(program):
            return forward_backward(self._ops, self._training, parameters, tensors, seed, loss_weights, program)

    def forward(
        self,
        batch: Any,
        *,
        inputs: Sequence[Any] | None = None,
        training: bool = False,
        states: bool = False,
        seed: int | tf.Tensor = 0,
    ) -> Outcome:
        """Losses, outputs and states of a batch; `tf.GradientTape` differentiates losses and states if `training`.

        Args:
            batch: see `Handle.batch` and `Batch`.
            inputs: as for `forward_backward`; a `tf.GradientTape` goes through them.
            training: apply dropout, and keep what the gradient needs.
            states: also return the states of all nodes; the last node of an example is at
                `batch.kinds.row_limits() - 1`.
            seed: the seed of dropout.

        Raises:
            tf.errors.InvalidArgumentError: as for `forward_backward`.
        """
        tensors = self._as_batch(batch)
        spec = self._training if training else self._inference
        tensors, parameters = placed(spec, self.parameters, tensors, inputs)
        kind = 0 if states and spec.kinds else -1
        program = self._programs.of(spec)
        if program is None and not training:
            spec = spec.forward_only
        with self._programs.place(program):
            losses, outputs, found = _untranslated(forward)(
                self._ops, spec, parameters, tensors, seed, state_of=kind, training=training, program=program
            )
        return Outcome(losses, (), outputs, found)

    def step(
        self,
        batch: Any,
        *,
        inputs: Sequence[Any] | None = None,
        loss_weights: tf.Tensor | None = None,
        seed: int | tf.Tensor | None = None,
    ) -> Outcome:
        """Train on a batch: forward, backward and update of the parameters in one call.

        Args:
            batch: see `Handle.batch` and `Batch`.
            inputs: as for `forward_backward`.
            loss_weights: `[examples]`, the factors of the losses in the sum; None: 1.
            seed: the seed of dropout. None uses the step counter, so every step drops other values.

        Raises:
            DynamicError: `specialize` was given no optimizer, or the parameters are those of several replicas.
            tf.errors.InvalidArgumentError: as for `forward_backward`; no parameter was written.
        """
        if self.optimizer is None:
            raise DynamicError("the net has no optimizer; pass specialize(..., optimizer=tfmem.dynamic.Adam())")
        require_alone(self.parameters)
        if isinstance(self.optimizer, keras.optimizers.Optimizer):
            return self._step_of_keras(self.optimizer, batch, inputs, loss_weights, seed)
        tensors, parameters = placed(self._training, self.parameters, self._as_batch(batch), inputs)
        if self._is_updated_outside:
            with self._step_lock if tf.executing_eagerly() else contextlib.nullcontext():
                self._put(parameters)
                run = in_parts if tf.executing_eagerly() else _at_once
                return self._step_of_gradients(run, tensors, loss_weights, seed)
        if not tf.executing_eagerly():
            self._put(parameters)
            program = self._programs.of(self._training.of_step)
            losses, outputs = self._step(tensors, loss_weights, seed, program)
            return Outcome(losses, (), outputs)
        given = flat_tensors(tensors, loss_weights, seed, self._dtype)
        with self._step_lock:  # threads that share the handle take their numbers one by one
            choice = self._programs.choice(self._training.of_step)
            program = self._programs.of(self._training.of_step) if choice is None else choice.program
            traced = self._flat.of(self._step, self._training.text, program, loss_weights is not None, seed is not None)
            self._put(parameters)
            try:
                losses, *found = call_unrecorded(traced, given)
            except tf.errors.ResourceExhaustedError:
                if int(tensors.kinds.row_splits.shape[0]) < 3:  # one example
                    raise
                return self._step_of_gradients(in_halves, tensors, loss_weights, seed)
            if choice is not None:
                choice.ran(int(given[0].shape[0]), losses.numpy)
        return Outcome(losses, (), tuple(found))

    def _put(self, parameters: Sequence[Any]) -> None:
        """Give the op the rows of a batch: a step reads variables alone."""
        for variable, given in zip(self.parameters, parameters, strict=True):
            if given is not variable:
                variable.assign(given)

    def _step_of_keras(
        self, optimizer: keras.optimizers.Optimizer, batch: Any, inputs: Any, loss_weights: Any, seed: Any
    ) -> Outcome:
        """A step whose update is Keras's, of trainable parameters alone."""
        number = tf.cast(optimizer.iterations, tf.int64) + 1 if seed is None else seed
        found = self.forward_backward(batch, inputs=inputs, loss_weights=loss_weights, seed=number)
        pairs = [(g, v) for g, v in zip(found.gradients, self.parameters, strict=True) if v.trainable]
        optimizer.apply_gradients(pairs)
        return replace(found, gradients=())

    def _step_of_gradients(
        self, run: InParts, tensors: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor | None
    ) -> Outcome:
        """A step whose update is made outside of the op: of a batch in halves, or of numbers that the op has not."""
        assert self.optimizer is not None
        assert self.slots is not None
        number = self.slots.steps + 1
        assert not isinstance(self.optimizer, keras.optimizers.Optimizer)
        losses, outputs, gradients = run(
            partial(self._forward_backward, self.parameters), tensors, loss_weights, number if seed is None else seed
        )
        apply(self.optimizer, number, self.parameters, self.slots.in_order, gradients)
        self.slots.steps.assign(number)
        return Outcome(losses, (), outputs)

    def _step(
        self,
        tensors: Batch,
        loss_weights: tf.Tensor | None,
        seed: int | tf.Tensor | None,
        program: DynamicProgram | None,
    ) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
        assert self.optimizer is not None
        assert not isinstance(self.optimizer, keras.optimizers.Optimizer)
        assert self.slots is not None
        with tf.device("/CPU:0"):
            number = self.slots.steps + 1
            rates = self.optimizer.rates(number, self._dtype)
        with self._programs.place(program):
            losses, outputs, done = _untranslated(step)(
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


def _at_once(run: Run, batch: Batch, loss_weights: tf.Tensor | None, seed: int | tf.Tensor) -> Parts:
    return run(batch, loss_weights, seed)


def _are_roots(example: Any) -> bool:
    return isinstance(example, list) and bool(example) and isinstance(example[0], Node)
