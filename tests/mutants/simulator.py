"""Bugs in the simulated GPU: operators of PyTorch as work of a stream, kernels, and NCCL."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_UNIT = "tests/unit/simulator"

_OPERATORS = (
    Mutant(
        "an-operand-that-is-read-is-written",
        "csrc/simulator/operators/operator.c",
        "operand->written != 0, context",
        "true, context",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "only-the-first-mapping-of-an-operand-is-sent",
        "csrc/simulator/operators/operator.c",
        "        at += bytes;\n",
        "        break;\n",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "a-failed-operator-is-a-success",
        "csrc/simulator/operators/operator.c",
        "return reply.status == SIM_REPLY_DONE ? CUDA_SUCCESS : CUDA_ERROR_ASSERT;",
        "return CUDA_SUCCESS;",
        (f"{_UNIT}/test_operators.c", "torch:tests/torch/test_operators_order.py"),
    ),
    Mutant(
        "a-forked-child-keeps-the-socket",
        "csrc/simulator/operators/channel.c",
        "    if (socket >= 0) close(socket);\n}\n\nstatic void watch_forks",
        "    atomic_store(&channel.socket, socket);\n}\n\nstatic void watch_forks",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "a-new-device-process-gets-no-files",
        "csrc/simulator/operators/channel.c",
        "    if (before >= 0) close(before);\n    channel.sent_count = 0;\n",
        "    if (before >= 0) close(before);\n",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "a-graph-draws-the-same-number-at-every-launch",
        "csrc/simulator/operators/operator.c",
        ".offset = offset + draw->addend",
        ".offset = draw->addend",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "a-message-about-paused-memory-names-no-operator",
        "csrc/simulator/operators/operator.c",
        "    operator->task.name = operator->name;\n",
        "",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "a-lost-device-stays-lost-for-the-next-test",
        "csrc/simulator/control/control.c",
        "        device->lost = device->primary.error = CUDA_SUCCESS;\n",
        "        device->lost = CUDA_SUCCESS;\n",
        (f"{_UNIT}/test_operators.c",),
    ),
    Mutant(
        "a-fault-that-no-program-reads-is-silent",
        "csrc/simulator/control/life.c",
        "    sim_access_end();\n",
        "",
        ("tests/unit/preload/test_memory.py::test_a_device_without_access_is_named_by_the_simulated_gpu",),
    ),
    Mutant(
        "a-later-failure-is-explained-by-an-earlier-access",
        "csrc/simulator/control/entry.c",
        "    if (result != CUDA_SUCCESS) thread->refused_access[0] = '\\0';\n",
        "",
        (f"{_UNIT}/test_operators.c",),
    ),
)

_KERNELS = (
    Mutant(
        "a-random-kernel-outside-a-draw-is-a-success",
        "csrc/simulator/runtime/kernels.c",
        "    if (!thread->draws) return CUDA_ERROR_NOT_SUPPORTED;\n",
        "",
        (f"{_UNIT}/test_kernels.c",),
    ),
    Mutant(
        "a-captured-draw-has-the-values-of-the-capture",
        "csrc/simulator/runtime/kernels.c",
        ".captured = captured}",
        ".captured = false}",
        (f"{_UNIT}/test_kernels.c",),
    ),
    Mutant(
        "an-unknown-release-of-pytorch-is-simulated",
        "torch_memory_saver/_simulate/torch_build.py",
        "    check_release(version[1])\n",
        "",
        ("tests/unit/python/simulate/test_stubs.py",),
    ),
)

_OF_CUDA = "torch_memory_saver/_simulate/operators"
_LIKE_CUDA = "torch:tests/torch/test_operators_like_cuda.py"

_REFUSALS = (
    Mutant(
        "expanded-tensors-are-rehearsed-as-whole-ones",
        f"{_OF_CUDA}/rehearsal.py",
        "[own and step for own, step in zip(value.stride(), made.stride(), strict=True)]",
        "made.stride()",
        ("torch:tests/torch/test_operators_refused.py::test_writing_to_an_expanded_tensor_is_refused_at_the_call",),
    ),
    Mutant(
        "sparse-arguments-are-not-written",
        f"{_OF_CUDA}/sparse.py",
        "                _write(given[each.name], host[each.name])\n",
        "                pass\n",
        ("torch:tests/torch/test_operators_sparse.py",),
    ),
    Mutant(
        "types-that-only-cuda-lacks-are-computed",
        f"{_OF_CUDA}/results.py",
        "    refuse_types(operator, arguments, keywords)\n",
        "",
        (f"{_LIKE_CUDA}::test_types_that_only_cuda_lacks_are_refused",),
    ),
    Mutant(
        "an-operator-that-waits-is-captured",
        f"{_OF_CUDA}/launch.py",
        "            schema.wait(given)\n",
        "            pass\n",
        (f"{_LIKE_CUDA}::test_operators_that_wait_are_not_captured",),
    ),
    Mutant(
        "values-of-an-assignment-are-taken-from-the-host",
        f"{_OF_CUDA}/devices.py",
        'given["values"].dim()',
        "False",
        (f"{_LIKE_CUDA}::test_values_of_an_assignment_are_of_the_device_or_a_number",),
    ),
    Mutant(
        "integers-divided-by-zero-fail-the-device",
        f"{_OF_CUDA}/compute.py",
        ").any():\n        return _divide(",
        ").all():\n        return _divide(",
        (f"{_LIKE_CUDA}::test_integers_divided_by_zero_are_undefined_and_no_error",),
    ),
)

_NCCL = (
    Mutant(
        "ranks-do-not-wait-for-the-shares-of-an-all-reduce",
        "csrc/simulator/nccl/collective.c",
        "        if (!await(turn, kind, offsetof(sim_nccl_seat_t, reduced), number)) return false;\n",
        "",
        (f"{_UNIT}/test_nccl.c",),
    ),
    Mutant(
        "a-mismatch-of-counts-is-not-noticed",
        "csrc/simulator/nccl/collective.c",
        " &&\n           a->count == b->count;",
        ";",
        (f"{_UNIT}/test_nccl_failures.c",),
    ),
    Mutant(
        "every-block-of-a-scatter-is-the-first",
        "csrc/simulator/nccl/collective.c",
        "sim_nccl_slot(exchange, part->peer, step->number) + rank * step->share, step->count);",
        "sim_nccl_slot(exchange, part->peer, step->number), step->count);",
        (f"{_UNIT}/test_nccl.c",),
    ),
    Mutant(
        "streams-of-a-group-do-not-wait",
        "csrc/simulator/nccl/group.c",
        "if (result == SIM_NCCL_SUCCESS) result = order_streams(comm, first, stream, false);",
        "",
        (f"{_UNIT}/test_nccl_transfers.c",),
    ),
    Mutant(
        "a-failed-group-is-submitted",
        "csrc/simulator/nccl/group.c",
        "    if (result == SIM_NCCL_SUCCESS) result = submit_all();",
        "    (void)submit_all();",
        (f"{_UNIT}/test_nccl_transfers.c",),
    ),
    Mutant(
        "a-collective-of-one-rank-waits-for-its-turn",
        "csrc/simulator/nccl/operation_calls.c",
        "    if (is_copy(comm, &part)) return sim_nccl_group_failed(sim_nccl_copy(comm, stream, &part));\n",
        "",
        (f"{_UNIT}/test_nccl.c",),
    ),
)

MUTANTS = (*_OPERATORS, *_KERNELS, *_REFUSALS, *_NCCL)
