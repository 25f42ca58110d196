"""The functions of a worker: a process that loads torch and implementations, and caches objects that are slow to make.

The worker announces each risky step in its heartbeat, so that after a crash or a hang the coordinator knows which
implementation was running.
"""

import math
import os
import random
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnbench import plugins
from attnbench.case import (
    TORCH_DTYPES,
    Case,
    bind,
    build,
    draw_normal,
    place,
    reason_against,
)
from attnbench.checking import agreement, oracle
from attnbench.checking.calls import require_plain
from attnbench.checking.diagnosis import describe
from attnbench.checking.reference import Reference, References, keep_references, reference_for_probe
from attnbench.checking.rules import RulesAt, takes_context
from attnbench.checking.tolerance import Tolerance
from attnbench.contract import Implementation
from attnbench.contract.functions import hides_by_bias
from attnbench.contract.loading import implementation
from attnbench.devices import CaptureError, device, environment, loads, waiting
from attnbench.invariance.laws import example, tried
from attnbench.invariance.records import Certificate
from attnbench.metrics import Metric
from attnbench.models import in_model, steps
from attnbench.models.records import Judged, ModelBuilt, ModelSpec, StepTime
from attnbench.processes import messages
from attnbench.processes.messages import Declared, Failed, FailedError, Target
from attnbench.processes.remote import CandidateLostError, Candidates, Remote, TensorFile
from attnbench.processes.worker import attempts, first_calls, operators, state
from attnbench.storage.events import CeilingsMeasured, CellChecked, CellMeasured, CellProfiled, VisitFinished
from attnbench.storage.records import (
    PROBE,
    Agreement,
    Arm,
    CheckVerdict,
    DeviceState,
    Measurement,
    Sample,
    Status,
    approximation_errors,
)
from attnbench.timing import blocks
from attnbench.tracing.capture import trace
from attnbench.units import percent
from attnbench.workloads.workload import FEW_SCORES, Workload

VERIFY_PROBE, VERIFY_SEED = "needles", 1  # kind and seed of the inputs on which timed calls are verified
MOST_SERIAL = 2**20
"""For workloads with at most this many scores, the oracle uses one thread: several would mostly wait for each other."""
BROKEN = "cannot be used any more in its process, which is replaced"
"""Message about a device that no longer works in this process, for example after an access to an invalid address."""
OTHER = -0.5  # factor by which inputs are multiplied, to test whether a replay reads the new values


def replayed(case: Case) -> Callable[[], object]:
    """Record the case's call as a graph of launches, compare a replay with a call, and return the replay function.

    Raises:
        CaptureError: the call cannot be recorded, or the replay differs from the call.
        FailedError: dropout makes the results random, so that they cannot be compared.
    """
    if case.workload.dropout > 0:
        reason = "dropout draws other numbers in each replay, so replay and call cannot be compared: set dropout=0"
        raise attempts.out_of_reach(Status.unsupported, reason)
    replay = case.device.captured(case.call)
    require_replay(case, replay)
    return replay


def require_replay(case: Case, replay: Callable[[], object]) -> None:
    """Require that a replay and a call give the same results for input values other than the recorded ones.

    Raises:
        CaptureError: the results differ, because part of the call is not in the graph.
    """
    call, dtype = case.call(), TORCH_DTYPES[case.workload.dtype]
    names = [name for name in ("query", "value", "x") if name in case.tensors and case.tensors[name].dtype is dtype]
    with case.holding({name: OTHER * case.tensors[name].detach() for name in names}):
        seen = [each.detach().clone() for each in _tensors(replay())]  # replay and call may share memory
        try:
            torch.testing.assert_close(seen, [each.detach() for each in _tensors(call())], equal_nan=True)
        except AssertionError:
            raise CaptureError(
                "a replay of its CUDA graph differs from the call: some of its work is not in the graph, because it "
                "runs on the host or was done by an earlier call"
            ) from None


def _tensors(result: Any) -> list[Tensor]:  # noqa: ANN401 - a case's results: a tensor, or several, some of them None
    return [each for each in (result if isinstance(result, tuple | list) else [result]) if each is not None]


