"""Partial capture: the first parts of a layer are in its graphs, and the rest runs without graphs.

A method that `graph_part` decorates is a part. The layer's forward serves three ways of running it:

- Eager: a part is an ordinary method.
- Capture: the forward runs until the last part in scope has run. PartialCapture ends it there, and carries the results of
  the parts out of it: these are the outputs of the graph.
- Replay: the graph has computed the results of the parts in scope, and the forward runs with them. A part returns its result
  without running, and the code after the last part runs as usual.

Code of the forward between two parts is in the graph, and runs again after each replay for the code behind the parts. So
only cheap code belongs there. It must not draw random numbers, because they would differ from the numbers in the graph.

The way of running is a state of the thread.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.func import functional_call

from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

from .module_state import Attributes

__all__ = ["PartialCapture", "PartialResults", "Resumption", "graph_part", "run_in_scope"]

logger = logging.getLogger("torch_memory_saver")

_thread = threading.local()
_Method = TypeVar("_Method", bound=Callable[..., Any])


def graph_part(name: str) -> Callable[[_Method], _Method]:
    """Decorate a method of a module as a part.

    A part can be captured without the code that follows it in the layer's forward.

    Args:
        name: The name of the part in ``capture_layers(scope=...)``, such as "attn", "moe_router" or "moe_preprocess".
            Several methods may have the same name.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def part(*arguments: Any, **keywords: Any) -> Any:
            run: _Capture | _Replay | None = getattr(_thread, "run", None)
            call = functools.partial(method, *arguments, **keywords)
            return call() if run is None else run.part(name, call)

        return cast(_Method, part)

    return decorate


class PartialCapture(BaseException):
    """A signal that ends a layer's forward after the last part in scope.

    It is used during a capture and the runs that prepare it. It is no Exception, so that a layer's ``except Exception`` does
    not stop it.

    Attributes:
        outputs: The results of the parts.
    """

    def __init__(self, outputs: PartialResults) -> None:
        super().__init__("the parts in scope have been captured. This signal is for capture_layers(): do not catch it")
        self.outputs = outputs


class _Result(NamedTuple):
    """The return value of one part, and the attributes that it has set to tensors."""

    name: str
    value: Any
    attributes: dict[str, Any]


class PartialResults(NamedTuple):
    """The results of the parts in scope, in the order in which they ran.

    They are the outputs of a graph.
    """

    parts: tuple[_Result, ...]


