"""Ask every host of a cluster what it is, one after the other on one machine and otherwise at once."""

import time
from contextlib import suppress
from typing import Any

import msgspec

from attnbench.cluster import driver
from attnbench.cluster.examining import Examined, Refused
from attnbench.cluster.host import Known

RUN = "doctor"
"""In place of the name of a run; nothing is kept."""
BUSY_S = 120.0
"""A host that does not answer for so long is measuring something, or gone."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """A host, or why it could not be examined."""

    host: str
    address: str
    late_s: float = 0.0  # its clock less that of this machine
    examined: Examined | None = None
    error: str = ""


def examinations(address: str) -> list[Examination]:
    """Every host of the cluster.

    Raises:
        ValueError: no ray, no cluster, or no host in it.
    """
    with driver.connected(address) as ray:
        nodes = driver.hosts_of(ray)
        if not nodes:
            raise ValueError(driver.NO_HOST)
        actors = [(node, driver.start_actor(ray, node, RUN)) for node in nodes.values()]
        found, waiting = [], []
        for node, actor in actors:
            where, name = str(node["NodeManagerAddress"]), str(node["NodeID"])[:8]
            try:
                known, late_s = _known(ray, actor)
                waiting.append((Examination(host=known.host, address=where, late_s=late_s), actor.examine.remote()))
            except ray.exceptions.RayError as error:
                found.append(Examination(host=name, address=where, error=_first_line(error)))
        for each, text in waiting:
            try:
                said = msgspec.json.decode(ray.get(text), type=Examined | Refused)
            except ray.exceptions.RayError as error:
                said = Refused(error=_first_line(error))
            has = {"error": said.error} if isinstance(said, Refused) else {"examined": said}
            found.append(msgspec.structs.replace(each, **has))
        for _, actor in actors:
            with suppress(Exception):  # its host may be gone
                ray.kill(actor)
    return found


def _known(ray: Any, actor: Any) -> tuple[Known, float]:  # noqa: ANN401 - ray has no types of its own
    """What a host says of itself, and how far its clock is apart, to half of the time that the question took."""
    ray.get(actor.ready.remote(), timeout=BUSY_S)  # the clock is asked when the process is there
    before_s = time.time()
    known = msgspec.json.decode(ray.get(actor.known.remote()), type=Known)
    return known, known.time_s - (before_s + time.time()) / 2


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
