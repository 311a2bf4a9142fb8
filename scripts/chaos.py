"""Damages small trainings at random, for real, and checks that none of them is lost or comes back wrong.

    python scripts/chaos.py --rounds 50 --jobs 1 --json chaos.json

A round is one training of a complete small K3, disturbed some times on its way: processes killed or signalled at a
random moment or just when a checkpoint was made, files of the newest checkpoint flipped, cut or removed between
attempts, the disk filled up under it (its folder lies on a small tmpfs; that needs root), and in every second round
another mesh or number of processes at each attempt. A round is a miss where

- an attempt ends with an exit code that its disturbance does not explain, or hangs;
- a damaged checkpoint is loaded, or no good one is left;
- metrics.jsonl lacks a step, has one twice, or a batch hash differs from the undisturbed run's;
- a hand-over restores another state than was saved (hash of the arrays, the same on every mesh);
- without a change of mesh: the final state's hash differs from the undisturbed run's;
- with one: the final held-out loss leaves the band of five undisturbed runs that add in other orders (one width of the
  band is allowed on either side).
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from chaos_world import (
    LAYOUTS,
    ONE,
    STEPS,
    Layout,
    await_save,
    batch_hashes,
    can_mount,
    damage,
    environ,
    experiment,
    fill,
    final_hash,
    free_port,
    good_steps,
    metrics,
    read,
    saved_hashes,
    write_text,
)
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from k3train.config.exit_codes import ExitCode

DISK_MIB, LIMIT_S = 64, 600
KILLS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "usr2": signal.SIGUSR2, "int": signal.SIGINT}
EXPLAINED = {
    "none": {ExitCode.FINISHED},
    "kill": {-signal.SIGKILL},
    "term": {ExitCode.PREEMPTED_SAVED, ExitCode.PREEMPTED_LOST},
    "usr2": {ExitCode.TIME_LIMIT_SAVED, ExitCode.PREEMPTED_LOST},
    "int": {ExitCode.STOPPED_SAVED, ExitCode.PREEMPTED_LOST},
    "disk": {ExitCode.SAVE_FAILED, ExitCode.RUN_FOLDER},
}


@dataclass
class Attempt:
    """What was done to one attempt, and how it ended."""

    layout: Layout
    disturbance: str
    damage: str = ""
    codes: tuple[int, ...] = ()
    text: str = ""


@dataclass
class Round:
    """One training and what is wrong with it."""

    number: int
    changes_mesh: bool
    attempts: list[Attempt] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Chaos:
    """The experiment, its undisturbed runs, and rounds against them.

    Args:
      folder: where everything lies; the token store is shared.
      tmpfs: whether rounds may mount one.
    """

    def __init__(self, folder: Path, tmpfs: bool):
        self.folder, self.tmpfs = folder, tmpfs
        self.config = folder / "chaos.yaml"
        write_text(folder / "text")
        self.config.write_text(yaml.safe_dump(experiment(folder)))
        self.want: dict[int, str] = {}
        self.final, self.loss = "", 0.0
        self.band = (0.0, 0.0)
        self.attempt_s = 0.0

    def undisturbed(self, pool: ThreadPoolExecutor, say: Callable[[str], None]) -> None:
        """Runs the experiment on every layout: the yardstick and the band."""
        self._undisturbed(0, say)  # alone, since it makes the token store
        losses = [self.loss, *pool.map(lambda i: self._undisturbed(i, say), range(1, len(LAYOUTS)))]
        width = max(losses) - min(losses)
        self.band = (min(losses) - width, max(losses) + width)
        say(f"band {self.band[0]:.9f} to {self.band[1]:.9f} (spread of the five {width:.1e}); state {self.final}")

    def _undisturbed(self, number: int, say: Callable[[str], None]) -> float:
        """Held-out loss after an undisturbed run on one layout; the first is what the others are compared with."""
        run, layout, began = self.folder / f"undisturbed-{number}", LAYOUTS[number], time.monotonic()
        codes, text = self.attempt(run, layout)
        if codes != (0,) * layout.processes:
            sys.exit(f"the undisturbed run on {layout} ended with {codes}:\n{text[-3000:]}")
        lines = metrics(run)
        loss = next(line["eval/holdout/loss"] for line in lines if "eval/holdout/loss" in line)
        if layout == ONE:
            self.want, self.final, self.loss = batch_hashes(lines), final_hash(run), loss
        if batch_hashes(lines) != self.want:
            sys.exit(f"the undisturbed run on {layout} read other batches than the one on {ONE}")
        self.attempt_s = max(self.attempt_s, time.monotonic() - began)
        say(f"undisturbed on {layout}: held-out loss {loss:.9f}, {time.monotonic() - began:.0f} s")
        return loss

    # One attempt

    def attempt(self, run: Path, layout: Layout, disturb: Callable | None = None) -> tuple[tuple[int, ...], str]:
        """Trains until the end, or until ``disturb(processes)`` ended it.

        Returns:
          Exit codes of the processes (minus SIGALRM: it did not end), and output.
        """
        port, processes, outputs = free_port(), [], []
        for index in range(layout.processes):
            command = [sys.executable, "-m", "k3train", "train", str(self.config), f"run.dir={run}"]
            command += [f"mesh.{axis}={size}" for axis, size in layout.mesh.items()]
            output = tempfile.TemporaryFile("w+", dir=self.folder)  # noqa: SIM115 - closed below
            environment = environ(self.folder, layout, index, port)
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
            outputs.append(output)
        hangs = False
        try:
            if disturb is not None:
                disturb(processes)
            deadline = time.monotonic() + LIMIT_S
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            hangs = True
        finally:
            for process in processes:
                process.kill()
                process.wait()
            text = read(outputs)
        return tuple(-signal.SIGALRM if hangs else process.returncode for process in processes), text

    # One round

    def round(self, number: int, seed: int) -> Round:
        """Trains to the end under one to three disturbances."""
        rng, began = random.Random(f"{seed}-{number}"), time.monotonic()
        result = Round(number, changes_mesh=number % 2 == 1)
        folder = self.folder / f"round-{number}"
        with ExitStack() as stack:
            self._place(folder, stack)
            kinds = [*KILLS, "disk"] if self.tmpfs else [*KILLS]
            for kind in [*rng.choices(kinds, k=rng.randint(1, 3)), "none"]:
                layout = rng.choice(LAYOUTS) if result.changes_mesh else ONE
                one = Attempt(layout, kind)
                result.attempts.append(one)
                try:
                    self._disturbed(folder / "run", one, rng)
                except AssertionError as error:
                    result.misses.append(f"{kind} on {layout}: {error}")
                    break
                except Exception:  # the other rounds go on
                    result.misses.append(f"{kind} on {layout}: {traceback.format_exc()}")
                    break
                if one.codes == (0,) * layout.processes:
                    break
            else:
                result.misses.append("never finished")
            if not result.misses:
                result.misses = self._faults(folder / "run", result)
            if result.misses:  # the tmpfs goes
                kept = self.folder / f"missed-{number}"
                shutil.copytree(folder, kept, ignore_dangling_symlinks=True)
                for i, one in enumerate(result.attempts):
                    (kept / f"attempt-{i}.txt").write_text(one.text)
        shutil.rmtree(folder, ignore_errors=True)
        result.seconds = time.monotonic() - began
        return result

    def _place(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        if self.tmpfs:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)

    def _disturbed(self, run: Path, one: Attempt, rng: random.Random) -> None:
        """One attempt under its disturbance, after some damage to what the attempt before left."""
        before = good_steps(run)
        if len(before) > 1 and rng.random() < 0.5:
            one.damage = damage(run, before[-1], rng)
            before = before[:-1] if one.damage != "empty" else before
        filler, after_save = run.parent / "filler", rng.random() < 0.6
        moment = rng.uniform(0, 1) if after_save else rng.uniform(0.5, self.attempt_s)

        def disturb(processes: list[subprocess.Popen]) -> None:
            victim = rng.choice(processes)
            if after_save:
                await_save(run, before, processes)
            time.sleep(moment)
            if one.disturbance == "disk":
                fill(filler)
            elif victim.poll() is None:
                victim.send_signal(KILLS[one.disturbance])

        one.codes, one.text = self.attempt(run, one.layout, None if one.disturbance == "none" else disturb)
        filler.unlink(missing_ok=True)
        explained = EXPLAINED[one.disturbance] | {ExitCode.FINISHED}
        if one.layout.processes > 1 and one.disturbance == "kill":
            explained |= {ExitCode.PEER_LOST, -signal.SIGABRT}
        if one.layout.processes > 1 and one.disturbance == "disk":
            explained |= {ExitCode.PEER_LOST, -signal.SIGABRT}
        # Before Python's handlers stand, a signal ends the process in the system's own way.
        early = {-KILLS[one.disturbance]} if one.disturbance in KILLS else set()
        assert set(one.codes) <= {int(code) for code in explained | early | {130}}, (
            f"exit codes {one.codes}:\n{one.text[-1500:]}"
        )
        self._hand_over(run, one, before)

    def _hand_over(self, run: Path, one: Attempt, before: list[int]) -> None:
        """The attempt went on from the newest good checkpoint, and with its state."""
        resumed = [line for line in one.text.splitlines() if line.startswith("resumed from ")]
        if one.damage and one.damage != "empty" and resumed:
            assert "quarantined" in one.text, (
                f"a {one.damage} checkpoint was passed over in silence:\n{one.text[:1500]}"
            )
        if not resumed:
            assert not before or "compiled in" not in one.text, f"checkpoints {before} were there, but it began anew"
            return
        words = resumed[0].split()
        step, shown = int(words[words.index("step") + 1].rstrip(",;")), words[-1]
        assert step == before[-1], f"resumed at step {step}, good checkpoints were {before}"
        saved = saved_hashes(run)
        assert step not in saved or saved[step].startswith(shown), f"step {step} came back as {shown}: {saved[step]}"

    def _faults(self, run: Path, result: Round) -> list[str]:
        """What is wrong with a round that came to its end."""
        lines, faults = metrics(run), []
        steps = [line["step"] for line in lines if "train/loss" in line]
        if steps != list(range(1, STEPS + 1)):
            faults.append(f"metrics.jsonl has steps {steps}")
        if batch_hashes(lines) != self.want:
            faults.append("other batches were read")
        loss = [line["eval/holdout/loss"] for line in lines if "eval/holdout/loss" in line]
        if len(loss) != 1 or not self.band[0] <= loss[0] <= self.band[1]:
            faults.append(f"held-out loss {loss}, band {self.band}")
        if not result.changes_mesh and final_hash(run) != self.final:
            faults.append(f"final state {final_hash(run)}, undisturbed {self.final}")
        return faults


def render(rounds: list[Round]) -> Table:
    """One line a round."""
    table = Table("round", "layouts", "done to it", "exit codes", "s", "result")
    for one in rounds:
        done = [f"{a.damage}+{a.disturbance}" if a.damage else a.disturbance for a in one.attempts]
        codes = ["/".join(map(str, a.codes)) for a in one.attempts]
        layouts = dict.fromkeys(str(a.layout) for a in one.attempts)
        verdict = "\n".join(one.misses) or ("state within band" if one.changes_mesh else "state equal")
        table.add_row(
            str(one.number), "\n".join(layouts), " ".join(done), " ".join(codes), f"{one.seconds:.0f}", verdict
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=1, help="rounds at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    tmpfs = can_mount(folder)
    if not tmpfs:
        console.print("no tmpfs can be mounted here (that needs root): no disk is filled up")
    chaos, numbers = Chaos(folder, tmpfs), range(args.first, args.first + args.rounds)
    with ThreadPoolExecutor(args.jobs) as pool, Progress(console=console) as progress:
        chaos.undisturbed(pool, progress.print)
        task, rounds = progress.add_task("rounds", total=args.rounds), []
        for one in pool.map(lambda number: chaos.round(number, args.seed), numbers):
            rounds.append(one)
            progress.advance(task)
            done = " ".join(f"{a.damage}+{a.disturbance}" if a.damage else a.disturbance for a in one.attempts)
            progress.print(f"round {one.number}: {done}: {one.misses or 'good'}", markup=False, highlight=False)
    console.print(render(rounds))
    missed = [one.number for one in rounds if one.misses]
    console.print(f"{len(rounds)} rounds, {len(missed)} missed{f': {missed}' if missed else ''}; seed {args.seed}")
    if args.json:
        args.json.write_text(json.dumps([record(one) for one in rounds], indent=1) + "\n")
    if missed:
        console.print(f"what they left lies in {folder}")
    else:
        shutil.rmtree(folder)
    return int(bool(missed))


def record(one: Round) -> dict:
    """A round as JSON."""
    attempts = [
        {"layout": str(a.layout), "disturbance": a.disturbance, "damage": a.damage, "codes": a.codes}
        for a in one.attempts
    ]
    return {"round": one.number, "attempts": attempts, "misses": one.misses, "seconds": round(one.seconds, 1)}


if __name__ == "__main__":
    sys.exit(main())
