"""The process that decodes: it has the model, and takes caches from the process that reads prompts."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from time import perf_counter
from typing import Any, Literal

import torch
import torch.multiprocessing as mp
from torch import Tensor

from kvlab.calibration.load import Calibrated
from kvlab.core.errors import CalibrationMismatch, KvlabError, NonFinite, StreamError, UnknownName, UserError
from kvlab.core.model import ModelInfo
from kvlab.core.recipe import Recipe
from kvlab_mechanisms.cluster.handover import CodedWire, DecodingWorker, Exact, Place, Prefilled
from kvlab_mechanisms.cluster.transport import WireReader, WireWriter, ends_of, listening
from kvlab_mechanisms.memory.wire import pack, read, unpack, write

Way = Literal["pipe", "memory", "tcp"]
WAYS: tuple[Way, ...] = ("pipe", "memory", "tcp")
REFUSALS = {kind.__name__: kind for kind in (StreamError, CalibrationMismatch, NonFinite)}
"""What the other process may refuse, beside what is a mistake of whoever asks."""
PATIENCE = 120.0  # seconds for an answer


@dataclass(frozen=True)
class Setup:
    """What both processes have in common.

    Parameters
    ----------
    info : ModelInfo
    dtype : {"float32", "bfloat16"}
    recipe : Recipe or None
        What codes the hand-over; None: it is exact.
    calibrated : Calibrated or None
    key : bytes
        Shared, so that what comes is from who holds it; see `kvlab_mechanisms.memory.wire`.
    """

    info: ModelInfo
    dtype: str = "float32"
    recipe: Recipe | None = None
    calibrated: Calibrated | None = None
    key: bytes = b""

    def model(self):
        """The model, loaded."""
        from kvlab.engines.hf.engine import HFEngine

        return HFEngine(self.info, self.dtype, "sdpa", self.info.max_positions).model

    def form(self, model) -> Exact:
        """How K and V are sent."""
        return CodedWire(self.recipe, model.config, self.info.head_dim, self.calibrated) if self.recipe else Exact()


@dataclass(frozen=True)
class Handed:
    """What a hand-over cost.

    Attributes
    ----------
    nbytes : int
        That went from one process to the other.
    seconds : float
        From the full cache here to the loaded cache there.
    """

    nbytes: int
    seconds: float


class DecodeProcess:
    """The other process, seen from the one that reads prompts.

    Parameters
    ----------
    setup : Setup
    form : Exact
        `Setup.form` of this process' model.
    """

    def __init__(self, setup: Setup, form: Exact):
        self.setup, self.form = setup, form
        self._pipe = self._connection = None
        context = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        self._said, theirs = context.Pipe()
        reading, writing = context.Pipe(duplex=False)
        with listening() as server:
            port = server.getsockname()[1]
            self._process = context.Process(target=serve, args=(setup, theirs, reading, port), daemon=True)
            self._process.start()
            theirs.close()
            reading.close()
            self._pipe = os.fdopen(os.dup(writing.fileno()), "wb", buffering=0)
            writing.close()
            try:
                server.settimeout(PATIENCE)
                self._connection = server.accept()[0]
                self._answer()
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    raise StreamError("the process that decodes did not come", code="stream.did-not-come") from None
                raise
        self._writers = {"pipe": WireWriter(_Whole(self._pipe)), "tcp": WireWriter(ends_of(self._connection))}

    def hand_over(self, sequence: str, prefilled: Prefilled, way: Way = "pipe") -> Handed:
        """Give the other process a cache, on one of `WAYS`.

        Over a pipe or a connection a layer is sent while the next is coded; shared memory is written as a whole.

        Raises
        ------
        StreamError, CalibrationMismatch
            The other process refuses what came: it is damaged, or of another model, codec or key.
        UserError
            It has a sequence of this name.
        NonFinite
            A codec was given NaN or infinity.
        """
        if way not in WAYS:
            raise UnknownName("way", way, WAYS)
        head = self.form.head(self.setup.info, prefilled.cache, sequence)
        began = perf_counter()
        if way == "memory":
            nbytes = self._through_memory(head, sequence, prefilled)
        else:
            writer = self._writers[way]
            before = writer.sent
            with _there():
                self._said.send(("load", way, sequence, prefilled.first, 0))
                self._stream(writer, head, prefilled)
            self._answer()
            nbytes = writer.sent - before
        return Handed(nbytes, perf_counter() - began)

    def _stream(self, writer: WireWriter, head, prefilled: Prefilled) -> None:
        try:
            write(writer, head, self.form.payloads(prefilled.cache), self.setup.key)
        except KvlabError:
            writer.end()
            with contextlib.suppress(KvlabError):  # of a stream that was cut; why is known here
                self._answer()
            raise
        except BaseException:  # nobody knows where in the stream: what comes next would be misread
            self._give_up()
            raise
        writer.end()

    def _through_memory(self, head, sequence: str, prefilled: Prefilled) -> int:
        data = pack(head, dict(self.form.payloads(prefilled.cache)), self.setup.key)
        memory = SharedMemory(create=True, size=len(data))
        try:
            memory.buf[: len(data)] = data
            self._ask("load", memory.name, sequence, prefilled.first, len(data))
        finally:
            memory.close()
            memory.unlink()
        return len(data)

    def step(self, sequence: str, token: int | None = None) -> tuple[int, Tensor]:
        """One step there; see `DecodingWorker.step`."""
        return self._ask("step", sequence, token)

    def answer(self, sequence: str, tokens: int) -> list[int]:
        """The likeliest tokens after the first, one after the other."""
        return self._ask("answer", sequence, tokens)

    def tokens(self, sequence: str) -> int:
        """How long a cache is there."""
        return self._ask("tokens", sequence)

    def unload(self, sequence: str) -> None:
        """Forget a sequence there."""
        self._ask("unload", sequence)

    def loaded(self) -> tuple[str, ...]:
        """Sequences there."""
        return self._ask("loaded")

    def close(self) -> None:
        """End the other process."""
        with contextlib.suppress(OSError):  # it may have gone already
            self._said.send(("leave",))
        self._process.join(10)
        self._process.kill()
        for end in (self._said, self._pipe, self._connection):
            if end is not None:
                end.close()

    def __enter__(self) -> DecodeProcess:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _give_up(self) -> None:
        """End the other process, and hear no more: what it says before it is gone is no answer to what comes next."""
        self._process.kill()  # it may hang where no other signal reaches it
        self._said.close()

    def _ask(self, *question: Any) -> Any:
        with _there():
            self._said.send(question)
        return self._answer()

    def _answer(self) -> Any:
        with _there():
            came = self._said.poll(PATIENCE)
            if not came:
                self._give_up()
                raise StreamError(
                    f"the process that decodes has not answered within {PATIENCE:g} s, and was ended",
                    code="stream.no-answer",
                )
            answer, error = pickle.loads(self._said.recv_bytes())
        if error is not None:
            name, words, code = error
            raise REFUSALS.get(name, UserError)(words, code=code)
        return answer


@contextlib.contextmanager
def _there() -> Iterator[None]:
    """`StreamError` where the other process has gone."""
    try:
        yield
    except (EOFError, OSError):
        raise StreamError("the process that decodes is gone", code="stream.gone") from None


class _Whole:
    """A raw pipe as `Ends`: a write takes everything."""

    def __init__(self, raw):
        self._raw, self.read = raw, raw.read

    def write(self, data: bytes | memoryview) -> None:
        """All bytes; a pipe may take a part of them at a time."""
        view = memoryview(data)
        while view:
            view = view[self._raw.write(view) :]


def serve(setup: Setup, said: Connection, pipe: Connection, port: int) -> None:
    """The process: load the model, then do what is asked until the other one leaves."""
    torch.set_num_threads(1)
    connection = socket.create_connection(("127.0.0.1", port))
    readers = {
        "pipe": WireReader(os.fdopen(os.dup(pipe.fileno()), "rb", buffering=0)),
        "tcp": WireReader(ends_of(connection)),
    }
    model = setup.model()
    worker = _Worker(setup, DecodingWorker(model), setup.form(model), readers)
    _tell(said, None)
    while True:
        try:
            verb, *words = said.recv()
        except (EOFError, OSError):
            return
        if verb == "leave":
            return
        try:
            _tell(said, getattr(worker, verb)(*words))
        except KvlabError as error:
            _tell(said, None, (type(error).__name__, str(error), error.code))


def _tell(said: Connection, answer: Any, error: tuple[str, str, str] | None = None) -> None:
    """Answer, as bytes: a tensor that is shared would have to be fetched from a process that may have gone."""
    said.send_bytes(pickle.dumps((answer, error)))


class _Worker:
    """What may be asked of the process."""

    def __init__(self, setup: Setup, decoder: DecodingWorker, form: Exact, readers: dict[str, WireReader]):
        self._setup, self._decoder, self._form, self._readers = setup, decoder, form, readers
        self.step, self.tokens, self.unload = decoder.step, decoder.tokens, decoder.unload

    def load(self, where: str, sequence: str, first: int, size: int) -> int:
        """Take a cache from the pipe, the connection, or shared memory of this name."""
        wanted = {"key": self._setup.key, "model": self._setup.info.model_hash, "codec": self._form.name}
        if where not in self._readers:
            memory = SharedMemory(where)
            try:
                found = self._unpacked(unpack(memory.buf[:size], **wanted).items())
            finally:
                _close(memory)
            return self._decoder.load(sequence, found, first)
        reader = self._readers[where]
        reader.begin()
        try:
            found = self._unpacked(read(reader, **wanted))
        finally:
            reader.drain()
        return self._decoder.load(sequence, found, first)

    def _unpacked(self, payloads) -> dict[Place, Tensor]:
        dtype = getattr(torch, self._setup.dtype)
        return {place: self._form.unpacked(data, place, dtype) for place, data in payloads}

    def answer(self, sequence: str, tokens: int) -> Sequence[int]:
        """See `DecodeProcess.answer`."""
        if tokens < 0:
            raise UserError(f"{tokens} tokens are asked for; allowed: 0 or more", code="user.token-count")
        return [self._decoder.step(sequence)[0] for _ in range(tokens)]

    def loaded(self) -> tuple[str, ...]:
        """Names of sequences."""
        return self._decoder.loaded


def _close(memory: SharedMemory) -> None:
    """Let go of shared memory, also where an error's traceback still holds a view of it."""
    with contextlib.suppress(BufferError):  # it goes with the process then; its owner unlinks it
        memory.close()
