"""Guards operators on the simulated GPU as work of streams: when they run, what waits for them, and what does not."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import warm_programs

from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._simulate.operators.device_process import Memory

TIMEOUT_S = 120

#: The first lines of the programs below.
PRELUDE = """
import ctypes, os, sys, threading
import torch
from torch_memory_saver import torch_memory_saver as saver
simulator = ctypes.CDLL(None)
simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
def close_gate(tensor, gate):
    stream = torch.cuda.current_stream().cuda_stream
    assert simulator.tms_sim_launch_add(stream, tensor.data_ptr(), 1, 0, gate) == 0
"""


def start(program: str) -> subprocess.Popen[str]:
    text = PRELUDE + textwrap.dedent(program)
    return subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(program: str, status: int = 0) -> tuple[str, str]:
    return warm_programs.run(PRELUDE + textwrap.dedent(program), status)


@pytest.fixture
def simulator() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    address = ctypes.c_uint64
    library.tms_sim_launch_add.argtypes = (ctypes.c_void_p, address, address, ctypes.c_uint8, ctypes.c_int)
    return library


_gates = iter(range(1000, 2000))


@pytest.fixture
def close_gate(simulator: ctypes.CDLL) -> Iterator[Callable[[torch.Tensor], Callable[[], None]]]:
    """Closes the current stream, and returns what opens it."""
    closed: list[int] = []

    def close(tensor: torch.Tensor) -> Callable[[], None]:
        gate = next(_gates)
        closed.append(gate)
        stream = torch.cuda.current_stream().cuda_stream
        assert simulator.tms_sim_launch_add(stream, tensor.data_ptr(), 1, 0, gate) == 0
        return lambda: simulator.tms_sim_open_gate(gate)

    yield close
    for gate in closed:
        simulator.tms_sim_open_gate(gate)
    torch.cuda.synchronize()


def test_operators_wait_for_their_turn_and_their_callers_do_not(
    close_gate: Callable[[torch.Tensor], Callable[[], None]], simulator: ctypes.CDLL
) -> None:
    """A pause on another thread waits for all of them."""
    with saver.region(tag="queued", enable_cpu_backup=True):
        tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    open_gate = close_gate(tensor)
    for _ in range(100):
        tensor.add_(1)
    done = tensor.sum()
    assert not torch.cuda.current_stream().query()
    first = ctypes.c_float.from_address(tensor.data_ptr())
    assert first.value == 0.0
    paused = threading.Thread(target=lambda: saver.pause("queued"))
    paused.start()
    simulator.tms_sim_wait_until_synchronizing()
    assert first.value == 0.0
    open_gate()
    paused.join(TIMEOUT_S)
    assert not paused.is_alive()
    assert done.item() == 100 * (1 << 20)
    saver.resume("queued")
    assert torch.equal(tensor.cpu(), torch.full((1 << 20,), 100.0))


def test_streams_wait_for_one_another(close_gate: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    tensor, first, second = torch.zeros(1000, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        open_gate = close_gate(tensor)
        tensor.add_(1)
        event = first.record_event()
    with torch.cuda.stream(second):
        second.wait_event(event)
        tensor.mul_(10)
    torch.cuda.current_stream().wait_stream(second)
    result = tensor + 1
    independent = torch.cuda.Stream()
    with torch.cuda.stream(independent):
        other = torch.ones(3, device="cuda").sum()
        independent.synchronize()
    assert not event.query()
    open_gate()
    assert result.tolist() == [11.0] * 1000
    assert other.item() == 3.0


def test_memory_that_a_stream_uses_is_not_given_to_another(close_gate: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    side, marker = torch.cuda.Stream(), torch.zeros(1, device="cuda")
    tensor = torch.full((3 << 20,), 2.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        open_gate = close_gate(marker)
        total = tensor.sum()
    tensor.record_stream(side)
    address = tensor.data_ptr()
    del tensor
    reused = torch.zeros(3 << 20, device="cuda")
    assert reused.data_ptr() != address
    open_gate()
    side.synchronize()
    assert total.item() == 2.0 * (3 << 20)


def test_gradients_are_computed_on_two_devices_at_once() -> None:
    def learn(device: int) -> None:
        torch.manual_seed(0)
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(f"cuda:{device}")
            for _ in range(5):
                module(torch.ones(4, 8, device=f"cuda:{device}")).sum().backward()
            gradients[device] = [each.grad.cpu() for each in module.parameters() if each.grad is not None]

    gradients: dict[int, list[torch.Tensor]] = {}
    threads = [threading.Thread(target=learn, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    weights = [(each.shape, bool(each.isfinite().all())) for each in gradients[0]]
    assert weights == [(each.shape, bool(each.isfinite().all())) for each in gradients[1]]
    assert len(weights) == 4


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_graph_of_two_devices_is_differentiated() -> None:
    start = torch.ones(3, device="cuda:0", requires_grad=True)
    ((start * 2).to("cuda:1") * start.to("cuda:1")).sum().to("cuda:0").backward()
    assert start.grad is not None
    assert start.grad.tolist() == [4.0] * 3


def test_a_paused_tensor_cannot_be_computed_with() -> None:
    output, _ = run("""
        with saver.region():
            tensor = torch.ones(1 << 20, device="cuda")
        saver.pause()
        tensor.add_(1)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    """)
    assert "an illegal memory access was encountered" in output


def test_an_index_out_of_range_is_an_assertion_on_the_device() -> None:
    output, stderr = run("""
        tensor = torch.ones(3, device="cuda")
        taken = tensor[torch.tensor([7], device="cuda")]
        print("the call returns")
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    """)
    assert output.startswith("the call returns\nCUDA error: device-side assert triggered")
    assert "aten::index.Tensor failed on the device: IndexError" in stderr


def test_callers_that_keep_the_interpreter_lock_wait_for_operators() -> None:
    """An operator needs no resource of theirs. The gate is opened by a thread that needs no lock of Python's."""
    output, _ = run("""
        holding = ctypes.PyDLL(None)  # its functions are called with Python's lock held
        holding.cudaStreamSynchronize.argtypes = holding.cudaFree.argtypes = (ctypes.c_void_p,)
        tensor, pointer = torch.zeros(1000, device="cuda"), ctypes.c_void_p()
        for gate, wait in enumerate((
            lambda: holding.cudaStreamSynchronize(None),
            lambda: holding.cudaDeviceSynchronize(),
            lambda: holding.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)),
            lambda: holding.cudaFree(pointer),
        ), start=1):
            close_gate(tensor, gate)
            for _ in range(50):
                tensor.add_(1).sort()
            opener = ctypes.c_void_p()
            entry = ctypes.cast(simulator.tms_sim_open_gate, ctypes.c_void_p)
            assert simulator.pthread_create(ctypes.byref(opener), None, entry, ctypes.c_void_p(gate)) == 0
            assert wait() == 0
            assert simulator.pthread_join(opener, None) == 0
        print(tensor.sum().item())
    """)
    assert output == "200000.0\n"


