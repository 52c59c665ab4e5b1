"""A kernel of our own, in PTX, launched through the driver: torch refuses to mix tensors of two GPUs in one kernel.

The simulated GPU does not know PTX. There one of torch's kernels does the same, with tensors that claim that all the memory
is on the GPU that the kernel runs on.
"""

from __future__ import annotations

import ctypes

from gpu_support import SIMULATED, driver, torch

#: target[i] = source[i] + 1, for 32-bit words.
PTX = rb"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry add_one(.param .u64 source, .param .u64 target, .param .u32 count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [source];
    ld.param.u64 %rd2, [target];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.u32 %r6, [%rd4];
    add.u32 %r7, %r6, 1;
    st.global.u32 [%rd5], %r7;
DONE:
    ret;
}
"""
THREADS = 256


def _check(result: int, call: str) -> None:
    assert result == 0, f"{call} failed with {result}"


def _words_at(address: int, words: int, device: int) -> torch.Tensor:
    """A tensor over memory of any GPU that torch takes for memory of `device`."""
    place = torch.device("cuda", device)
    storage = torch._C._construct_storage_from_data_pointer(address, place, 4 * words)
    return torch.empty(0, dtype=torch.int32, device=place).set_(storage, 0, (words,), (1,))


class AddOne:
    """The kernel, loaded for one device. Use it while that device is current."""

    def __init__(self, device: int) -> None:
        self.device = device
        if SIMULATED:
            return
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # the device's context is current now
            _check(driver().cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(PTX)), "cuModuleLoadData")
            _check(
                driver().cuModuleGetFunction(ctypes.byref(self._function), module, ctypes.c_char_p(b"add_one")),
                "cuModuleGetFunction",
            )

    def launch(self, source: int, target: int, words: int, stream: torch.cuda.Stream) -> None:
        """Queues the kernel on a stream of this device; `source` and `target` are addresses of any GPU."""
        if SIMULATED:
            with torch.cuda.stream(stream):
                torch.add(_words_at(source, words, self.device), 1, out=_words_at(target, words, self.device))
            return
        arguments = (ctypes.c_uint64(source), ctypes.c_uint64(target), ctypes.c_uint32(words))
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
        blocks = (words + THREADS - 1) // THREADS
        _check(
            driver().cuLaunchKernel(
                self._function,
                *map(ctypes.c_uint, (blocks, 1, 1, THREADS, 1, 1, 0)),
                ctypes.c_void_p(stream.cuda_stream),
                pointers,
                None,
            ),
            "cuLaunchKernel",
        )
