"""An operator call with CUDA tensors: checks the arguments, allocates the results, and enqueues it on the current stream."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torch_memory_saver._simulate.operators import native, results, table
from torch_memory_saver._simulate.operators.determinism import alert_of, refuse
from torch_memory_saver._simulate.operators.devices import (
    COPIES_NUMBERS,
    check_arguments,
    masks_in,
    mismatch,
    numbers_copied,
)
from torch_memory_saver._simulate.operators.refusals import tensors_in, wait_of
from torch_memory_saver._simulate.operators.results import DependsOnValues, Doubted, Refused, Result
from torch_memory_saver._simulate.operators.start import ensure_started
from torch_memory_saver._simulate.operators.wire import Fresh, Operation, Place, Settings, Shape, Value, decode

__all__ = ["Call", "copy_bytes", "kernel_of"]

#: Dispatches to PyTorch's own implementation of a replaced operator. PyTorch has one function for the CPU and CUDA, which
#: checks the device of the tensors. The CPU's dispatch key is not replaced and reaches this function.
_ORIGINAL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Call:
    """The arguments of one call in the form sent to the device process, and the memory that the call accesses."""

    def __init__(self, operator: str = "", *, host_tensors: bool = False, compares: bool = False) -> None:
        self.shapes: list[Shape] = []
        self.operands: list[native.Operand] = []
        self.draw: native.Draw | None = None  # if the operator gets a random seed
        self.device: torch.device | None = None
        self._operator = operator
        self._host_tensors = host_tensors  # whether arguments may be host tensors
        self._compares = compares  # whether they may not even be host tensors without dimensions

    def take(self, value: Any, written: bool = False, name: str = "") -> Any:
        """Return the argument, of this name, with its tensors replaced by Place or Value.

        Raises:
            RuntimeError: The tensors are on different devices.
        """
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, written, name)
        if isinstance(value, (list, tuple)):
            return [self.take(each, written, name) for each in value]
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, torch.device):
            self._create_on(value)
            return torch.device("cpu")
        return value

    def _create_on(self, device: torch.device) -> None:
        """Set the device of the results if no tensor has set it."""
        if self.device is None and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.device = torch.device("cuda", index)

    def _take_tensor(self, tensor: torch.Tensor, written: bool, name: str) -> Any:
        if tensor.device.type == "cpu" and not written and self._may_be_of_the_host(tensor):
            return Value(tensor.tolist(), tensor.dtype)
        if self.device is None:
            self.device = tensor.device
        elif tensor.device != self.device:
            raise mismatch(self._operator, name, tensor, self.device, written=written, compares=self._compares)
        return Place(self.add(tensor, written))

    def _may_be_of_the_host(self, tensor: torch.Tensor) -> bool:
        return self._host_tensors or (tensor.dim() == 0 and not self._compares)

    def add(self, tensor: torch.Tensor, written: bool) -> int:
        """Add a device tensor to the request. Return its index in the list of tensors."""
        storage = tensor.untyped_storage()
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        self.shapes.append(
            Shape(
                storage.data_ptr(),
                storage.nbytes(),
                tensor.storage_offset(),
                tensor.dtype,
                size,
                stride,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        )
        if 0 not in size:
            address = storage.data_ptr() + tensor.storage_offset() * tensor.itemsize
            self.operands.append((address, _reach(size, stride) * tensor.itemsize, int(written)))
        return len(self.shapes) - 1

    def draw_seed(self, generator: torch.Generator | None) -> None:
        """Give the operator a random seed from PyTorch's generator, by default that of the device."""
        self.draw = _draw(self.device or torch.device("cuda", torch.cuda.current_device()), generator)

    def use_blas_workspace(self) -> None:
        """Add PyTorch's workspace of cuBLAS for this thread and the current stream to the memory that the call accesses.
        PyTorch allocates it at the first use.

        Raises:
            torch.OutOfMemoryError: The device has no memory for it.
        """
        if self.device is None or not self.operands:
            return
        before = torch.cuda._exchange_device(self.device.index)
        try:
            # A thread of autograd may not have launched a kernel yet. PyTorch would warn that it has no context.
            native.make_current(self.device.index)
            workspace = native.blas_workspace(torch._C._cuda_getCurrentBlasHandle())
        finally:
            torch.cuda._maybe_exchange_device(before)
        if workspace[1]:
            self.operands.append(workspace)

    def run(self, operation: Operation) -> None:
        """Enqueue the operation on the current stream of the tensors' device.

        Raises:
            RuntimeError: CUDA refuses the operation.
        """
        self._submit(lambda stream: (native.run(stream, operation.name, operation.pack(), self.operands, self.draw), b""))

    def ask(self, operation: Operation) -> Any:
        """Enqueue the operation and wait for the answer, which is returned.

        Raises:
            RuntimeError: CUDA refuses the operation.
            Exception: The operator raised it.
        """
        answer = decode(
            self._submit(lambda stream: native.ask(stream, operation.name, operation.pack(), self.operands, self.draw))
        )
        if isinstance(answer[0], type):
            raise answer[0](answer[1])
        return answer

    def _submit(self, submit: Callable[[int], tuple[native.CUresult, bytes]]) -> bytes:
        ensure_started()
        index = self.device.index if self.device is not None else torch.cuda.current_device()
        before = torch.cuda._exchange_device(index)
        try:
            result, answer = submit(torch._C._cuda_getCurrentRawStream(index))
            if result != 0:
                raise_error(result)
            return answer
        finally:
            torch.cuda._maybe_exchange_device(before)


