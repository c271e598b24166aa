"""The connector's half that stands beside vLLM's scheduler: it decides what is restored and what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvlab.core.recipe import digest
from kvlab.kvstore.snapshot import chain
from kvlab.kvstore.snapshot.identity import ContextIdentity
from kvlab.kvstore.snapshot.numerics import DECODED, PREFILL
from kvlab.kvstore.snapshot.reasons import SnapshotReason
from kvlab.kvstore.vllm.context import EngineContext
from kvlab.kvstore.vllm.jobs import JobOutcome, Load, Outcomes, Save, StepJobs
from kvlab.kvstore.vllm.miss_reasons import DAMAGE, MissReason
from kvlab.kvstore.vllm.settings import OURS, Wish
from kvlab.kvstore.vllm.snapshot_index import Match, SnapshotIndex

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

SUFFIX = ".kvsnap"
ENDED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
    RequestStatus.FINISHED_ABORTED,  # so vLLM ends a request at a stop string, which its frontend finds
)

HANDED_ON = SnapshotReason(
    MissReason.LOSSY, "vLLM's own cache holds its beginning, and may have it from a lossy snapshot"
)
NOT_ITS_OWN = SnapshotReason(
    MissReason.LOSSY,
    "it began with K and V of a lossy snapshot, and what follows them is not the model's own: not saved",
)


@dataclass
class _Course:
    """What is known of a request while it runs."""

    request: Request
    wish: Wish
    identity: ContextIdentity
    match: Match | None = None
    begin: int = 0
    restored: int | None = 0  # None from the promise on until the worker has said what came of it
    lossy: bool = False  # whether its first K and V may be those of a lossy snapshot
    saved: int = 0  # tokens that a save was planned for
    path: Path | None = None  # of the last snapshot that was written
    cold: list[SnapshotReason] = field(default_factory=list)  # why nothing was restored when it was last begun
    failed: list[SnapshotReason] = field(default_factory=list)  # loads and saves, however often it was begun
    seen: tuple | None = None  # the folder's state and the tokens at the last look, and what was found


class Planner:
    """Decides, request by request.

    Parameters
    ----------
    context : Context
        Of the engine.
    """

    def __init__(self, context: EngineContext):
        self.context, self.index = context, SnapshotIndex(Path(context.settings.folder), context.settings.unproven)
        self._lossy = False  # whether lossy K and V were ever loaded, which vLLM's own cache may hand on
        self._courses: dict[str, _Course] = {}
        self._loads: list[Load] = []
        self._late: list[Save] = []
        self._writing: dict[Path, list[_Course]] = {}  # saves without an outcome yet, and who waits for it

    def matched(self, request: Request, local: int) -> int:
        """How many tokens a snapshot holds after the first `local` ones, which vLLM has; plans nothing yet."""
        course = self._course(request)
        course.match, course.begin, course.lossy = None, local, self._lossy and local > 0
        course.failed += [HANDED_ON] if course.lossy else []
        match, course.cold = self._looked_up(course)
        if match is not None and match.tokens <= local:
            line = f"vLLM's own cache holds {local} tokens, the snapshot no more"
            course.cold = [SnapshotReason(MissReason.PREFIX_CACHED, line)]
        elif match is not None:
            course.match, course.cold = match, []
            return match.tokens - local
        return 0

    def allocated(self, request: Request, block_ids: Sequence[int], external: int) -> None:
        """vLLM has blocks for a request, and `external` tokens of what was promised are to be loaded."""
        if not external:
            return
        course = self._course(request)
        course.restored = None
        course.lossy |= course.match.lossy
        self._lossy |= course.match.lossy
        tokens = list(request.all_token_ids[: course.begin + external])
        self._loads.append(
            Load(request.request_id, course.match.path, tokens, course.begin, request.cache_salt, list(block_ids))
        )

    def planned(self, output: SchedulerOutput) -> StepJobs:
        """The jobs of the step that vLLM is about to run."""
        saves = [save for name, n in output.num_scheduled_tokens.items() if (save := self._save(name, n, output))]
        jobs = StepJobs(self._loads, [*self._late, *saves])
        self._loads, self._late = [], []
        return jobs

    def learned(self, outcomes: Outcomes) -> None:
        """What came of a step's jobs."""
        for name, outcome in outcomes.loads.items():
            if any(reason.code in DAMAGE for reason in outcome.reasons):
                self.index.spoil(outcome.path, outcome.reasons)
            if course := self._courses.get(name):
                course.restored = outcome.tokens
                course.failed += outcome.reasons
                if outcome.reasons:  # the damaged file counted as saved, and what it holds as loaded
                    course.saved, course.lossy = 0, self._lossy and course.begin > 0
        for outcome in outcomes.saves.values():
            for course in self._writing.pop(outcome.path, ()):
                self._keep(course, outcome)

    def finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether vLLM keeps its blocks for a save, and what its answer says of snapshots."""
        course = self._courses.pop(request.request_id, None)
        if course is None:
            return False, None
        answer = self.context.settings.save == "answer" and request.status in ENDED
        late = self._due(course, request.num_computed_tokens, block_ids, last=True) if answer else None
        self._late += [late] if late else []
        return late is not None, {OURS: _answer(course)}

    def _course(self, request: Request) -> _Course:
        name = request.request_id
        if name not in self._courses:
            wish, identity = Wish.of(request.kv_transfer_params), self.context.identity_for(request.cache_salt)
            self._courses[name] = _Course(request, wish, identity)
        return self._courses[name]

    def _looked_up(self, course: _Course) -> tuple[Match | None, list[SnapshotReason]]:
        """The snapshot for a request, or why there is none."""
        if refused := self._refused(course):
            return None, [refused]
        request = course.request
        whole = course.identity.geometry.floor(request.num_tokens - 1)  # the last token's logits are what is asked for
        if not whole:
            return None, [
                SnapshotReason(MissReason.TOO_SHORT, f"{request.num_tokens} tokens hold no chunk and one token more")
            ]
        state = self.index.state(), whole
        if course.seen is None or course.seen[0] != state:  # vLLM asks at every step while it has no blocks for it
            course.seen = state, self.index.find(course.identity, request.all_token_ids[:whole])
        match, reasons = course.seen[1]
        if match is None and not reasons:
            reasons = [SnapshotReason(MissReason.NO_SNAPSHOT, "there is no snapshot in the folder")]
        return match, reasons

    def _refused(self, course: _Course) -> SnapshotReason | None:
        """Why a request is not restored, whatever lies in the folder."""
        if not (self.context.settings.restore and course.wish.restore):
            return SnapshotReason(MissReason.UNWANTED, "the settings or the request say that nothing be restored")
        if not _plain(course.request):
            return SnapshotReason(MissReason.NOT_TOKENS, "its K and V are not the model's for its token ids alone")
        if course.request.skip_reading_prefix_cache:
            return SnapshotReason(
                MissReason.PROMPT_LOGPROBS, "vLLM computes the whole prompt, as a rule for its log-probabilities"
            )
        return None

    def _save(self, name: str, scheduled: int, output: SchedulerOutput) -> Save | None:
        """The save that a running request is due after this step."""
        course = self._courses.get(name)
        if course is None or course.saved:
            return None
        after = course.request.num_computed_tokens + scheduled
        if after < course.request.num_prompt_tokens:
            return None
        (block_ids,) = output.kv_connector_block_state.get_block_ids(name)
        return self._due(course, course.request.num_prompt_tokens, block_ids)

    def _due(self, course: _Course, computed: int, block_ids: Sequence[int], last: bool = False) -> Save | None:
        """A save of the whole chunks of the first `computed` tokens, unless a snapshot holds them."""
        request, identity = course.request, course.identity
        wanted = self.context.settings.save != "never" and course.wish.save and _plain(request)
        length = identity.geometry.floor(min(computed, request.num_tokens))
        if not wanted or length <= course.saved:
            return None
        if course.lossy:
            course.failed.append(NOT_ITS_OWN)
            return None
        course.saved = length
        tokens = list(request.all_token_ids[:length])
        path = self.index.folder / file_name(identity, tokens)
        if path in self._writing:  # the same tokens of another request
            self._writing[path].append(course)
            return None
        match, _ = self.index.find(identity, tokens)
        if match is not None and match.tokens == length:
            return None
        self._writing[path] = [course]
        return Save(request.request_id, path, tokens, request.cache_salt, list(block_ids), _computed(course), last)

    @staticmethod
    def _keep(course: _Course, outcome: JobOutcome) -> None:
        if not outcome.reasons:
            course.path = outcome.path
        elif any(reason.code == MissReason.LOAD_FAILED for reason in outcome.reasons):
            course.saved = 0
        else:
            course.failed += outcome.reasons


def file_name(identity: ContextIdentity, tokens: Sequence[int]) -> str:
    """Of a snapshot of these tokens: equal contexts get equal names, and others never."""
    link = chain.links(tokens, identity.geometry.chunk_tokens, identity.salt)[-1]
    return f"{link.hex()[:32]}-{digest(identity)}{SUFFIX}"


def _computed(course: _Course) -> str:
    """How the tokens of a save went through the model; what vLLM's own cache held may be another one's answer."""
    answered = course.saved > course.request.num_prompt_tokens
    decoded = answered or course.begin or (course.match is not None and course.match.decoded)
    return DECODED if decoded else PREFILL


def _plain(request: Request) -> bool:
    """Whether a request's K and V are those of its token ids: no adapter, no images, no embeddings."""
    return (
        request.lora_request is None
        and not request.mm_features
        and request.prompt_embeds is None
        and request.prompt_token_ids is not None
    )


def _answer(course: _Course) -> dict[str, Any]:
    """What a request's answer says: plain values, for they may leave the process.

    A request that ends in the step that loads or saves does so before the worker could be heard: `restored` is then
    None, and `saved` too. The snapshot of an answer is written later still.
    """
    return {
        "restored": course.restored,
        "snapshot": course.match.path.name if course.match else None,
        "saved": course.path.name if course.path else None,
        "reasons": [[str(code), line] for code, line in dict.fromkeys([*course.cold, *course.failed])],
    }
