"""Replies outside of a run: declarations, certificates of invariance, attention inside a model."""

import warnings
from collections.abc import Callable

from attnbench.checking.tolerance import Tolerance
from attnbench.contract import Implementation, loading
from attnbench.invariance.laws import Subject, tried
from attnbench.invariance.records import Certificate
from attnbench.models import in_model, steps
from attnbench.models.records import StepsTimed
from attnbench.plugins import name_of
from attnbench.processes import messages
from attnbench.processes.worker import attempts


def certificate(
    request: messages.Certify, implementation: Implementation, on_step: Callable[[], object]
) -> Certificate:
    """Test every law; `on_step` is called before each."""
    subject, laws = Subject(implementation, request.workload, request.seed), []
    on_step()
    for law in tried(subject):
        laws.append(law)
        on_step()
    return Certificate(
        implementation=name_of(request.spec),
        workload=request.workload,
        seed=request.seed,
        laws=tuple(laws),
    )


class Asides:
    """Handles requests without a workload; holds one model with its expected tensors."""

    def __init__(self, on_step: Callable[[], object]) -> None:
        self.on_step = on_step
        self.model: in_model.Model | None = None
        self.expected: dict[str, dict[str, Tolerance]] = {}

    def answer(self, request: messages.Aside) -> messages.Reply:
        """Handle a request; exceptions of the model or an implementation become the reply."""
        warnings.filterwarnings("ignore", module="transformers")
        self.on_step()
        try:
            match request:
                case messages.Declare():
                    return _declared(request.spec)
                case messages.BuildModel():
                    self.model = in_model.load(request.spec)
                    self.expected = in_model.expect(self.model)
                    return self.model.built
            assert self.model is not None
            if isinstance(request, messages.JudgeAttention):
                return in_model.judge(self.model, self.expected, request.attention)
            return StepsTimed(steps=tuple(steps.time_steps(self.model, request.attentions, request.budget_s)))
        except Exception as error:  # noqa: BLE001 - foreign code
            status, message = attempts.describe(error)
            return messages.Failed(status=status, message=str(error) if isinstance(error, ValueError) else message)


def _declared(spec: str) -> messages.Declared:
    try:
        return messages.Declared(built_in=dict(loading.implementation(spec).built_in()))
    except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
        return messages.Declared(problem=str(attempts.load_error(spec, error)))