def raise_error(result: native.CUresult) -> None:
    """Raise the exception that PyTorch raises for a CUDA error."""
    torch.cuda.current_stream().synchronize()  # raises a pending error with PyTorch's message
    raise RuntimeError(f"CUDA error {result}: the operator could not be enqueued")


def settings() -> Settings:
    return Settings(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())


class _Schema:
    """The properties of an operator's schema that a call uses."""

    def __init__(self, operator: Any) -> None:
        arguments = operator._schema.arguments
        self.name: str = operator.name()
        self.names = [each.name for each in arguments]
        self.written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
        self.writes = dict(zip(self.names, self.written, strict=True))
        #: Whether the operator takes no Python numbers for tensors. A number in place of a tensor was then a tensor that
        #: PyTorch has unwrapped.
        self.wraps_numbers = not torch._C._should_allow_numbers_as_tensors(self.name.partition("::")[2].partition(".")[0])
        self.tensors = [isinstance(each.type, torch.TensorType) for each in arguments]
        self.is_out = any(each.is_out for each in arguments)
        #: For each returned value: the name of the argument that it aliases, or None for a new value.
        self.returned = [self._argument_of(each, arguments) for each in operator._schema.returns]
        self.random = torch.Tag.nondeterministic_seeded in operator.tags or "generator" in self.names
        self.host_tensors = self.name.partition(".")[0] in table.TAKES_HOST_TENSORS
        self.packet = operator._schema.name.removeprefix("aten::")
        #: Whether the operator's arguments may not even be host tensors without dimensions.
        self.compares = not self.host_tensors and not table.takes_host_numbers(operator)
        self.copies_numbers = self.packet in COPIES_NUMBERS
        #: Whether some arguments must be on the device even if others may be on the host.
        self.checks_devices = not {"index", "mask", "values"}.isdisjoint(self.names)
        self.uses_blas = self.packet in table.USES_CUBLAS
        self.dynamic = torch.Tag.dynamic_output_shape in operator.tags
        self.wait = wait_of(operator)
        self.alert = alert_of(operator)

    def call(self) -> Call:
        return Call(self.packet, host_tensors=self.host_tensors, compares=self.compares)

    @staticmethod
    def _argument_of(value: Any, arguments: Any) -> str | None:
        if value.alias_info is None:
            return None
        aliases = value.alias_info.before_set
        given = [each for each in arguments if each.alias_info is not None and each.alias_info.before_set == aliases]
        return str(given[0].name)


