"""Functions of a worker outside of a run: declarations, certificates of invariance, and attention inside a model."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from attnbench.checking.tolerance import Tolerance
from attnbench.contract import loading
from attnbench.devices import device, environment
from attnbench.invariance.laws import Subject, tried
from attnbench.invariance.records import Certificate
from attnbench.models import in_model, steps
from attnbench.models.records import Judged, ModelBuilt, ModelSpec, StepTime
from attnbench.plugins import name_of
from attnbench.processes.messages import Declared, Failed
from attnbench.processes.worker import attempts
from attnbench.workloads.workload import Workload

OnStep = Callable[[], object]  # announces a step


def call(function: str, on_step: OnStep, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of any function
    """Call one of FUNCTIONS; an exception of foreign code becomes the reply."""
    warnings.filterwarnings("ignore", module="transformers")
    on_step()
    try:
        return FUNCTIONS[function](on_step, **arguments)
    except Exception as error:  # noqa: BLE001 - foreign code
        status, message = attempts.describe(error)
        return Failed(status=status, message=str(error) if isinstance(error, ValueError) else message)


def declared(on_step: OnStep, spec: str) -> Declared:  # noqa: ARG001 - the signature of these functions
    """The built-in axes of an implementation, or why it cannot be loaded."""
    try:
        return Declared(built_in=dict(loading.implementation(spec).built_in()))
    except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
        return Declared(problem=str(attempts.load_error(spec, error)))


def certified(on_step: OnStep, workload: Workload, spec: str, seed: int) -> Certificate:
    """Test every law of invariance."""
    torch.set_num_threads(workload.num_threads or environment.usable_cores())
    torch.set_float32_matmul_precision(workload.float32_matmul_precision)
    device(workload.device).select()
    laws = []
    for law in tried(Subject(loading.implementation(spec), workload, seed)):
        laws.append(law)
        on_step()
    return Certificate(implementation=name_of(spec), workload=workload, seed=seed, laws=tuple(laws))


@cache
def _model(spec: ModelSpec) -> tuple[in_model.Model, dict[str, dict[str, Tolerance]]]:
    model = in_model.load(spec)
    return model, in_model.expect(model)


def built(on_step: OnStep, model: ModelSpec) -> ModelBuilt:  # noqa: ARG001 - the signature of these functions
    """Build a model of the package transformers."""
    return _model(model)[0].built


def judged(on_step: OnStep, model: ModelSpec, attention: str) -> Judged:
    """Check one attention in a model."""
    loaded = _model(model)
    on_step()
    return in_model.judge(*loaded, attention)


def timed(on_step: OnStep, model: ModelSpec, attentions: tuple[str, ...], budget_s: float) -> tuple[StepTime, ...]:
    """Time a step of a model with each attention, in about `budget_s` seconds."""
    loaded: tuple[in_model.Model, Any] = _model(model)
    on_step()
    return tuple(steps.time_steps(loaded[0], attentions, budget_s))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function for function in (declared, certified, built, judged, timed)
}
