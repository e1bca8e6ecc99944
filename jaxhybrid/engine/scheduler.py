"""Who runs next. Host data and a few verbs; touches no array and reads no environment."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from jaxhybrid.engine.job import Job
from jaxhybrid.engine.sequence import Sequence


@dataclass(frozen=True)
class Turn:
    """What one dispatch does, and for whom."""

    kind: Literal["prefill", "score", "decode"]
    jobs: tuple[Job, ...]


class Scheduler:
    """First come, first served; prefill and decode take turns when both have work, so neither starves the other."""

    def __init__(self, max_sequences: int, prefill_rows: int) -> None:
        self._max_sequences, self._prefill_rows = max_sequences, prefill_rows
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._decoded_last = True

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def running(self) -> tuple[Job, ...]:
        return tuple(self._running)

    def working_on(self, sequence: Sequence) -> bool:
        """Whether a job of this sequence is waiting or running."""
        return any(job.sequence is sequence for job in self.jobs)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All that are not done, the running ones first."""
        return (*self._running, *self._waiting)

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def admit(self) -> list[Job]:
        """Moves waiting jobs into free rows, and returns them for their state to be looked up."""
        admitted = []
        while self._waiting and len(self._running) < self._max_sequences:
            job = self._waiting.popleft()
            job.phase = "prefill"
            self._running.append(job)
            admitted.append(job)
        return admitted

    def schedule(self) -> Turn | None:
        prefills = [job for job in self._running if job.phase == "prefill"]
        decodes = [job for job in self._running if job.phase == "decode"]
        self._decoded_last = bool(decodes) and (not prefills or not self._decoded_last)
        if self._decoded_last:
            return Turn("decode", tuple(decodes))
        if not prefills:
            return None
        kind: Literal["prefill", "score"] = "score" if prefills[0].score else "prefill"
        alike = [job for job in prefills if job.score == prefills[0].score]
        return Turn(kind, tuple(alike[: self._prefill_rows]))

    def victim(self, spared: Collection[Job]) -> Job | None:
        """The job admitted last, among those not spared and not of a sequence the caller holds."""
        return next((job for job in reversed(self._running) if job.fresh and job not in spared), None)

    def preempt(self, job: Job) -> None:
        """Back to the head of the queue; its state was let go."""
        self._running.remove(job)
        job.phase = "waiting"
        self._waiting.appendleft(job)

    def complete(self, job: Job) -> None:
        if job in self._running:
            self._running.remove(job)
        else:
            self._waiting.remove(job)
        job.phase = "done"
