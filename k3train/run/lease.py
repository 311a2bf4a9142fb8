"""One trainer a run folder in an object store, where no kernel drops a lock with its holder. Imports no JAX.

The lease is a row of numbered objects, ``lock/000001.json`` and so on; who made the newest holds it. An object can be
made by one only (a put on the condition that there is none), so of several who want the next number one gets it. The
holder writes its object anew every few seconds; when it has not for a while, the next number is free to be taken.
Clocks are not compared: who waits watches whether the object changes.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import create, delete, get, objects_below, put
from k3train.config.storage import storage
from k3train.run.aside import Every
from k3train.run.mirror import LEASE

BEAT_S = 15.0
"""Seconds between the holder's signs of life."""
STALE_S = 90.0
"""Seconds without one after which a lease may be taken over."""


class Lease:
    """The lease of a run folder, held from here on.

    Args:
      address: the run folder in the store.
      note: hears about waiting, a lease taken over, and beats that failed.
      lost: called with a message when another trainer has taken the lease; must not return to the training.
      seat: what only one living process can have, here the lock of the mirror: a holder with the same seat is dead.

    Raises:
      UserError: another trainer holds it (exit 33), or the store refuses.
    """

    def __init__(self, address: str, *, note: Callable[[str], None], lost: Callable[[str], None], seat: str = ""):
        self._address, self._note, self._lost, self._seat = address, note, lost, seat
        self._beats, self._name = 0, secrets.token_hex(8)
        with storage(address, "lock the run folder"):
            self._number = self._take()
        self._thread = Every("run folder's lock", BEAT_S, self._beat, note)
        self._thread.start()

    def _take(self) -> int:
        """Get the next number, once the newest is free."""
        while True:
            newest = self._newest()
            if newest:
                self._wait_for(newest)
            # Where the answer to the first try was lost, the second finds our own object there.
            mine = newest + 1
            if create(self._path(mine), self._content()) or self._holder(mine).get("name") == self._name:
                numbers = self._numbers()
                if max(numbers) == mine:
                    for number in numbers:
                        if number < mine:
                            delete(self._path(number))
                    return mine
                delete(self._path(mine))  # made in a gap that a later holder left
            # Another one was faster; look who.

    def _wait_for(self, number: int) -> None:
        """Return when the object of that number is nobody's any more.

        Raises:
          UserError: its holder gives signs of life.
        """
        seen = get(self._path(number))
        holder = _parse(seen)
        if holder.get("released") or (self._seat and holder.get("seat") == self._seat):
            return
        who = f"process {holder.get('pid')} on {holder.get('host')}"
        self._note(f"{self._address} is held by {who}; waiting up to {STALE_S:.0f} s for a sign of life")
        until = time.monotonic() + STALE_S
        while time.monotonic() < until:
            time.sleep(min(1.0, STALE_S / 10))
            now = get(self._path(number))
            if now is None or _parse(now).get("released"):
                return
            if now != seen:
                raise UserError(
                    f"{self._address} is in use by {who}; stop that trainer or choose another run.dir",
                    ExitCode.RUN_FOLDER,
                )
        self._note(f"WARNING: {self._address} is taken over: {who} gave no sign of life for {STALE_S:.0f} s")

    def check(self) -> None:
        """Make sure that the lease is still ours.

        Raises:
          UserError: another trainer has taken it (exit 33).
        """
        newest = self._newest()
        if newest != self._number:
            holder = self._holder(newest)
            raise UserError(
                f"{self._address} was taken over by process {holder.get('pid')} on {holder.get('host')}, since nothing "
                f"was heard of this one for {STALE_S:.0f} s; it writes nothing more there",
                ExitCode.RUN_FOLDER,
            )

    def _beat(self) -> None:
        try:
            self.check()
        except UserError as error:
            self._lost(str(error))
            return
        self._beats += 1
        put(self._path(self._number), self._content())

    def release(self) -> None:
        """Let go; the object stays and says so. May be called twice."""
        if not self._number:
            return
        self._thread.stop()
        number, self._number = self._number, 0
        try:
            if self._newest() == number:
                put(self._path(number), self._content(released=True))
        except Exception as error:  # an unreachable store must not hide how the run ended
            self._note(f"WARNING: {self._address}: the lock could not be released: {error}")

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        names = objects_below(f"{self._address}/{LEASE}")
        return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit()]

    def _holder(self, number: int) -> dict[str, Any]:
        return _parse(get(self._path(number)))

    def _path(self, number: int) -> str:
        return f"{self._address}/{LEASE}/{number:06d}.json"

    def _content(self, released: bool = False) -> bytes:
        holder = {
            "name": self._name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "seat": self._seat,
            "beats": self._beats,
            "time": time.time(),
            "released": released,
        }
        return json.dumps(holder).encode()


def _parse(content: bytes | None) -> dict[str, Any]:
    try:
        holder = json.loads(content or b"")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}