class PreparedWorkload:
    """The inputs, mask, cases and timed calls of one workload in this process."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.inputs = place(draw_normal(workload, 0), workload)
        self.mask = bind(workload)
        self.cases: dict[Arm, Case] = {}
        self.calls: dict[Arm, blocks.TimedCall] = {}
        self._reference: Reference | None = None

    def cased(self, arm: Arm, implementation: Implementation) -> Case:
        """Return the arm's case (its module, inputs and mask), built at first use."""
        if arm not in self.cases:
            self.cases[arm] = build(self.workload, implementation, self.inputs, self.mask)
        return self.cases[arm]

    def timed(self, arm: Arm, implementation: Implementation, launch: str = "eager") -> blocks.TimedCall:
        """Return the arm's timed call, which is built at first use; `launch` is the same for all calls of a process.

        Raises:
            CaptureError: the call cannot be replayed as a graph.
        """
        if arm not in self.calls:
            case = self.cased(arm, implementation)
            with case.grad_mode():
                call = replayed(case) if launch == "graph" else case.call()
            self.calls[arm] = blocks.TimedCall(arm=arm, call=call)
        return self.calls[arm]

    def reference(self, on_step: Callable[[], object] = lambda: None) -> Reference:
        """Return the right answer for input values other than the timed ones; it is computed at first use."""
        if self._reference is None:
            forward = msgspec.structs.replace(self.workload, direction="inference")
            self._reference = reference_for_probe(oracle.on_host(forward), VERIFY_PROBE, VERIFY_SEED, on_step)
        return self._reference

    def verify(self, arm: Arm, launch: str = "eager") -> str:
        """Check a timed arm on new values in the timed tensors; return the error in words, or "" if there is none.

        Raises:
            CaptureError: a replay of the arm's graph no longer matches the call.
        """
        case = self.cases[arm]
        if launch == "graph":
            with case.grad_mode():
                require_replay(case, self.calls[arm].call)
        return agreement.verify(case, self.reference())


APPROXIMATE = "it is approximate, so it is not timed: attnbench check shows its error"
NO_INFINITY = "-inf in its bias, which hides keys, gives NaN or Inf: declare a parameter mask, which hides them instead"
NO_FLOAT64 = "no float64 output is finite: with a boolean mask, `mask * finfo(float64).min` is float32, and overflows"


def beyond_bound(agreed: Agreement, most: float) -> str:
    """Describe the output's error if it exceeds the bound that an approximation declares; else return "".

    Only normally distributed inputs count. `most` is the bound as a fraction of the largest value of the output; 0: no
    bound is declared. Gradients have no bound, because the gradients of quantised operands are 0.
    """
    for where, share in approximation_errors(agreed).items() if most else ():
        if where.startswith("output") and not share <= most:
            return (
                f"Its error is {percent(share)} of the largest value in the {where}; it declares up to {percent(most)}."
            )
    return ""


def takes_infinity(candidate: Implementation) -> bool:
    """Return whether the output of a small call with -inf in its bias is finite; True if the call raises an error."""
    small = Workload(seq_len=80, num_heads=1, head_dim=8, mask="sliding_window(2)")  # whole tiles are hidden
    try:
        with torch.no_grad():
            output = build(small, candidate, place(draw_normal(small, 0), small)).output()
    except Exception:  # noqa: BLE001 - whatever the implementation raises
        return True
    return bool(output.isfinite().all())


def _prepare_device(name: str) -> Callable[[], None]:
    """Prepare a device at the first use in this process; return a function that makes it the current device."""
    place = device(name)
    if place.missing() is not None:  # the request will fail with the reason
        return lambda: None
    place.select()
    place.apply_first_use_changes()
    return place.select


def _probe(name: str, num_threads: int) -> blocks.TimedCall:
    """Return the interference probe of a device, as a timed call."""
    return blocks.TimedCall(arm=PROBE, call=device(name).interference_probe(num_threads))


