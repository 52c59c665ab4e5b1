"""The checks of modules and optimizers.

As in operators.py, each check raises if the simulated GPU differs from the CPU, and returns the number of inputs it used.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleErrorEnum
from torch.testing._internal.common_optimizers import OptimizerErrorEnum
from torch.testing._internal.common_utils import noncontiguous_like
from torch.utils._pytree import tree_map

from pytorch_opinfo.entries import Unit
from pytorch_opinfo.operators import expect_error, gradients
from pytorch_opinfo.values import compare, moved, on_host, raised_by, tolerance

STEPS = 3


def check_module(unit: Unit, notes: list[str]) -> int:
    """Runs the unit's check in training and evaluation mode. Returns the number of inputs used."""
    if unit.check == "errors":
        return _module_errors(unit, notes)
    done = 0
    for training in (True, False):
        torch.manual_seed(0)
        arguments: dict[str, Any] = {"device": "cpu", "dtype": unit.dtype, "requires_grad": True, "training": training}
        for given in unit.info.module_inputs_func(unit.info, **arguments):
            if given.forward_input is not None:
                done += _compare_module(unit, given, training)
    return done


def _compare_module(unit: Unit, given: Any, training: bool) -> int:
    torch.manual_seed(0)
    constructor = given.constructor_input
    module = unit.info.module_cls(*constructor.args, **constructor.kwargs).to(unit.dtype).train(training)

    def produce(device: str, seed: int) -> list[Any]:
        here = copy.deepcopy(module).to(device)
        inputs = moved((given.forward_input.args, given.forward_input.kwargs), device)
        if unit.check == "noncontiguous":
            inputs = tree_map(lambda each: noncontiguous_like(each) if isinstance(each, torch.Tensor) else each, inputs)
        torch.manual_seed(seed)
        result = here(*inputs[0], **inputs[1])
        values = [] if unit.check == "backward" else on_host((result, dict(here.named_buffers())))
        return values + (gradients(result, (inputs, list(here.parameters()))) if unit.check != "forward" else [])

    if raised_by(lambda: produce("cpu", 0)) is not None:
        return 0
    compare(produce, **tolerance(unit.info, unit.dtype))
    return 1


def _module_errors(unit: Unit, notes: list[str]) -> int:
    if unit.info.module_error_inputs_func is None or unit.dtype != torch.float32:
        return 0
    done = 0
    arguments = {"device": "cuda", "dtype": unit.dtype, "requires_grad": False, "training": False}
    for wrong in unit.info.module_error_inputs_func(unit.info, **arguments):
        given = wrong.module_error_input

        def use(given: Any = given, wrong: Any = wrong) -> Any:
            constructor = given.constructor_input
            module = unit.info.module_cls(*constructor.args, **constructor.kwargs).to("cuda", unit.dtype)
            if wrong.error_on == ModuleErrorEnum.CONSTRUCTION_ERROR:
                return None
            return module(*given.forward_input.args, **given.forward_input.kwargs)

        expect_error(raised_by(use), wrong.error_type, wrong.error_regex, notes, str(wrong.error_regex))
        done += 1
    return done


def check_optimizer(unit: Unit, notes: list[str]) -> int:
    """Runs the unit's check with each implementation that PyTorch has for CUDA. Returns the number of inputs used."""
    if unit.check == "errors":
        return _optimizer_errors(unit, notes)
    done = 0
    implementations: list[dict[str, bool]] = [{"foreach": False}] if "foreach" in unit.info.supported_impls else [{}]
    implementations += [{"foreach": True}] if "foreach" in unit.info.supported_impls else []
    implementations += [{"fused": True}] if "cuda" in unit.info.supports_fused_on else []
    for given in unit.info.optim_inputs_func(device="cuda", dtype=unit.dtype):
        for implementation in implementations:
            options = moved(given.kwargs, "cpu") | implementation
            if not (options.get("capturable") and options.get("fused")):
                done += _compare_optimizer(unit, options)
    return done


def _compare_optimizer(unit: Unit, options: dict[str, Any]) -> int:
    make = functools.partial(torch.randn, dtype=torch.float32)

    def produce(device: str, seed: int) -> list[Any]:
        torch.manual_seed(3)
        values = [make(6, 5), make(4, 6)]
        if unit.info.name != "Muon":
            values.append(make(6))
        targets = [make(each.shape).to(device, unit.dtype) for each in values]
        parameters = [torch.nn.Parameter(each.to(device, unit.dtype)) for each in values]
        kept = {name: value for name, value in options.items() if name != "capturable" or device == "cuda"}
        optimizer = unit.info.optim_cls(parameters, **moved(kept, device if kept.get("capturable") else "cpu"))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.zeros((), device=device, dtype=torch.float32)
            for parameter, target in zip(parameters, targets, strict=True):
                gradient = (parameter.detach() - target) * 0.5
                parameter.grad = gradient.to_sparse() if unit.info.only_supports_sparse_grads else gradient
                loss = loss + gradient.float().square().sum()
            return loss

        for _ in range(STEPS):
            closure()
            optimizer.step(closure if unit.info.step_requires_closure else None)
        return on_host(parameters)

    if raised_by(lambda: produce("cpu", 0)) is not None:
        return 0
    compare(produce, **tolerance(unit.info, unit.dtype))
    return 1


def _optimizer_errors(unit: Unit, notes: list[str]) -> int:
    if unit.info.optim_error_inputs_func is None or unit.dtype != torch.float32:
        return 0
    done = 0
    for wrong in unit.info.optim_error_inputs_func(device="cuda", dtype=unit.dtype):
        given = wrong.optimizer_error_input

        def use(given: Any = given, wrong: Any = wrong) -> None:
            optimizer = unit.info.optim_cls(given.params, **given.kwargs)
            if wrong.error_on == OptimizerErrorEnum.STEP_ERROR:
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.rand_like(parameter)
                optimizer.step()

        expect_error(raised_by(use), wrong.error_type, wrong.error_regex, notes, str(wrong.error_regex))
        done += 1
    return done