def kernel_of(operator: Any) -> Callable[..., Any]:
    """Return the function to register as the CUDA implementation of the operator."""
    schema = _Schema(operator)
    infers = schema.is_out or None in schema.returned

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        if schema.wraps_numbers:
            arguments = tuple([_wrap(schema, place, value, arguments) for place, value in enumerate(arguments)])
        given = dict(zip(schema.names, arguments, strict=False)) | keywords
        if schema.checks_devices:
            check_arguments(schema.packet, given)
        if schema.copies_numbers and (copied := numbers_copied(schema.packet, given)):
            given |= copied
            arguments = tuple([copied.get(name, value) for name, value in zip(schema.names, arguments, strict=False)])
            keywords = {name: copied.get(name, value) for name, value in keywords.items()}
        if schema.alert is not None and torch.are_deterministic_algorithms_enabled() and schema.alert[1](given):
            refuse(schema.alert[0])
        if schema.wait is not None and torch.cuda.is_current_stream_capturing():
            schema.wait(given)
        if not schema.dynamic or _is_indexed_by_integers(schema, given):
            try:
                return _enqueue(schema, given, arguments, keywords, _infer(operator, infers, arguments, keywords))
            except DependsOnValues:
                pass
            except Refused as refused:
                if torch.cuda.is_current_stream_capturing():
                    if isinstance(refused, Doubted) and not refused.certain:  # it cannot be run now to find out
                        return _enqueue(schema, given, arguments, keywords, refused.returned)
                    raise refused.__cause__ or refused from None
                if isinstance(refused, Doubted) and refused.certain and schema.is_out:
                    raise refused.__cause__ or refused from None  # it may be about outputs, which _ask replaces
                # The operator itself decides, and raises its own message.
                if not isinstance(refused, Doubted):
                    return _ask(schema, given, arguments, keywords)
                answer = _ask(schema, given, arguments, keywords, refused.returned)
                refused.forget()
                return answer
        return _ask(schema, given, arguments, keywords)

    kernel.__name__ = schema.name
    return kernel


def _is_indexed_by_integers(schema: _Schema, given: dict[str, Any]) -> bool:
    """Return whether this indexes without masks. Only with masks does the shape of the result depend on values."""
    return schema.name in table.INDEXING and not masks_in(given["indices"])


def _infer(operator: Any, needed: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the result of results.infer. None if the result depends on values and is not needed. An operator that only
    writes to its arguments needs no result, but the call still checks its arguments."""
    try:
        return results.infer(operator, arguments, keywords)
    except DependsOnValues:
        if needed:
            raise
        return None


def _wrap(schema: _Schema, place: int, value: Any, arguments: tuple[Any, ...]) -> Any:
    """Convert a number in place of a tensor to a tensor whose type does not change the result's. Return other values."""
    if not schema.tensors[place] or not isinstance(value, (bool, int, float, complex)):
        return value
    exact = any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in arguments)
    return torch.tensor(value, dtype=torch.float64 if exact and isinstance(value, float) else None)


def _take(
    call: Call, schema: _Schema, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    taken = tuple([call.take(value, schema.written[at], schema.names[at]) for at, value in enumerate(arguments)])
    return taken, {each: call.take(value, schema.writes[each], each) for each, value in keywords.items()}


def _enqueue(
    schema: _Schema, given: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any], expected: Any
) -> Any:
    """Enqueue an operator whose results are known in advance. Return the results.

    Raises:
        DependsOnValues: A new result is not a tensor.
    """
    if schema.is_out:
        _resize([given[each] for each in schema.returned if each is not None], expected)
    call = schema.call()
    taken, named = _take(call, schema, arguments, keywords)
    several = isinstance(expected, list) and len(schema.returned) > 1
    values = []
    places: list[int | None] = []
    for place, argument in enumerate(schema.returned):
        if argument is not None:
            values.append(given[argument])
            places.append(None)
            continue
        made = _allocate(expected[place] if several else expected, call)
        tensors = tensors_in(made)
        if not tensors and made is not None:
            raise DependsOnValues(schema.name)
        values.append(made)
        places += [call.add(tensor, True) for tensor in tensors]
    if schema.uses_blas:
        call.use_blas_workspace()
    if schema.random:
        call.draw_seed(given.get("generator"))
    wanted = tuple(places) if any(place is not None for place in places) else ()
    call.run(Operation(schema.name, taken, named, tuple(call.shapes), wanted, schema.random, None, settings()))
    return _returned(values)


