"""A process with a small model, which publishes and adopts weights. Executes the commands on its standard input, one a line,
and answers each with `ok`, followed by what was asked for, or with the error, on a line.

make [MANAGED]             a new model, whose weights are zeros; MANAGED: in a region with shared backups
load FILE                  the weights of a file
publish NAME ID [EXTRA]    EXTRA: JSON without spaces
publish_nothing            a model without tensors
adopt NAME ID              answers: adopted, bytes, the JSON of extra, and the reason; and the number of warnings on a line
either NAME CHANGE FILE    adopts or loads the file, which also makes a change; answers as adopt, but with the number of
                           loads in place of the bytes
lack                       from here on there is no scratch memory to adopt weights with
logits                     answers: their checksum
zero                       overwrites the weights with zeros
change NAME                adds one to the first element of a parameter
pause, resume              pause answers: bytes copied, bytes unchanged
numbers                    answers: bytes of the shared objects held, bytes of them made here
verbose                    the lines of level info count as warnings as well
names, remove NAME         answers: the names; whether there was one
refuse WHAT                publishes a model with a tensor that cannot be published
save FILE SEED             makes a file for load
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from command_loop import serve
from gpu_support import checksum, core, fill_normal, saver, torch

from torch_memory_saver import node_store
from torch_memory_saver.errors import InvalidArgumentError, OutOfMemoryError

WIDTH = 512
warnings: list[str] = []


class Warnings(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


class Model(torch.nn.Module):
    """Objects, packs of small tensors, a tied weight, a tensor that ends inside a vector, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.odd = torch.nn.Parameter(torch.empty(100_003))
        self.register_buffer("scale", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.embedding(tokens))))
        return self.head(hidden * self.scale[1]) + self.odd[:1000] + self.odd[-1]


class State:
    model: Model


def make(managed: str = "") -> str:
    State.model = None  # type: ignore[assignment]
    if managed:
        with saver.region("weights", backup="shared"), torch.device("cuda"):
            State.model = Model()
    else:
        with torch.device("cuda"):
            State.model = Model()
    return zero()


def _tensors() -> list[torch.Tensor]:
    return [*State.model.parameters(), *State.model.buffers()]


def zero() -> str:
    for tensor in _tensors():
        tensor.detach().zero_()
    return ""


def save(file: str, seed: str) -> str:
    for number, tensor in enumerate(_tensors()):
        fill_normal(tensor.detach(), 100 * int(seed) + number, 0.1)
    torch.save([tensor.detach().cpu() for tensor in _tensors()], file)
    return ""


def load(file: str) -> str:
    for tensor, value in zip(_tensors(), torch.load(file), strict=True):
        tensor.detach().copy_(value)
    return ""


def logits() -> str:
    tokens = torch.arange(8, device="cuda")
    with torch.no_grad():
        return f" {checksum(State.model(tokens))}".replace(", ", ",")


def publish(name: str, identity: str, extra: str = "null") -> str:
    node_store.publish(name, State.model, identity=identity, extra=json.loads(extra))
    return ""


def publish_nothing() -> str:
    node_store.publish("nothing", {}, identity="one")
    return ""


def adopt(name: str, identity: str) -> str:
    warnings.clear()
    found = node_store.adopt(name, State.model, identity=identity)
    return " " + json.dumps([bool(found), found.bytes, found.extra, found.reason, warnings])


class Weight(torch.nn.Parameter):
    """As engines have them."""


class OtherLinear(torch.nn.Linear):
    """What a layer becomes."""


def _element() -> None:
    State.model.table["scale"] = 2


def _same() -> None:
    State.model.number, State.model.pair, State.model.later = 10**9, (1, "x"), {}


def _resize() -> None:
    State.model.odd.data = torch.zeros(5, device="cuda")


CHANGES = {
    "nothing": lambda: None,
    "same": _same,
    "tensor": lambda: State.model.odd.data.mul_(2),
    "buffer": lambda: State.model.register_buffer("scale", State.model.scale * 2, persistent=False),
    "attribute": lambda: setattr(State.model.up, "in_features", 7),
    "new": lambda: setattr(State.model.up, "table", torch.zeros(3, device="cuda")),
    "element": _element,
    "parameter": lambda: setattr(State.model.up, "bias", torch.nn.Parameter(State.model.up.bias.detach().clone())),
    "mark": lambda: setattr(State.model.up.weight, "state", object()),
    "module": lambda: setattr(State.model, "down", torch.nn.Linear(2 * WIDTH, WIDTH, device="cuda")),
    "shape": _resize,
    "half": lambda: State.model.half(),
    "eval": lambda: State.model.eval(),
    "frozen": lambda: State.model.up.requires_grad_(False),
    "hook": lambda: State.model.odd.register_hook(print),
    "more": lambda: State.model.register_buffer("more", torch.zeros(3, device="cuda")),
    "tied": lambda: setattr(State.model.down.weight, "data", State.model.up.weight.data.view(WIDTH, 2 * WIDTH)),
    "class": lambda: setattr(State.model.up, "__class__", OtherLinear),
}


def either(name: str, change: str, file: str) -> str:
    model = State.model
    model.number, model.pair, model.table = 10**9, (1, "x"), {"scale": 1}
    model.odd = Weight(model.odd.data)
    warnings.clear()
    loads = []

    def load_and_change() -> None:
        loads.append(load(file))
        CHANGES[change]()

    found = node_store.adopt_or_load(name, model, load_and_change, identity="one")
    return " " + json.dumps([found, len(loads), None, "", warnings])


def lack() -> str:
    def fill(*arguments: object) -> None:
        raise OutOfMemoryError("no scratch memory")

    node_store.contents.fill = fill  # type: ignore[assignment]
    return ""


def change(name: str) -> str:
    with torch.no_grad():
        State.model.get_parameter(name).view(-1)[0] += 1
    return ""


def pause() -> str:
    report = saver.pause("weights")
    return f" {report.copied_bytes} {report.unchanged_bytes}"


def resume() -> str:
    saver.resume("weights")
    return ""


def numbers() -> str:
    counters = core.counters()
    return f" {counters['shared_backup_bytes']} {counters['shared_made_bytes']}"


def verbose() -> str:
    logging.getLogger("torch_memory_saver").setLevel(logging.INFO)
    return ""


def names() -> str:
    return " " + json.dumps(node_store.names())


def remove(name: str) -> str:
    return f" {node_store.remove(name)}"


def identity(file: str, rank: str) -> str:
    return " " + node_store.identity_of([file], rank=int(rank)).replace(" ", "&")  # an argument of publish


class Subclass(torch.Tensor):
    pass


def refuse(what: str) -> str:
    tensors = {
        "cpu": torch.zeros(4),
        "meta": torch.zeros(4, device="meta"),
        "subclass": torch.zeros(4, device="cuda").as_subclass(Subclass),
        "sparse": torch.zeros(4, 4).to_sparse(),
    }
    tensors["ordinary"] = torch.zeros(4, device="cuda")
    chosen = {name: tensors[name] for name in ("ordinary", what)}
    calls = (lambda: node_store.publish("x", chosen, identity="y"), lambda: node_store.adopt("x", chosen, identity="y"))
    messages = []
    for call in calls:
        try:
            call()
        except InvalidArgumentError as error:
            messages.append(str(error))
    return " " + json.dumps(messages)


logging.getLogger("torch_memory_saver").addHandler(Warnings())
serve(
    (
        *(make, load, save, publish, publish_nothing, adopt, either, lack, logits, zero, change, pause, resume),
        *(numbers, verbose, names, remove, refuse, identity),
    )
)
