"""NCCL's functions, called directly: invalid arguments, and the effect on memory and captures.

A communicator of one rank makes the same checks as one of many. Behaviours that may leave unfinished work run in their own
process.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from nccl_library import FLOAT32, NOT_GIVEN, SUM, Library, UniqueId
from table import Observations, behaviour
from world import World

COUNT = 4


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _stream(device: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _count(count: int = COUNT) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


@behaviour
def making(world: World) -> Observations:
    library, made, identity = Library(), ctypes.c_void_p(), UniqueId()
    into = ctypes.byref(made)
    library.call("ncclGetUniqueId", ctypes.byref(identity))
    return {
        "no ranks": library.call("ncclCommInitRank", into, 0, identity, 0),
        "a rank too high": library.call("ncclCommInitRank", into, 1, identity, 1),
        "a negative rank": library.call("ncclCommInitRank", into, 1, identity, -1),
        "untouched": made.value is None,
        "a device that is not there": library.call("ncclCommInitAll", (ctypes.c_void_p * 1)(), 1, (ctypes.c_int * 1)(99)),
        "a device twice": library.call("ncclCommInitAll", (ctypes.c_void_p * 2)(), 2, (ctypes.c_int * 2)(0, 0)),
    }


@behaviour(own_process=True)
def id_without_a_place(world: World) -> Observations:
    world.start()
    return {"result": Library().call("ncclGetUniqueId", None)}


@behaviour(own_process=True)
def made_without_a_place(world: World) -> Observations:
    world.start()
    library, identity = Library(), UniqueId()
    library.call("ncclGetUniqueId", ctypes.byref(identity))
    return {"result": library.call("ncclCommInitRank", None, 1, identity, 0)}


@behaviour(own_process=True)
def made_for_no_devices(world: World) -> Observations:
    world.start()
    return {"result": Library().call("ncclCommInitAll", (ctypes.c_void_p * 1)(), 0, None)}


@behaviour
def questions(world: World) -> Observations:
    library, number = Library(), ctypes.c_int(NOT_GIVEN)
    seen: Observations = {}
    with library.communicator() as communicator:
        for name in ("ncclCommCount", "ncclCommCuDevice", "ncclCommUserRank", "ncclCommGetAsyncError"):
            seen[name] = [library.call(name, communicator, ctypes.byref(number)), number.value]
            seen[f"{name} of none"] = library.call(name, None, ctypes.byref(number))
            seen[f"{name} without a place"] = library.call(name, communicator, None)
    seen["texts"] = [library.text("ncclGetErrorString", each) for each in range(8)]
    return seen


@behaviour
def arguments(world: World) -> Observations:
    library, tensor = Library(), torch.ones(COUNT, device=world.device)
    good = (_pointer(tensor), _pointer(tensor), _count(), FLOAT32, SUM)

    def reduce(communicator: Any, *changed: Any) -> str:
        """Calls ncclAllReduce with some arguments replaced. `changed` alternates between positions and values."""
        given = list(good)
        for place, value in zip(changed[::2], changed[1::2], strict=True):
            given[place] = value
        return library.call("ncclAllReduce", *given, communicator, _stream())

    with library.communicator() as communicator:
        seen = {
            "right": reduce(communicator),
            "no communicator": reduce(None),
            "no input": reduce(communicator, 0, None),
            "no output": reduce(communicator, 1, None),
            "no elements": reduce(communicator, 2, _count(0)),
            "no elements and no buffers": reduce(communicator, 0, None, 1, None, 2, _count(0)),
            "a type that is not there": reduce(communicator, 3, 99),
            "a negative type": reduce(communicator, 3, -1),
            "an operation that is not there": reduce(communicator, 4, 99),
            "a negative operation": reduce(communicator, 4, -1),
            "a root too high": library.call("ncclBroadcast", *good[:4], 1, communicator, _stream()),
            "a negative root": library.call("ncclReduce", *good, -1, communicator, _stream()),
            "send to a rank too high": library.call("ncclSend", good[0], *good[2:4], 1, communicator, _stream()),
            "receive from a negative rank": library.call("ncclRecv", good[0], *good[2:4], -1, communicator, _stream()),
        }
        torch.cuda.synchronize()
        seen["contents"] = tensor.tolist()
    return seen


@behaviour
def groups(world: World) -> Observations:
    library, tensor = Library(), torch.ones(COUNT, device=world.device)
    other = torch.zeros(COUNT, device=world.device)
    seen: Observations = {"an end without a start": library.call("ncclGroupEnd")}
    with library.communicator() as communicator:
        seen["an empty one"] = [library.call("ncclGroupStart"), library.call("ncclGroupEnd")]
        seen["one in another"] = [library.call(f"ncclGroup{each}") for each in ("Start", "Start", "End", "End")]
        library.call("ncclGroupStart")
        sent = library.call("ncclSend", _pointer(tensor), _count(), FLOAT32, 0, communicator, _stream())
        received = library.call("ncclRecv", _pointer(other), _count(), FLOAT32, 0, communicator, _stream())
        seen["to itself"] = [sent, received, library.call("ncclGroupEnd")]
        torch.cuda.synchronize()
        seen["received"] = other.tolist()
        library.call("ncclGroupStart")
        wrong = library.call("ncclSend", _pointer(tensor), _count(), FLOAT32, 5, communicator, _stream())
        seen["an error in it"] = [wrong, library.call("ncclGroupEnd")]
        library.call("ncclGroupStart")
        seen["after the error"] = library.call("ncclGroupEnd")
    return seen


@behaviour
def parts(world: World) -> Observations:
    library, part, number = Library(), ctypes.c_void_p(), ctypes.c_int(NOT_GIVEN)
    with library.communicator() as communicator:
        none = library.call("ncclCommSplit", communicator, -1, 0, ctypes.byref(part), None)
        seen: Observations = {"of no color": [none, part.value is None]}
        seen["of a color"] = [library.call("ncclCommSplit", communicator, 3, 0, ctypes.byref(part), None), bool(part.value)]
        seen["its ranks"] = [library.call("ncclCommCount", part, ctypes.byref(number)), number.value]
        seen["its end"] = [library.call("ncclCommFinalize", part), library.call("ncclCommDestroy", part)]
        seen["a negative color"] = library.call("ncclCommSplit", communicator, -5, 0, ctypes.byref(part), None)
        seen["without a place"] = library.call("ncclCommSplit", communicator, 0, 0, None, None)
    seen["of none"] = library.call("ncclCommSplit", None, 0, 0, ctypes.byref(part), None)
    return seen


@behaviour(own_process=True)
def parts_of_negative_colors(world: World) -> Observations:
    """Only -1, NCCL_SPLIT_NOCOLOR, is no color."""
    world.start()
    library, number = Library(), ctypes.c_int(NOT_GIVEN)
    seen: Observations = {}
    with library.communicator() as communicator:
        for color in (-2, -(2**31)):
            part = ctypes.c_void_p()
            result = library.call("ncclCommSplit", communicator, color, 0, ctypes.byref(part), None)
            seen[f"{color}"] = [result, bool(part.value)]
            if part.value:
                seen[f"ranks of {color}"] = [library.call("ncclCommCount", part, ctypes.byref(number)), number.value]
                seen[f"end of {color}"] = library.call("ncclCommDestroy", part)
    return seen


@behaviour
def ends(world: World) -> Observations:
    library = Library()
    seen: Observations = {f"{name} of none": library.call(name, None) for name in ("ncclCommDestroy", "ncclCommFinalize")}
    with library.communicator() as communicator:
        seen["finalize"] = library.call("ncclCommFinalize", communicator)
        seen["finalize twice"] = library.call("ncclCommFinalize", communicator)
    return seen


@behaviour(own_process=True)
def aborting(world: World) -> Observations:
    world.start()
    library, made, identity = Library(), ctypes.c_void_p(), UniqueId()
    seen: Observations = {"of none": library.call("ncclCommAbort", None)}
    library.call("ncclGetUniqueId", ctypes.byref(identity))
    library.call("ncclCommInitRank", ctypes.byref(made), 1, identity, 0)
    seen["of one"] = library.call("ncclCommAbort", made)
    return seen


@behaviour
def operations(world: World) -> Observations:
    """Reduction operators that multiply by a scalar first."""
    library, made = Library(), ctypes.c_int(NOT_GIVEN)
    tensor, scalar = torch.ones(COUNT, device=world.device), ctypes.c_float(3.0)
    with library.communicator() as communicator:
        create = ("ncclRedOpCreatePreMulSum", ctypes.byref(made), ctypes.byref(scalar), FLOAT32)
        seen: Observations = {"made": library.call(*create, 1, communicator)}
        good = (_pointer(tensor), _pointer(tensor), _count(), FLOAT32, made)
        seen["used"] = library.call("ncclAllReduce", *good, communicator, _stream())
        torch.cuda.synchronize()
        seen["contents"] = tensor.tolist()
        seen["destroyed"] = library.call("ncclRedOpDestroy", made, communicator)
        seen["destroyed twice"] = library.call("ncclRedOpDestroy", made, communicator)
        seen["a built-in one destroyed"] = library.call("ncclRedOpDestroy", SUM, communicator)
        seen["used afterwards"] = library.call("ncclAllReduce", *good, communicator, _stream())
        seen["of a type that is not there"] = library.call(*create[:3], 99, 1, communicator)
        seen["of another residence"] = library.call(*create, 7, communicator)
    return seen


@behaviour
def memory(world: World) -> Observations:
    library, address, handle = Library(), ctypes.c_void_p(), ctypes.c_void_p()
    seen: Observations = {
        "allocated": library.call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(1000)),
        "alignment": "2 MiB" if (address.value or 1) % (2 << 20) == 0 else "less",
    }
    with library.communicator() as communicator:
        size = ctypes.c_size_t(1000)
        seen["registered"] = library.call("ncclCommRegister", communicator, address, size, ctypes.byref(handle))
        seen["deregistered"] = library.call("ncclCommDeregister", communicator, handle)
    seen["freed"] = library.call("ncclMemFree", address)
    seen["nothing freed"] = library.call("ncclMemFree", None)
    seen["without a place"] = library.call("ncclMemAlloc", None, ctypes.c_size_t(1000))
    seen["no bytes"] = library.call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(0))
    return seen


@behaviour(own_process=True)
def captured(world: World) -> Observations:
    world.start()
    library, tensor, graph = Library(), torch.ones(COUNT, device=world.device), torch.cuda.CUDAGraph()
    with library.communicator() as communicator:
        with torch.cuda.graph(graph):
            tensor.add_(1)
            result = library.call(
                "ncclAllReduce", _pointer(tensor), _pointer(tensor), _count(), FLOAT32, SUM, communicator, _stream()
            )
        before = tensor.tolist()
        graph.replay()
        graph.replay()
        seen: Observations = {"result": result, "before": before, "after two replays": tensor.tolist()}
        del graph
    return seen


@behaviour(own_process=True)
def paused(world: World) -> Observations:
    """A collective on memory that a pause has released."""
    from torch_memory_saver import torch_memory_saver

    world.start()
    library, error = Library(), ctypes.c_int(NOT_GIVEN)
    with torch_memory_saver.region(tag="paused"):
        tensor = torch.ones(COUNT, device=world.device)
    made, identity, other = ctypes.c_void_p(), UniqueId(), torch.ones(COUNT, device=world.device)
    library.call("ncclGetUniqueId", ctypes.byref(identity))
    library.call("ncclCommInitRank", ctypes.byref(made), 1, identity, 0)
    torch_memory_saver.pause("paused")
    seen: Observations = {
        "call": library.call("ncclAllReduce", _pointer(tensor), _pointer(other), _count(), FLOAT32, SUM, made, _stream())
    }
    try:
        torch.cuda.synchronize()
    except RuntimeError as problem:
        seen["synchronize"] = str(problem).splitlines()[0]
    seen["asynchronous error"] = [library.call("ncclCommGetAsyncError", made, ctypes.byref(error)), error.value]
    return seen


@behaviour(own_process=True)
def copies(world: World) -> Observations:
    """A collective of one rank is a copy: of a NULL buffer at the call, also in a group, and of nothing in place."""
    world.start()
    library, tensor = Library(), torch.ones(COUNT, device=world.device)
    other = torch.zeros(COUNT, device=world.device)
    host = (ctypes.c_float * COUNT)(*[2.0] * COUNT)
    seen: Observations = {}
    with library.communicator() as communicator:

        def reduce(source: Any, destination: Any) -> str:
            return library.call("ncclAllReduce", source, destination, _count(), FLOAT32, SUM, communicator, _stream())

        seen["no buffer at all"] = reduce(None, None)
        seen["from the host"] = reduce(host, _pointer(other))
        torch.cuda.synchronize()
        seen["contents"] = other.tolist()
        seen["to the host"] = reduce(_pointer(tensor), host)
        torch.cuda.synchronize()
        seen["host"] = list(host)
        library.call("ncclGroupStart")
        seen["in a group"] = [reduce(None, _pointer(other)), library.call("ncclGroupEnd")]
        torch.cuda.synchronize()
        seen["unchanged"] = other.tolist()
        seen["asynchronous error"] = library.call("ncclCommGetAsyncError", communicator, ctypes.byref(ctypes.c_int()))
    return seen


@behaviour(own_process=True, devices=2)
def two_devices(world: World) -> Observations:
    world.start()
    library = Library()
    tensors = [torch.full((COUNT,), float(1 + device), device=f"cuda:{device}") for device in range(2)]
    with library.pair() as communicators:

        def grouped(name: str, *arguments: Any) -> list[str]:
            results = [library.call("ncclGroupStart")]
            for device, (tensor, communicator) in enumerate(zip(tensors, communicators, strict=True)):
                with torch.cuda.device(device):
                    given = [_pointer(tensor), _pointer(tensor), *arguments, communicator, _stream(device)]
                    results.append(library.call(name, *given))
            results.append(library.call("ncclGroupEnd"))
            for device in range(2):
                torch.cuda.synchronize(device)
            return results

        seen: Observations = {"sum": grouped("ncclAllReduce", _count(), FLOAT32, SUM)}
        seen["sums"] = [each.tolist() for each in tensors]
        tensors[1].fill_(9)
        seen["broadcast"] = grouped("ncclBroadcast", _count(), FLOAT32, 1)
        seen["broadcast values"] = [each.tolist() for each in tensors]
        seen["a root too high"] = library.call(
            "ncclBroadcast", _pointer(tensors[0]), _pointer(tensors[0]), _count(), FLOAT32, 2, communicators[0], _stream()
        )
        seen["gathered"] = grouped("ncclReduceScatter", _count(COUNT // 2), FLOAT32, SUM)
        seen["parts"] = [tensor.tolist()[: COUNT // 2] for tensor in tensors]
    return seen
