"""A call of an operator with CUDA tensors: checked, its results allocated, and enqueued on the current stream."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torch_memory_saver._simulate.operators import native, originals, results, table
from torch_memory_saver._simulate.operators.results import DependsOnValues, Doubted, Refused, Result
from torch_memory_saver._simulate.operators.start import start
from torch_memory_saver._simulate.operators.wire import Fresh, Operation, Place, Settings, Shape, Value, decode

__all__ = ["Call", "ensure_started", "kernel_of"]

_started_by = 0


def ensure_started() -> None:
    """Starts the device process, unless this process has one: a forked child has not."""
    global _started_by
    if _started_by != os.getpid():
        start()
        _started_by = os.getpid()


class Call:
    """The arguments of one call as the device process gets them, and the memory that it touches."""

    def __init__(self, host_tensors: bool = False, host_numbers: bool = True) -> None:
        self.shapes: list[Shape] = []
        self.operands: list[native.Operand] = []
        self.device: torch.device | None = None
        self._host_tensors = host_tensors  # whether tensors of the host may be among the arguments
        self._host_numbers = host_numbers  # whether those without dimensions may

    def take(self, value: Any, written: bool = False) -> Any:
        """An argument, tensors replaced."""
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, written)
        if isinstance(value, (list, tuple)):
            return [self.take(each, written) for each in value]
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, torch.device):
            self._create_on(value)
            return torch.device("cpu")
        return value

    def _create_on(self, device: torch.device) -> None:
        """Where the results of an operator without tensors lie."""
        if self.device is None and device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self.device = torch.device("cuda", index)

    def _take_tensor(self, tensor: torch.Tensor, written: bool) -> Any:
        if tensor.device.type == "cpu" and not written and self._may_be_of_the_host(tensor):
            return Value(tensor.tolist(), tensor.dtype)
        if self.device is None:
            self.device = tensor.device
        elif tensor.device != self.device:
            raise _different_devices(self.device, tensor.device)
        return Place(self.add(tensor, written))

    def _may_be_of_the_host(self, tensor: torch.Tensor) -> bool:
        return self._host_tensors or (tensor.dim() == 0 and self._host_numbers)

    def add(self, tensor: torch.Tensor, written: bool) -> int:
        """The place of a tensor of the device in the request."""
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

    def run(self, operation: Operation) -> None:
        """Enqueues it on the current stream of the tensors' device."""
        self._submit(lambda stream: (native.run(stream, operation.pack(), self.operands), b""))

    def ask(self, operation: Operation) -> Any:
        """Enqueues it, waits, and returns the answer; raises what the operator raised."""
        answer = decode(self._submit(lambda stream: native.ask(stream, operation.pack(), self.operands)))
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


def _different_devices(first: torch.device, second: torch.device) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"
    )


def raise_error(result: native.CUresult) -> None:
    """Raises what PyTorch raises for an error of CUDA."""
    torch.cuda.current_stream().synchronize()  # the error is still there, and this raises it in PyTorch's words
    raise RuntimeError(f"CUDA error {result}: the operator could not be enqueued")


def settings() -> Settings:
    return Settings(torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())


class _Schema:
    """What an operator's schema says that a call needs to know."""

    def __init__(self, operator: Any) -> None:
        arguments = operator._schema.arguments
        self.name: str = operator.name()
        self.names = [each.name for each in arguments]
        self.written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]
        self.writes = dict(zip(self.names, self.written, strict=True))
        #: Whether a Python number is no argument for a tensor of this operator's (it was one: PyTorch has unwrapped it).
        self.wraps_numbers = not torch._C._should_allow_numbers_as_tensors(self.name.partition("::")[2].partition(".")[0])
        self.tensors = [isinstance(each.type, torch.TensorType) for each in arguments]
        self.is_out = any(each.is_out for each in arguments)
        #: For each value returned: the argument that it is, or None if it is new.
        self.returned = [self._argument_of(each, arguments) for each in operator._schema.returns]
        self.random = torch.Tag.nondeterministic_seeded in operator.tags or "generator" in self.names
        self.host_tensors = self.name.partition(".")[0] in table.TAKES_HOST_TENSORS
        self.host_numbers = self.host_tensors or table.takes_host_numbers(operator)
        #: Arguments that are of the device where others may be of the host.
        self.of_the_device = [] if self.host_tensors else [each for each in self.names if each in table.NEVER_OF_THE_HOST]
        self.dynamic = torch.Tag.dynamic_output_shape in operator.tags or self.name in table.SHAPED_AS_ON_CPU

    @staticmethod
    def _argument_of(value: Any, arguments: Any) -> str | None:
        if value.alias_info is None:
            return None
        aliases = value.alias_info.before_set
        given = [each for each in arguments if each.alias_info is not None and each.alias_info.before_set == aliases]
        return str(given[0].name)


def kernel_of(operator: Any) -> Callable[..., Any]:
    """The CUDA implementation of an operator: the function to register for it."""
    schema = _Schema(operator)
    infers = schema.is_out or None in schema.returned

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        if schema.wraps_numbers:
            arguments = tuple([_wrap(schema, place, value, arguments) for place, value in enumerate(arguments)])
        given = dict(zip(schema.names, arguments, strict=False)) | keywords
        for name in schema.of_the_device:
            _check_device(given.get(name), arguments)
        if not schema.dynamic or _is_indexed_by_integers(schema, given):
            try:
                return _enqueue(schema, given, arguments, keywords, _infer(operator, infers, arguments, keywords))
            except DependsOnValues:
                pass
            except Refused as refused:
                if torch.cuda.is_current_stream_capturing():
                    raise refused.__cause__ or refused from None
                # The operator itself decides, and what it raises has its own words.
                answer = _ask(schema, given, arguments, keywords)
                if isinstance(refused, Doubted):
                    refused.forget()
                return answer
        return _ask(schema, given, arguments, keywords)

    kernel.__name__ = schema.name
    return kernel


