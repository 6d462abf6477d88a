"""Tracks one generation on the rollout servers: its requests, its samples so far, and its end. No I/O, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.events import GENERATING, report
from rlhf.rollout.engine import Completion, Quota, Request, siblings
from rlhf.rollout.sample import Sample
from rlhf.rollout.servers.dispatch import SampleQueue


@dataclass
class ServedGeneration:
    """The requests of one generation. `queue` has the indices of requests that wait for a server."""

    requests: list[Request]
    quotas: Sequence[Quota]
    seed: int
    step: int
    queue: SampleQueue = field(init=False)
    stopping: bool = False
    """Whether servers answer with the tokens so far, and get no further requests."""
    _samples: dict[int, Sample] = field(default_factory=dict, init=False)  # samples by index of the request
    _complete: int = field(default=0, init=False)
    _news: list[int] = field(default_factory=list, init=False)  # requests answered since the last `pop_news`

    def __post_init__(self) -> None:
        self.queue = SampleQueue(siblings(self.requests))
        self._completion = Completion(self.requests, self.quotas)

    def extend(self, requests: Sequence[Request]) -> None:
        """Add requests, with the next indices."""
        first = len(self.requests)
        self.requests += requests
        self.queue.extend([range(first + group.start, first + group.stop) for group in siblings(requests)])
        self._completion.extend(requests)

    def answered(self, index: int, sample: Sample) -> None:
        """Record the answer to the request `index`."""
        self._samples[index] = sample
        if sample.finish_reason != "partial":
            self._complete += 1
            self._news.append(index)
            self._completion.answered(self.requests[index])
            report(GENERATING, self._complete, len(self.requests))

    @property
    def complete(self) -> bool:
        """Whether all samples are complete, or enough for the quotas."""
        return self._complete == len(self.requests) or self._completion.reached

    @property
    def samples(self) -> list[Sample]:
        """The sample of each request. A request without an answer has the tokens that it began with."""
        return [self._samples.get(i, request.so_far) for i, request in enumerate(self.requests)]

    def pop_news(self) -> dict[int, Sample]:
        """Return the samples completed since the last call, by index of the request, ascending."""
        news, self._news = sorted(self._news), []
        return {index: self._samples[index] for index in news}