def run_in_scope(
    owner: str,
    module: Any,
    scope: Collection[str] | None,
    parameters: Mapping[str, Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    is_warm_up: bool = False,
) -> Any:
    """Run a layer as it is captured, and return the outputs of its graph.

    A layer without any part runs as a whole. With ``scope=None`` every layer does.

    Args:
        owner: The layer, for messages.
        module: The layer.
        scope: The names of the parts that are captured.
        parameters: Tensors in place of the module's parameters, by name.
        arguments: Positional arguments.
        keywords: Keyword arguments.
        is_warm_up: Whether the run prepares a capture. Then attributes may be prepared, and random numbers are checked.

    Raises:
        InvalidArgumentError: The layer cannot be captured in this way. The message says why.
    """
    if scope is None:
        return functional_call(module, dict(parameters), tuple(arguments), dict(keywords))
    before, run = Attributes(module), _Capture(owner, module, frozenset(scope), is_warm_up)
    try:
        result = _with(run, lambda: functional_call(module, dict(parameters), tuple(arguments), dict(keywords)))
    except PartialCapture as signal:
        return signal.outputs
    finally:
        before.restore()
    if not run.results:
        return result
    if run.is_complete:
        raise InvalidArgumentError(
            f"{owner}: its forward has caught PartialCapture, the signal that ends a captured forward. Do not put a bare "
            "`except:` or `except BaseException:` around a part"
        )
    missing = ", ".join(sorted(frozenset(scope) - run.names))
    raise InvalidArgumentError(
        f"{owner}: its forward ended and did not call {missing}, which the scope contains. Remove the name from the scope, "
        "or call the part"
    )


def _with(run: _Capture | _Replay, forward: Callable[[], Any]) -> Any:
    outer = getattr(_thread, "run", None)
    _thread.run = run
    try:
        return forward()
    finally:
        _thread.run = outer


class _Capture:
    """One run of a forward up to the end of the captured parts."""

    def __init__(self, owner: str, module: Any, scope: frozenset[str], is_warm_up: bool) -> None:
        self._owner, self._module, self._scope, self._is_warm_up = owner, module, scope, is_warm_up
        self._is_inside = False
        self.results: list[_Result] = []
        self._random = self._random_state()

    @property
    def names(self) -> set[str]:
        return {result.name for result in self.results}

    @property
    def is_complete(self) -> bool:
        return self._scope <= self.names

    def part(self, name: str, call: Callable[[], Any]) -> Any:
        if self._is_inside:  # it belongs to the part that calls it
            return call()
        if name not in self._scope:
            missing = ", ".join(sorted(self._scope - self.names))
            raise InvalidArgumentError(
                f"{self._owner}: {name} is not in the scope, but runs before {missing}, which is in the scope. Captured "
                f"parts must run before all others. Add {name} to the scope, or remove {missing} from it"
            )
        self._check_random(name)
        before = Attributes(self._module)
        self._is_inside = True
        try:
            value = call()
        finally:
            self._is_inside = False
        changes = before.changes()
        if changes.others and not self._is_warm_up:
            path, change = next(iter(changes.others.items()))
            raise InvalidArgumentError(
                f"{self._owner}: {name} sets {path}, which {change}. A replay runs no Python code, so it would not set the "
                "attribute. Make it a tensor that the part sets or changes in place, or move the code that sets it behind "
                "the last part in scope"
            )
        self.results.append(_Result(name, value, changes.tensors))
        self._random = self._random_state()
        if self.is_complete:
            raise PartialCapture(PartialResults(tuple(self.results)))
        return value

    def _random_state(self) -> Any:
        return torch.cuda.get_rng_state() if self._is_warm_up else None

    def _check_random(self, name: str) -> None:
        """Check that no random numbers were drawn since the previous part."""
        if self._is_warm_up and not torch.equal(self._random, torch.cuda.get_rng_state()):
            raise InvalidArgumentError(
                f"{self._owner}: its forward draws random numbers before {name} and outside of a part. The graph would draw "
                "its own numbers, and the code behind the last part would get different ones. Move this code into a part"
            )


class _Replay:
    """One run of a forward in which the results of the graph take the place of the captured parts."""

    def __init__(self, owner: str, scope: frozenset[str], attributes: Attributes, results: PartialResults) -> None:
        self._owner, self._scope, self._attributes = owner, scope, attributes
        self._results = list(results.parts)
        self._next = 0

    def part(self, name: str, call: Callable[[], Any]) -> Any:
        expected = self._results[self._next].name if self._next < len(self._results) else None
        if expected is None and name not in self._scope:
            return call()
        if name != expected:
            raise InvalidStateError(
                f"{self._owner}: its forward calls {name} where {expected or 'no part in scope'} was called at the "
                "capture. A graph always runs the same parts. Make the decision behind the last part in scope, give a "
                "part that runs there a name outside the scope, or capture the layer again",
                operation="layer_graphs",
            )
        result = self._results[self._next]
        self._next += 1
        self._attributes.set(result.attributes)
        return result.value

    def check_end(self) -> None:
        if self._next < len(self._results):
            raise InvalidStateError(
                f"{self._owner}: its forward ended and did not call {self._results[self._next].name}, which was captured. "
                "A graph always runs the same parts. Make the decision behind the last part in scope, or capture the "
                "layer again",
                operation="layer_graphs",
            )


class Resumption:
    """A runner of the code that follows the captured parts of a layer."""

    def __init__(self, owner: str, module: Any, scope: Collection[str]) -> None:
        """Record the attributes of the module as it is captured."""
        self._owner, self._module, self._scope = owner, module, frozenset(scope)
        self._attributes = Attributes(module)
        self._reported: set[str] = set()

    def run(self, results: PartialResults, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the layer's result.

        Raises:
            InvalidStateError: The forward does not call the parts that were captured.
        """
        replay = _Replay(self._owner, self._scope, self._attributes, results)
        result = _with(replay, lambda: self._module(*arguments, **keywords))
        replay.check_end()
        return result

    def report_differences(self, results: PartialResults) -> None:
        """Log attributes that code outside of the parts has changed since the capture, once for each attribute."""
        by_graph = {path for part in results.parts for path in part.attributes}
        for path, change in self._attributes.different().items():
            if path not in by_graph | self._reported:
                self._reported.add(path)
                logger.warning(
                    "%s: %s %s since the capture. Captured parts still use the old value. If a part reads this attribute, "
                    "capture the layer again. (Logged once per attribute.)",
                    self._owner,
                    path,
                    change,
                )
