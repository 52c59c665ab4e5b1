"""The case in which a step is replayed as a CUDA graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .figures import AT_MOST, GAIN, Row, Target
from .savers import Ours, Unavailable
from .setting import Case, Setting, Shape, WrongContents

__all__ = ["Decode"]


class _Decoder:
    """A model of small layers that decodes one token of each of a few sequences: work that takes the GPU less time than its
    launches take the host."""

    width, sequences, epsilon = 256, 4, 1e-6

    def __init__(self, torch: Any, layers: int) -> None:
        self._torch = torch
        generator = torch.Generator().manual_seed(layers)

        def numbers(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).cuda() * self.width**-0.5

        self._weights = [(numbers(self.width, self.width), numbers(self.width, self.width)) for _ in range(layers)]
        self._scale = torch.ones(self.width, device="cuda")
        self.input = numbers(self.sequences, self.width)
        self.output = torch.zeros_like(self.input)

    def step(self) -> None:
        """Computes the output from the input. Both keep their addresses."""
        x = self.input
        for up, down in self._weights:
            normed = x * self._torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * self._scale
            x = x + self._torch.relu(normed @ up) @ down
        self.output.copy_(x)


class Decode(Case):
    """All three sides run in turns. The managed graph's memory is paused and resumed before each measurement."""

    name = "decode"
    title = "a decode step of small kernels as a graph in managed memory"
    shapes = (Shape(48, 0),)
    repetitions = 21
    peer_repetitions = 0
    warm_up = 3
    #: Steps in one measurement.
    steps = 10
    fewest_layers = 2
    #: As many launches take as many milliseconds as one takes microseconds.
    shown = 1000

    def run(self, setting: Setting, shape: Shape) -> list[Row]:
        saver = setting.saver
        if not setting.allocator.caches:
            raise Unavailable("it needs PyTorch's tensors")
        assert isinstance(saver, Ours)
        torch = importlib.import_module("torch")
        reports = importlib.import_module("torch_memory_saver.layer_graphs")
        decoder = _Decoder(torch, max(self.fewest_layers, round(shape.count * setting.scale)))
        expected = self._warm_up(torch, decoder)
        managed, ordinary = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with saver.cuda_graph(managed, self.name, self._stream), reports.measure_capture(managed):
            decoder.step()
        with torch.cuda.graph(ordinary, stream=self._stream):
            decoder.step()
        sides: dict[str, Callable[[], object]] = {
            "eager": decoder.step,
            "managed": managed.replay,
            "ordinary": ordinary.replay,
        }
        times: dict[str, list[float]] = {name: [] for name in sides}
        for repetition in range(-self.warm_up, setting.repetitions):
            saver.pause(self.name)
            saver.resume(self.name)
            for name, step in sides.items():
                seconds = self._seconds(setting, decoder, step)
                if not torch.allclose(decoder.output, expected, rtol=1e-3, atol=1e-3):
                    raise WrongContents(f"{self.name}: the side {name} computed another result")
                if repetition >= 0:
                    times[name].append(seconds)
        return self._rows(setting, reports.graph_report(managed), times)

    def _warm_up(self, torch: Any, decoder: _Decoder) -> Any:
        """Runs a step on the stream of the captures, so that workspaces lie in no graph's memory. Returns its result."""
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            decoder.step()
        torch.cuda.synchronize()
        return decoder.output.clone()

    def _seconds(self, setting: Setting, decoder: _Decoder, step: Callable[[], object]) -> float:
        """The seconds of one step. The output is cleared before, so that only a step can make it right."""

        def run() -> None:
            for _ in range(self.steps):
                step()

        step()
        decoder.output.zero_()
        return setting.timed(run) / self.steps

    def _rows(self, setting: Setting, report: Any, times: dict[str, list[float]]) -> list[Row]:
        launches = report.launches
        notes = f"{report.kernels} kernels, {report.copies} copies; {report.pool_bytes} bytes in the pool"

        def of_launches(name: str) -> list[float]:
            return [seconds * self.shown / launches for seconds in times[name]]

        one_by_one = "launches one by one"
        rows: list[tuple[str, list[float], list[float], str, Target]] = [
            ("replay", times["managed"], times["eager"], one_by_one, Target(GAIN)),
            (f"{self.shown} launches", of_launches("managed"), of_launches("eager"), one_by_one, Target(GAIN)),
            ("replay, managed", times["managed"], times["ordinary"], "a graph in ordinary memory", Target(AT_MOST, 1.05)),
        ]
        return [
            setting.row(self, f"{launches} launches", operation, 0, ours, limits, limit, target, notes)
            for operation, ours, limits, limit, target in rows
        ]