def test_a_fork_computes_with_a_device_process_of_its_own() -> None:
    output, _ = run("""
        read, write = os.pipe()
        child = os.fork()
        tensor = torch.arange(5.0, device="cuda") * (2 if child else 3)
        if child == 0:
            os.write(write, str(tensor.tolist()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        print(os.read(read, 100).decode(), tensor.tolist())
    """)
    assert output == "[0.0, 3.0, 6.0, 9.0, 12.0] [0.0, 2.0, 4.0, 6.0, 8.0]\n"


def test_a_fork_may_compute_on_the_cpu_first() -> None:
    """With threads of OpenMP, which the device process of the fork does not have."""
    output, _ = run("""
        torch.set_num_threads(2)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            host = torch.ones(1 << 20)
            tensor = torch.full((1 << 20,), 2.0, device="cuda") * 3
            os.write(write, str(host.sum().item() + tensor.sum().item()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        print(os.read(read, 100).decode())
    """)
    assert output == f"{float((1 << 20) * 7)}\n"


def test_a_tensor_of_another_process_is_computed_with_on_both_sides() -> None:
    """And its memory is freed when both have released it: the device processes hold none of it."""
    run("""
        import gc, torch.multiprocessing as multiprocessing
        program = '''
        import gc
        def child(received, sent):
            tensor = received.get()
            tensor.add_(1)
            sent.put(tensor.sum().item())
            del tensor
            gc.collect()
            sent.put("release")
            received.get()
        '''
        import tempfile, textwrap
        with tempfile.TemporaryDirectory() as folder:
            open(os.path.join(folder, "ipc_child.py"), "w").write(textwrap.dedent(program))
            sys.path.insert(0, folder)
            import ipc_child
            context = multiprocessing.get_context("spawn")
            received, sent = context.Queue(), context.Queue()
            process = context.Process(target=ipc_child.child, args=(received, sent))
            process.start()
            torch.zeros(1, device="cuda")
            free = torch.cuda.mem_get_info()[0]
            tensor = torch.ones(32 << 20, dtype=torch.float32, device="cuda")
            received.put(tensor)
            assert sent.get(timeout=60) == 64 << 20
            tensor.mul_(2)
            assert tensor.sum().item() == 128 << 20
            assert sent.get(timeout=60) == "release"
            del tensor
            gc.collect()
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
            left = free - torch.cuda.mem_get_info()[0]
            received.put(None)
            process.join(60)
            assert process.exitcode == 0
            assert left < 64 << 20, left
    """)


