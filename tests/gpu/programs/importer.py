"""A process that has nothing but PyTorch and imports tensors. Each line of its input is a command, and it answers with one.

take NAME HEX   unpickles a tensor (ForkingPickler's bytes)
call NAME HEX   unpickles a function and its arguments, as reduce_tensor returns them, and calls it
load NAME HEX   unpickles a list of names and tensors, and copies each into an own tensor NAME.name
read NAME       its bytes as a checksum: the number of them and the CRC-32
fill NAME N     fills it with a value
drop NAME       forgets it
is waiting      whether its stream has work that has not ended: True or False
restrict KIND   gives up a right from then on: see tests/shared/restrictions.py
"""

from __future__ import annotations

import pickle
import sys
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "shared"))
import restrictions


def main() -> None:
    held: dict[str, torch.Tensor] = {}
    torch.cuda.init()
    assert not hasattr(torch.UntypedStorage._share_cuda_, "__wrapped__"), "PyTorch without this package's hooks"
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        command, name, *rest = line.split()
        try:
            if command == "take":
                held[name] = pickle.loads(bytes.fromhex(rest[0]))
                answer = f"{held[name].dtype} {tuple(held[name].shape)} {held[name].stride()} {type(held[name]).__name__}"
            elif command == "call":
                function, arguments = pickle.loads(bytes.fromhex(rest[0]))
                held[name] = function(*arguments)
                answer = "called"
            elif command == "load":
                pairs = pickle.loads(bytes.fromhex(rest[0]))
                held |= {f"{name}.{each}": tensor.clone() for each, tensor in pairs}
                torch.cuda.synchronize()
                del pairs
                torch.cuda.ipc_collect()
                answer = f"loaded {len(held)}"
            elif command == "read":
                data = held[name].detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
                answer = f"{len(data)} {zlib.crc32(data)}"
            elif command == "fill":
                held[name].fill_(int(rest[0]))
                torch.cuda.synchronize()
                answer = "filled"
            elif command == "is":
                answer = str(not torch.cuda.current_stream().query())
            elif command == "restrict":
                restrictions.impose(name)
                answer = "restricted"
            else:
                del held[name]
                torch.cuda.ipc_collect()
                answer = "dropped"
        except Exception as error:
            answer = f"error {type(error).__name__}: {str(error).splitlines()[0]}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