def _check_device(value: Any, arguments: tuple[Any, ...]) -> None:
    """Refuses an index or a mask of the host."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        devices = [each.device for each in arguments if isinstance(each, torch.Tensor) and each.device.type == "cuda"]
        raise _different_devices(devices[0] if devices else torch.device("cuda"), value.device)


def _is_indexed_by_integers(schema: _Schema, given: dict[str, Any]) -> bool:
    """Only masks make the shape of what is indexed depend on values."""
    masks = (torch.bool, torch.uint8)
    return schema.name in table.INDEXING and not any(each is not None and each.dtype in masks for each in given["indices"])


def _infer(operator: Any, needed: bool, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What the operator returns. Not needed of one that only writes to its arguments, which is refused here all the same."""
    try:
        return results.infer(operator, arguments, keywords)
    except DependsOnValues:
        if needed:
            raise
        return None


def _wrap(schema: _Schema, place: int, value: Any, arguments: tuple[Any, ...]) -> Any:
    """A number where the operator takes a tensor, as a tensor that leaves the type of the result as it would be."""
    if not schema.tensors[place] or not isinstance(value, (bool, int, float, complex)):
        return value
    exact = any(isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex()) for each in arguments)
    return torch.tensor(value, dtype=torch.float64 if exact and isinstance(value, float) else None)


def _take(
    call: Call, schema: _Schema, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    taken = tuple([call.take(value, schema.written[place]) for place, value in enumerate(arguments)])
    return taken, {each: call.take(value, schema.writes[each]) for each, value in keywords.items()}


def _enqueue(
    schema: _Schema, given: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any], expected: Any
) -> Any:
    """The call of an operator of which it is known what it returns."""
    if schema.is_out:
        _resize([given[each] for each in schema.returned if each is not None], expected)
    call = Call(schema.host_tensors, schema.host_numbers)
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
        tensors = _tensors(made)
        if not tensors and made is not None:
            raise DependsOnValues(schema.name)
        values.append(made)
        places += [call.add(tensor, True) for tensor in tensors]
    seed = _seed(call, given) if schema.random else None
    wanted = tuple(places) if any(place is not None for place in places) else ()
    call.run(Operation(schema.name, taken, named, tuple(call.shapes), wanted, seed, None, settings()))
    return _returned(values)


def _returned(values: list[Any]) -> Any:
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _reach(size: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many elements lie between the first and the last."""
    return 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _resize(outputs: list[Any], expected: Any) -> None:
    """Gives the tensors of out= the sizes that they are to have."""
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
                stacklevel=5,  # past this, _enqueue or _ask, the kernel and eager
            )
        tensor.resize_(result.size)
        if _reach(result.size, result.stride) <= tensor.numel():
            tensor.as_strided_(result.size, result.stride)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, (list, tuple)) else []


def _allocate(expected: Any, call: Call) -> Any:
    if isinstance(expected, Result):
        return torch.empty_strided(expected.size, expected.stride, dtype=expected.dtype, device=call.device or "cuda")
    if isinstance(expected, list):
        return tuple([_allocate(each, call) for each in expected])
    return expected


def _ask(schema: _Schema, given: dict[str, Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Runs an operator and waits, to find out what it returns; then its results are copied to memory of the device."""
    call = Call(schema.host_tensors, schema.host_numbers)
    taken, named = _take(call, schema, arguments, keywords)
    if schema.is_out:  # they get their sizes afterwards
        fresh = {each: Fresh(given[each].dtype) for each in schema.returned if each is not None}
        taken = tuple([fresh.get(schema.names[place], value) for place, value in enumerate(taken)])
        named = named | {each: value for each, value in fresh.items() if each in named}
    seed = _seed(call, given) if schema.random else None
    request = Operation(schema.name, taken, named, tuple(call.shapes), None, seed, None, settings())
    key, described, values = call.ask(request)
    if key is None:
        return _put(values, [])
    made = [_allocate(Result(shape.size, shape.stride, shape.dtype), call) for shape in described]
    if schema.is_out:
        made = [given[each] for each in schema.returned if each is not None]
        _resize(made, [Result(shape.size, shape.stride, shape.dtype) for shape in described])
    second = Call()
    second.device = call.device
    places = tuple([second.add(tensor, True) for tensor in made])
    second.run(Operation(schema.name, tensors=tuple(second.shapes), results=places, kept=key))
    answer = _put(values, made)
    arguments_returned = [given[each] for each in schema.returned if each is not None]
    return answer if None in schema.returned else _returned(arguments_returned)


def _put(values: Any, made: list[torch.Tensor]) -> Any:
    if isinstance(values, Place):
        return made[values.number]
    if isinstance(values, list):
        return tuple([_put(each, made) for each in values])
    return values


def _seed(call: Call, given: dict[str, Any]) -> int:
    """The place of a number that PyTorch's own generator of the device makes, in the stream's order and in graphs: so the
    generator advances, is saved and restored, and is replayed as PyTorch has it."""
    seed = torch.empty(1, dtype=torch.int64, device=call.device or "cuda")
    originals.random_number(seed, given.get("generator"))
    return call.add(seed, False)
