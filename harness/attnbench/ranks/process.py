"""The processes of a group of ranks: `python -m attnbench.ranks.process STARTER FOLDER DEVICE SECONDS FD...`.

This process imports torch, computes nothing, forks a rank for each socket FD, and waits. A rank answers requests one by
one until its socket closes. The ranks find each other through FOLDER, and wait for each other for at most SECONDS. Each
process ends at once if the process that started it ends; STARTER is the id of the one that started this process.
"""

import ctypes
import importlib
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore  # torch.distributed reexports it, but not for mypy

from attnbench import devices, plugins
from attnbench.ranks.group import LARGEST_MESSAGE, Asked, Report, Request
from attnbench.ranks.rank import CommunicationError, Rank, tokens_of

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(starter: int, folder: str, device: str, patience_s: float, lines: list[int]) -> None:
    """Fork a rank for each socket in `lines`, and wait for the ranks; `starter` is the id of the starting process."""
    end_with(starter)
    launcher, children = os.getpid(), []
    for rank, line in enumerate(lines):
        child = os.fork()
        if not child:
            end_with(launcher)
            for other in lines[rank + 1 :]:
                os.close(other)
            code = 1
            with suppress(BaseException):
                answer_all(socket.socket(fileno=line), folder, device, patience_s, (rank, len(lines)))
                code = 0
            os._exit(code)
        os.close(line)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def end_with(starter: int) -> None:
    """Make the system kill this process when the process `starter` ends; exit at once if that has already ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:
        os._exit(1)


def answer_all(line: socket.socket, folder: str, device: str, patience_s: float, place: tuple[int, int]) -> None:
    """Join the group, and answer requests until the socket `line` closes; `place` is the rank and the world size."""
    rank, world_size = place
    torch.set_num_threads(1)
    here = devices.device(device)
    devices.device(device if here.is_host else f"{device.partition(':')[0]}:{rank}").select()
    dist.init_process_group(
        devices.device(device).collectives,
        store=FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=patience_s),
    )
    line.send(str(os.getpid()).encode())
    member = Member(rank, world_size, device)
    decoder = msgspec.json.Decoder(Request)
    while True:
        message, files, *_ = socket.recv_fds(line, LARGEST_MESSAGE, 1)
        if not message:
            return
        request = decoder.decode(message)
        if files:
            member.memory = torch.frombuffer(mmap.mmap(files[0], request.memory_bytes), dtype=torch.uint8)
            os.close(files[0])
        try:
            report = member.answer(request)
        except Exception as error:  # noqa: BLE001 - it is reported, and the reader of the report ends the group
            traceback.print_exc()
            said = (str(error).strip().splitlines() or ["no message"])[0]
            is_communication = isinstance(error, CommunicationError)
            report = Report(error=f"{type(error).__name__}: {said}"[:2000], is_communication=is_communication)
        line.send(msgspec.json.encode(report))


class Member:
    """One rank, which keeps the autograd graphs of its calls for their backward passes."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.graphs: dict[int, tuple[Tensor, list[Tensor], Rank]] = {}

    def answer(self, request: Request) -> Report:
        """Compute this rank's share of a pass and write it into the shared memory."""
        for call in request.forget:
            self.graphs.pop(call, None)
        if request.asked is not None:
            return self.forward(request, request.asked)
        return self.backward(request)

    def forward(self, request: Request, asked: Asked) -> Report:
        """Compute a forward pass; store its autograd graph if a backward pass may follow."""
        rank = replace(asked.rank, rank=self.rank, world_size=self.world_size)
        taken = (self.take(each.within(self.memory), rank) for each in request.given)
        query, key, value = leaves = [each.requires_grad_(asked.keeps_graph) for each in taken]
        function = imported(asked.module, asked.function, asked.file)

        def compute() -> list[Tensor]:
            with torch.set_grad_enabled(asked.keeps_graph):
                return [function(query, key, value, rank)]

        (output,), report = self.timed(compute, rank)
        self.put([output.detach()], request, rank)
        if asked.keeps_graph:
            self.graphs[request.call] = (output, leaves, rank)
        return report

    def backward(self, request: Request) -> Report:
        """Compute the backward pass through the stored autograd graph of a call."""
        output, leaves, rank = self.graphs[request.call]
        (grad_output,) = [self.take(each.within(self.memory), rank) for each in request.given]
        made, report = self.timed(
            lambda: list(torch.autograd.grad(output, leaves, grad_output, retain_graph=True)), rank
        )
        self.put(made, request, rank)
        return report

    def timed(self, compute: Callable[[], list[Tensor]], rank: Rank) -> tuple[list[Tensor], Report]:
        """Run `compute` once all ranks are ready; return the results, and a report with times and bytes sent."""
        with rank.waiting():
            dist.barrier()
        rank.bytes_sent, rank.waited_s = 0, 0.0
        start = time.perf_counter()
        made = compute()
        devices.device(self.device).synchronize()
        call_s = time.perf_counter() - start
        return made, Report(call_s=call_s, waited_s=rank.waited_s, bytes_sent=rank.bytes_sent)

    def take(self, whole: Tensor, rank: Rank) -> Tensor:
        """Copy this rank's tokens (B, H, t, K) from a whole tensor (B, H, T, K) to the rank's device."""
        parts = [whole[:, :, each.start : each.stop] for each in rank.tokens()]
        return torch.cat(parts, dim=2).to(self.device)

    def put(self, made: list[Tensor], request: Request, rank: Rank) -> None:
        """Write this rank's results into the whole tensors in shared memory.

        Raises:
            ValueError: a result has the wrong shape or dtype.
        """
        for tensor, place in zip(made, request.made, strict=True):
            whole = place.within(self.memory)
            shape = (*place.shape[:2], rank.num_tokens(self.rank), place.shape[3])
            if tuple(tensor.shape) != shape or tensor.dtype != whole.dtype:
                found = f"{tuple(tensor.shape)} in {tensor.dtype}"
                raise ValueError(f"its share has shape {found} instead of {shape} in {whole.dtype}")
            if rank.order == "whole":  # each rank has all tokens and writes a part
                own = tokens_of("contiguous", self.rank, self.world_size, rank.length)
                tensor = tensor[:, :, own[0].start : own[0].stop]  # noqa: PLW2901 - only the part of it that is written
            else:
                own = rank.tokens()
            for part, tokens in zip(tensor.split([len(each) for each in own], dim=2), own, strict=True):
                whole[:, :, tokens.start : tokens.stop] = part


@cache
def imported(module: str, function: str, file: str) -> Any:  # noqa: ANN401 - a Share
    """Import a requested function from its module or, if there is no module of that name here, from its file."""
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError:
        return plugins.load(f"{file}:{function}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), [int(each) for each in sys.argv[5:]])
