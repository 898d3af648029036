"""A Ray cluster: one task a job."""

import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posx.engines import Done, Lost
from posx.engines.remote import RemoteEngine, carry_out
from posx.errors import UserError
from posx.job import Job


class RayEngine(RemoteEngine):
    """At most `jobs` given to the cluster at `address`, or to the one that Ray finds (RAY_ADDRESS,
    or one that was started on this machine), or to one that ends with the sweep.

    Raises:
        UserError: no Ray, or no cluster at the address.
    """

    def __init__(
        self, jobs: int | None, folder: Path, address: str | None, num_cpus: float, num_gpus: float
    ) -> None:
        super().__init__(jobs, folder)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
        try:
            import ray
        except ImportError:
            raise UserError("hydra/launcher=ray needs Ray: pip install 'posx[ray]'") from None
        needs = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        try:  # retries are the pool's, for every engine alike
            self.task = ray.remote(carry_out).options(max_retries=0, **needs)
            _reach(address or os.environ.get("RAY_ADDRESS", ""))
            ray.init(
                address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}},
            )
        except Exception as error:  # Ray has no class of its own for what can go wrong here
            ray.shutdown()
            raise UserError(f"hydra/launcher=ray: {_line(error)}") from None
        self.ray = ray

    def send(self, jobs: Mapping[int, tuple[Job, Path]]) -> Mapping[int, Any]:
        return {number: self.task.remote(*jobs[number]) for number in jobs}

    def ended(self) -> Mapping[int, Done | Lost]:
        handles = list(self.handles.values())
        done, _ = self.ray.wait(handles, num_returns=max(1, len(handles)), timeout=0)
        ready = set(done)
        return {n: self._end(handle) for n, handle in self.handles.items() if handle in ready}

    def _end(self, handle: Any) -> Done | Lost:
        from ray.exceptions import RayError

        try:
            return Done(self.ray.get(handle))
        except RayError as error:
            return Lost(f"Ray lost it: {_line(error)}")

    def stop(self, kill: bool) -> None:
        for handle in self.handles.values():
            self.ray.cancel(handle, force=kill)

    def close(self) -> None:
        with suppress(Exception):  # a cluster that is gone
            self.stop(kill=True)
        self.ray.shutdown()


def _reach(address: str) -> None:
    """Ray itself would try an address for minutes.

    Raises:
        ConnectionError: nobody listens there.
    """
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return  # "auto", "local", or none
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        reason = error.strerror or error
        raise ConnectionError(f"no cluster answers at {address} ({reason})") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