@cache
def _model(spec: ModelSpec) -> tuple[in_model.Model, dict[str, dict[str, Tolerance]]]:
    """Build a model at first use; return it, and the right values and tolerances of its tensors, by batch and name."""
    warnings.filterwarnings("ignore", module="transformers")
    model = in_model.load(spec)
    return model, in_model.expect(model)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of threads inside the context; 0: keep the current number.

    Do not use it for timed calls: torch.set_num_threads has side effects even with an unchanged number. It sets MKL's
    number of threads for this thread, and turns off MKL's dynamic adjustment, which no later call turns on again.
    """
    before = torch.get_num_threads()
    if number not in {0, before}:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number not in {0, before}:
            torch.set_num_threads(before)


class Worker:
    """The state of a worker process; the coordinator calls its public methods by name.

    Between requests it keeps objects that take long to create: implementations, inputs and right answers.
    """

    def __init__(self, heartbeat: messages.Heartbeat, consult: messages.Ask | None = None) -> None:
        """Create the state of a worker; implementations are loaded when a request first needs them.

        A judge, the worker that checks answers, needs `consult`, which calls the process with the candidate (the code
        under test).
        """
        self.heartbeat, self.consult = heartbeat, consult
        self.exchange, self.candidates = TensorFile(), Candidates(self.heartbeat.beat)
        self.implementation = cache(self._load)  # by spec: imported at first use
        self.prepare_device = cache(_prepare_device)  # by device: once in this process
        self.load_error: Exception | None = None  # error of the last implementation that could not be imported
        self.kept: PreparedWorkload | None = None  # the latest prepared workload
        self.references: tuple[tuple[object, ...], References] | None = None  # latest right answers: arguments, values
        if os.environ.get(messages.KEEPS_ANSWERS):
            keep_references()
        self.rules: defaultdict[tuple[str, str], RulesAt] = defaultdict(dict)  # results of rules, by spec and device
        self.probe = cache(_probe)  # by device and number of threads
        self.metrics: dict[str, Metric] = plugins.plugs("attnbench.metrics", "METRIC")
        self.observed: tuple[tuple[str, str], Case] | None = None  # the latest case, with its workload id and spec
        self.refereed: list[agreement.Observed] = []  # prepared calls, which the coordinator will time
        self.returned: list[object] = []  # results of the calls in `refereed`
        self.screened: set[tuple[str, str]] = set()  # workload ids and specs with an output that was judged thoroughly
        self.pads: list[bytearray] = []  # unused memory that shifts later allocations
        self.guard = state.Guard()
        self.turn = PROBE  # the arm that is responsible for a failure
        self.is_altered = False  # shared state of the process was changed
        self.is_broken = False  # the process is unusable

    def answer(self, function: str, /, **arguments: Any) -> Any:  # noqa: ANN401 - their types depend on the function
        """Call the method `function`, under the settings of the workload in its arguments, if there is one.

        Returns the method's result, or Failed if the method raised an exception or changed shared state.
        """
        self.turn, self.is_altered, start = PROBE, False, time.perf_counter()
        visit: messages.SampleBlocks | None = arguments.get("visit")
        about = visit or arguments.get("cell")
        workload: Workload | None = arguments.get("workload") if about is None else about.workload
        if workload is None:
            return self._handled(function, arguments)
        if function not in {"profile", "trace", "observe"}:
            self.observed = None
        if function != "compute":
            self.candidates = Candidates(self.heartbeat.beat)
        usual = torch.get_float32_matmul_precision()
        if (precision := workload.float32_matmul_precision) != usual:
            torch.set_float32_matmul_precision(precision)
        self.prepare_device(workload.device)()
        try:
            is_few = workload.num_scores <= FEW_SCORES
            with threads((1 if is_few else workload.num_threads) if function in messages.CONSULTED else 0):
                reply = self._handled(function, arguments)
        finally:
            if precision != usual:
                torch.set_float32_matmul_precision(usual)
            if function == "judge_output" or (visit is not None and visit.settles):
                waiting.wait_for_idle_threads()
        if isinstance(reply, Failed) and visit is not None:
            self.kept = None
        if isinstance(reply, CellChecked):
            reply = msgspec.structs.replace(reply, check_s=time.perf_counter() - start)
        # a full process may keep the memory that the next request needs
        self.is_broken = self.is_altered or (isinstance(reply, Failed) and reply.is_full)
        if device(workload.device).is_broken():
            self.is_broken = True
            is_ours = function in {"check", "judge_output", "measure_ceilings"}
            arm = PROBE if is_ours else self.turn if visit is not None else arguments["cell"].arm
            # Queued work may fail after the reply, so no reply from a broken device counts. The message includes an
            # earlier failure, because a judge may have lost the candidate's process first.
            said = f"{reply.message}; " if isinstance(reply, Failed) and reply.message else ""
            reply = Failed(arm=arm, status=Status.error, message=f"{said}{workload.device} {BROKEN}")
        return reply

    def _handled(self, function: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - their types depend on the function
        """Call a method; return its result, or Failed if it raised an exception or changed shared state."""
        self.guard = state.Guard()  # a new snapshot, because the harness itself has changed settings
        try:
            reply = getattr(Worker, function)(self, **arguments)
            if not isinstance(reply, Failed):
                if function == "prepare":
                    self.guard.restored()  # a build fails only for changes that cannot be restored
                self.guard.require_unchanged()
                return reply
        except Exception as error:  # noqa: BLE001 - any exception becomes Failed
            reply = self._failure(error)
        except CandidateLostError as lost:
            reply = lost.failed
        if changed := self.guard.restored():
            self.is_altered = True
            if reply.raised != "SharedStateError":
                message = "; ".join(filter(None, (reply.message, changed)))
                reply = msgspec.structs.replace(reply, message=message)
        return reply

    def _failure(self, error: Exception) -> Failed:
        """Turn an exception of the candidate or the harness into a failure."""
        is_predicted = isinstance(error, FailedError) and error.failed.is_predicted
        if not is_predicted:
            traceback.print_exc()  # to standard error, which is the run's log
        self.is_altered |= isinstance(error, state.SharedStateError | CaptureError)  # half a graph may remain
        status, message = attempts.describe(error)
        return Failed(
            arm=self.turn,
            status=status,
            message=message,
            raised=type(error).__name__,
            said=(str(error).splitlines() or [""])[0],
            is_predicted=is_predicted,
            is_unloadable=error is self.load_error,
        )

    def _load(self, spec: str) -> Implementation:
        self.guard.require_unchanged()  # so that the import is not blamed for earlier changes
        _, arm = self.heartbeat.read()
        self.heartbeat.beat(messages.Heartbeat.LOADING)
        try:
            try:
                return implementation(spec)
            finally:
                self.guard.restored()  # an import fails only for changes that cannot be restored
                self.guard.require_unchanged()
        except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
            self.is_altered |= isinstance(error, state.SharedStateError)
            self.load_error = attempts.load_error(spec, error)
            raise self.load_error from None
        finally:
            self.heartbeat.beat(arm)

    def start(self, layout: int = 0) -> messages.Started:
        """Shift later memory allocations at random, with the seed `layout`; return the environment."""
        draws = random.Random(layout)
        self.pads = [bytearray(draws.randrange(1, 2**16)) for _ in range(64)]  # shift later allocations
        return messages.Started(environment=environment.collect())

    def declare(self, spec: str) -> Declared:
        """Return the axis values that are built into an implementation, by axis."""
        return Declared(built_in=dict(self.implementation(spec).built_in()))

    def certify(self, workload: Workload, spec: str, seed: int) -> Certificate:
        """Test every law of invariance (invariance/laws.py) at the shape of a workload.

        A function that reads pages is tested on an example batch if the workload is dense.
        """
        candidate = self.implementation(spec)
        workload = example(candidate, workload)
        laws = tried(candidate, workload, seed, self.heartbeat.beat)
        return Certificate(implementation=plugins.name_of(spec), workload=workload, seed=seed, laws=tuple(laws))

    def build_model(self, model: ModelSpec) -> ModelBuilt:
        """Build a model of the package transformers."""
        return _model(model)[0].built

    def judge_in_model(self, model: ModelSpec, attention: str) -> Judged:
        """Check one attention implementation inside a model."""
        loaded = _model(model)
        self.heartbeat.beat()
        return in_model.judge(*loaded, attention)

    def time_in_model(self, model: ModelSpec, attentions: tuple[str, ...], budget_s: float) -> tuple[StepTime, ...]:
        """Time a step of a model with each attention implementation, in about `budget_s` seconds in all."""
        loaded, _ = _model(model)
        self.heartbeat.beat()
        return tuple(steps.time_steps(loaded, attentions, budget_s))

    def profile(self, cell: Target) -> CellProfiled:
        """Profile the operators of a call."""
        found = operators.observe(self.case(cell), self.implementation(cell.spec), on_step=self.heartbeat.beat)
        return CellProfiled(**cell.names, operators=found)

    def trace(self, cell: Target, file: str) -> None:
        """Write a trace of a few steps into `file` (tracing/capture.py)."""
        trace(self.case(cell), Path(file), self.heartbeat.beat)

    def measure_ceilings(self, workload: Workload, limit_s: float) -> CeilingsMeasured:
        """Measure the highest rates of products and copies for a workload's device, dtype and number of threads.

        This takes about `limit_s` seconds.
        """
        return CeilingsMeasured(ceilings=loads.ceilings(workload, limit_s, self.heartbeat.beat))

    def prepare(self, cell: Target, limit_s: float) -> messages.Prepared | Failed:
        """Prepare a check; fail if the workload is unsupported, or a call is predicted to exceed `limit_s` seconds."""
        self.heartbeat.beat()
        candidate, workload = self.implementation(cell.spec), cell.workload
        if (reason := reason_against(candidate, workload)) is not None:
            return Failed(status=Status.unsupported, message=reason)
        if hides_by_bias(candidate, workload) and not takes_infinity(candidate):
            return Failed(status=Status.unsupported, message=NO_INFINITY)
        attempts.require_within_limit(workload, limit_s, candidate, self.heartbeat.beat)
        return messages.Prepared(
            executed_flops=candidate.executed_flops(workload),
            is_approximate=candidate.is_approximate,
            has_cache=candidate.has_cache,
            takes_context=takes_context(candidate, workload),
            most_error=candidate.most_error,
        )

    def compute(self, cell: Target, request: messages.Call | messages.Backward) -> messages.Tensors | Failed:
        """Make a call of the implementation for the judge, or compute the gradients of an earlier call."""
        self.heartbeat.beat()
        candidate = self.implementation(cell.spec)
        try:
            return self.candidates.answer(request, candidate, cell.workload)
        except RuntimeError as error:
            if not (refused := operators.refusal(cell.workload, candidate, error)):
                raise
            return msgspec.structs.replace(self._failure(error), status=Status.fallback, message=refused)

    def check(  # noqa: PLR0913 - what is checked, and how far
        self,
        cell: Target,
        limit_s: float,
        seed: int,
        *,
        is_brief: bool = False,
        turn: int | None = None,
        rejects: tuple[str, ...] = (),
    ) -> CellChecked | Failed:
        """Check whether the implementation is right. Another process, which has loaded it, makes all calls.

        The predicted time of a call is limited to `limit_s` seconds. If `is_brief` is set, only one kind of input is
        compared, and no rule (test of one property of attention) is tried. This is enough if the implementation has
        fully passed on a workload of the same kind. For `turn` see References, and for `rejects` see Plan.
        """
        assert self.consult is not None
        prepared = self.consult("prepare", messages.Prepared, cell=cell, limit_s=limit_s)
        if isinstance(prepared, Failed):
            return prepared
        candidate = Remote(self.consult, cell, prepared)
        answers = self.known_answers(cell.workload, seed, is_brief=is_brief, turn=turn)
        with threads(1):  # otherwise idle threads of one process spin while the other process computes
            agreed = agreement.check(answers, candidate, self.rules[cell.spec, cell.workload.device], rejects)
        if candidate.is_approximate and (beyond := beyond_bound(agreed, prepared.most_error)):
            agreed = msgspec.structs.replace(agreed, diagnosis=beyond)
        elif candidate.is_approximate and agreed.probes:
            return CellChecked(**cell.names, status=Status.approximate, message=APPROXIMATE, agreement=agreed)
        errors = [each.error for _, each in agreed.tensors() if each.tensor == "output"]
        if cell.workload.dtype == "float64" and errors and set(errors) == {None}:  # no output was finite
            return CellChecked(**cell.names, status=Status.unsupported, message=NO_FLOAT64)
        return CellChecked(
            **cell.names,
            status=Status.disagrees if agreed.grade is CheckVerdict.wrong else Status.ok,
            message=agreed.diagnosis or ("" if agreed.grade is CheckVerdict.right else describe(agreed)),
            agreement=agreed,
            executed_flops=prepared.executed_flops,
        )

    def known_answers(self, workload: Workload, seed: int, *, is_brief: bool, turn: int | None) -> References:
        """Return the oracle's answers for a check; the latest answers are cached."""
        beat, question = self.heartbeat.beat, (workload, seed, is_brief, turn)
        beat()
        if self.references is None or self.references[0] != question:
            self.references = None  # free its memory
            with threads(1 if workload.num_scores <= MOST_SERIAL else 0):
                answers = References(workload, seed, beat, is_brief=is_brief, turn=turn, is_apart=True)
            self.references = question, answers
            beat()
        return self.references[1]

    def forget_code(self) -> None:
        """Forget the results of rules and of earlier judgements, because the code under test has changed."""
        self.rules.clear()
        self.screened.clear()

    def prepare_calls(self, cell: Target, num_calls: int, seed: int) -> None:
        """Prepare calls that the coordinator times, each on its own inputs from `seed` (checking/agreement.py)."""
        self.turn = cell.arm
        self.heartbeat.beat()
        bench = self.bench(cell.workload)
        case = bench.cased(cell.arm, self.implementation(cell.spec))
        self.returned = []
        with case.grad_mode():
            call, start = case.call(), time.perf_counter()
            while time.perf_counter() - start < blocks.WARM_S:
                call()
            self.refereed = agreement.ready(case, bench.inputs, num_calls, seed)  # last, so no warm-up sees them

    def make_calls(self, cell: Target) -> None:
        """Make the prepared calls, and keep their results."""
        self.turn = cell.arm
        with torch.set_grad_enabled(cell.workload.direction != "inference"):
            for call, _ in self.refereed:
                self.returned.append(call())
        device(cell.workload.device).synchronize()

    def hand_in(self, cell: Target, numbers: Sequence[int]) -> messages.HandedIn:
        """Send the results of the calls `numbers` to the judge, or none if dropout makes them random; drop the rest."""
        self.turn, tensors = cell.arm, {number: dict[str, Tensor]() for number in numbers}
        if type(self.returned) is not list:
            raise state.SharedStateError("it changed the list of its own results")
        for number in numbers if cell.workload.dropout == 0 else ():
            for each in _tensors(self.returned[number]):
                require_plain("output", each)  # first, because a tensor subclass may run code when it is read
            for name, tensor in self.refereed[number][1](self.returned[number]).items():
                if tensor is not None:
                    require_plain(name, tensor)
                    tensors[number][name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.refereed, self.returned = [], []
        places = dict(zip(tensors, self.exchange.send(*tensors.values()), strict=True))
        return messages.HandedIn(exchange=self.exchange.path, tensors=places)

    def judge_output(
        self, cell: Target, handed: messages.HandedIn, seed: int, numbers: Sequence[int], row_seed: int
    ) -> Failed | None:
        """Judge results that another process has sent, in rows drawn from `row_seed`; return Failed if one is wrong."""
        workload, key = oracle.on_host(cell.workload), (cell.workload.id, cell.spec)
        inputs, exchange = draw_normal(workload, 0), TensorFile(handed.exchange)
        for number in numbers if workload.dropout == 0 else ():
            self.heartbeat.beat()
            wrong = agreement.judge(
                workload,
                inputs,
                {name: exchange.receive(at) for name, at in handed.tensors.get(number, {}).items()},
                number,
                seed,
                judge_seed=row_seed,
                is_thorough=key not in self.screened,
                on_step=self.heartbeat.beat,
            )
            self.screened.add(key)
            if wrong:
                return Failed(arm=cell.arm, status=Status.disagrees, message=wrong)
        return None

    def bench(self, workload: Workload) -> PreparedWorkload:
        """Return the prepared workload. Only the latest is cached, because a process times each workload once."""
        self.references = None
        if self.kept is None or self.kept.workload != workload:
            self.kept = None  # free its memory
            self.kept = PreparedWorkload(workload)
        return self.kept

    def observe(self, cell: Target, metric: str) -> CellMeasured | Failed:
        """Measure one metric of a cell, apart from timing; return Failed if its value is not finite."""
        reader, case = self.metrics[metric], self.case(cell)
        assert reader.measure is not None
        value = reader.measure(case)
        if value is not None and not math.isfinite(value):
            return Failed(status=Status.invalid, message=f"the metric {metric} is {value}")
        samples = () if value is None else (Sample(value=value),)
        note = f"{metric}: no counter can be read here" if value is None else reader.note(case)
        warnings = (note,) if note else ()
        measurement = Measurement(metric=metric, unit=reader.unit, samples=samples, warnings=warnings)
        return CellMeasured(**cell.names, measurement=measurement)

    def first_calls(self, cell: Target, settings: dict[str, str], *, has_others: bool) -> messages.FirstCalls:
        """Time the first calls in this process, which must be fresh (processes/worker/first_calls.py)."""
        self.turn = cell.arm
        load = partial(self.implementation, cell.spec)
        return first_calls.measure(cell.workload, load, settings, self.heartbeat.beat, has_others=has_others)

    def case(self, cell: Target) -> Case:
        """Return the cell's case (module, inputs, mask) for readings, not for timing; only the latest is cached."""
        self.heartbeat.beat()
        key = cell.workload.id, cell.spec
        if self.observed is None or self.observed[0] != key:
            self.observed, bench = None, self.bench(cell.workload)  # frees memory
            self.observed = key, build(bench.workload, self.implementation(cell.spec), bench.inputs, bench.mask)
        return self.observed[1]

    def sample_blocks(self, visit: messages.SampleBlocks) -> VisitFinished | Failed:
        """Time a visit, that is, a few blocks of one workload.

        If `visit.verifies` is set, check afterwards that all arms still answer correctly.
        """
        arms = [arm for arm, _ in visit.arms]

        here, bench = device(visit.workload.device), self.bench(visit.workload)

        def on_turn(arm: Arm) -> None:  # from now on the arm is responsible for a failure
            if here.is_broken():  # by work that the previous arm has queued
                raise RuntimeError(f"its call has failed after it returned, on {visit.workload.device}")
            self.turn = arm
            self.heartbeat.beat(arms.index(arm))

        calls = []
        for arm, spec in visit.arms:
            self.guard.require_unchanged()
            on_turn(arm)
            if arm == PROBE:
                calls.append(self.probe(visit.workload.device, torch.get_num_threads()))
            else:
                calls.append(bench.timed(arm, self.implementation(spec), visit.launch))
        called_s = -sum(timed.called_s for timed in calls)
        states: list[DeviceState | None] = []
        conditions = blocks.Conditions(
            on_turn=on_turn,
            read_waits=waiting.waits if here.is_host else dict,
            flush=here.flush if visit.cache == "cold" else None,
            on_block=lambda: states.append(here.state()),
            read_clock=lambda: seen.clock_mhz if (seen := here.state()) is not None else 0.0,
        )
        with torch.set_grad_enabled(visit.workload.direction != "inference"):
            samples = blocks.visit(calls, here.clock, visit, conditions)
            self._require_settings(calls, on_turn)
        called_s += sum(timed.called_s for timed in calls)
        if visit.verifies and any(arm != PROBE for arm in arms):
            self.turn = PROBE  # the harness computes the right answers, so no arm is responsible for time or failures
            self.heartbeat.beat(messages.Heartbeat.HARNESS)
            bench.reference(partial(self.heartbeat.beat, messages.Heartbeat.HARNESS))
        start = time.perf_counter()
        for arm in arms if visit.verifies else ():
            self.guard.require_unchanged()
            on_turn(arm)
            if arm != PROBE and (wrong := bench.verify(arm, visit.launch)):
                return Failed(arm=arm, status=Status.disagrees, message=wrong)
        called_s += time.perf_counter() - start
        return visit.finished(samples, called_s, [*filter(None, states)])

    def _require_settings(self, calls: Sequence[blocks.TimedCall], on_turn: Callable[[Arm], None]) -> None:
        """Require that no arm changed a setting during the blocks.

        If a setting was changed, the arms are called again; the first one that changes a setting is responsible.

        Raises:
            SharedStateError: a setting was changed.
        """
        if changed := self.guard.restored():
            for timed in calls:
                on_turn(timed.arm)
                timed.call()
                self.guard.require_unchanged()
            self.turn = PROBE
            raise state.SharedStateError(changed)