def _returned(values: list[Any]) -> Any:
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _reach(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the distance in elements from the first to the last element, both included."""
    return 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _resize(outputs: list[Any], expected: Any) -> None:
    """Resize the out= tensors to the expected sizes. Warns if a tensor was not empty, as PyTorch does."""
    wanted = expected if isinstance(expected, list) else [expected]
    if len(outputs) == 1 and isinstance(outputs[0], (list, tuple)):
        outputs = list(outputs[0])
    for tensor, result in zip(outputs, wanted, strict=False):
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) == result.size:
            continue
        if tensor.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(tensor.shape)}, which does not "
                f"match the required output shape {list(result.size)}. This behavior is deprecated, and in a future "
                "PyTorch release outputs will not be resized unless they have zero elements.",
                stacklevel=5,  # skips this function, _enqueue or _ask, the kernel and eager
            )
        tensor.resize_(result.size)
        if _reach(result.size, result.stride) <= tensor.numel():
            tensor.as_strided_(result.size, result.stride)


def _allocate(expected: Any, call: Call) -> Any:
    if isinstance(expected, Result):
        return torch.empty_strided(expected.size, expected.stride, dtype=expected.dtype, device=call.device or "cuda")
    if isinstance(expected, list):
        return tuple([_allocate(each, call) for each in expected])
    return expected


def _ask(
    schema: _Schema, given: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any], expected: Any = None
) -> Any:
    """Run an operator and wait for the description of its results. A second request copies them to device memory, where
    they have the types of the results in `expected`: an operator may be computed in a wider type than its result has."""
    call = schema.call()
    taken, named = _take(call, schema, arguments, keywords)
    if schema.is_out:  # the outputs are resized after the answer
        fresh = {each: Fresh(given[each].dtype) for each in schema.returned if each is not None}
        taken = tuple([fresh.get(schema.names[place], value) for place, value in enumerate(taken)])
        named = named | {each: value for each, value in fresh.items() if each in named}
    if schema.uses_blas:
        call.use_blas_workspace()
    if schema.random:
        call.draw_seed(given.get("generator"))
    request = Operation(schema.name, taken, named, tuple(call.shapes), None, schema.random, None, settings())
    key, described, values = call.ask(request)
    if key is None:
        return _put(values, [])
    found = [Result(shape.size, shape.stride, shape.dtype) for shape in described]
    types = [each.dtype for each in _results_in(expected)] or [each.dtype for each in found]
    made = [_allocate(each._replace(dtype=dtype), call) for each, dtype in zip(found, types, strict=True)]
    if schema.is_out:
        made = [given[each] for each in schema.returned if each is not None]
        _resize(made, found)
    second = Call()
    second.device = call.device
    places = tuple([second.add(tensor, True) for tensor in made])
    second.run(Operation(schema.name, tensors=tuple(second.shapes), results=places, kept=key))
    answer = _put(values, made)
    arguments_returned = [given[each] for each in schema.returned if each is not None]
    return answer if None in schema.returned else _returned(arguments_returned)


def _results_in(expected: Any) -> list[Result]:
    if isinstance(expected, list):
        return [result for each in expected for result in _results_in(each)]
    return [expected] if isinstance(expected, Result) else []


def _put(values: Any, made: list[torch.Tensor]) -> Any:
    if isinstance(values, Place):
        return made[values.number]
    if isinstance(values, list):
        return tuple([_put(each, made) for each in values])
    return values


def copy_bytes(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Copy between devices, or copy bytes unchanged on one device, with PyTorch's own implementation."""
    torch.ops.aten.copy_.default.redispatch(_ORIGINAL, to, source, non_blocking)


@functools.cache
def _nowhere(index: int) -> torch.Tensor:
    """Return a tensor without memory on this device. Nothing reads or writes it."""
    device, size = torch.device("cuda", index), torch.int64.itemsize
    storage = torch._C._construct_storage_from_data_pointer(size, device, size)
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage)


def _draw(device: torch.device, generator: torch.Generator | None) -> native.Draw:
    """Draw from PyTorch's generator.

    PyTorch's kernel for a random number is launched and computes nothing. Its arguments are the state of the generator. So
    the generator advances, is saved, restored and replayed as in PyTorch.
    """
    before = torch.cuda._exchange_device(device.index)  # dispatch through the CPU key does not set the device
    native.begin_draw()
    try:
        torch.ops.aten.random_.default.redispatch(_ORIGINAL, _nowhere(device.index), generator=generator)
    finally:
        drawn = native.end_draw()
        torch.cuda._maybe_exchange_device(before)
    if drawn is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} draws random numbers by a kernel that the simulated GPU does not know"
        )
    return drawn