def test_the_device_process_is_no_holder_of_exported_memory() -> None:
    """Its owner requests an exclusive lock to learn whether another process still has the memory."""
    owner = os.memfd_create("exported")
    os.truncate(owner, 4096)
    holder = os.open(f"/proc/self/fd/{owner}", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_SH)
    memory = Memory()
    memory.add_file(1, os.dup(holder))
    memory.place(0x10000, 4096, 0x10000, 4096, 1, 0)
    os.close(holder)
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ctypes.c_uint8.from_address(memory.local(0x10000)).value = 7
    assert os.pread(owner, 1, 0) == b"\x07"
    os.close(owner)


@pytest.mark.parametrize("ending", ["exit", "_exit", "kill"])
def test_the_device_process_ends_with_the_program(ending: str) -> None:
    """It is no child of the program, and leaves no zombie."""
    ends = {"exit": "sys.exit(0)", "_exit": "os._exit(0)", "kill": "os.kill(os.getpid(), 9)"}
    program = f"""
        tensor = torch.ones(3, device="cuda") + 1
        assert tensor.tolist() == [2.0] * 3
        print(os.getpid(), flush=True)
        sys.stdin.read(1)
        try:
            os.waitpid(-1, os.WNOHANG)
            print("a child", flush=True)
        except ChildProcessError:
            print("no child", flush=True)
        {ends[ending]}
    """
    with start(program) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdin.write("x")
        process.stdin.flush()
        assert process.stdout.readline() == "no child\n"
        # The device process has the program's stderr, so its end is the end of the file.
        assert process.stderr.read() == ""
    assert process.returncode == (-9 if ending == "kill" else 0)


def test_the_users_own_sitecustomize_runs(tmp_path: str) -> None:
    with open(os.path.join(tmp_path, "sitecustomize.py"), "w") as file:
        file.write("import sys\nsys.users_own = True\n")
    path = os.environ["PYTHONPATH"] + os.pathsep + str(tmp_path)
    program = "import sys, torch; print(sys.users_own, torch.arange(3, device='cuda').tolist())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == "True [0, 1, 2]\n", done.stderr


def test_requests_apply_to_a_program_that_never_uses_the_package(tmp_path: str) -> None:
    program = "import torch; torch.ones(3, device='cuda'); print(any(torch.cuda.memory._snapshot()['device_traces']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TMS_DEBUG": "history", "TMS_DEBUG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout == "True\n", done.stderr
