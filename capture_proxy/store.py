"""Where sessions, turns and events are kept: tables of a SQLite file that other programs share.

Owns the schema and its migration, the writer thread, and what "durable" means: an awaited write is in the operating
system's hands, so it survives the death of any process (`kill -9` at any point). `synchronous=NORMAL`: when the machine
itself loses power, its agents are gone too; the last turns may be missing then, the file stays whole.

A short turn is written where it is, together with those that end in the same turn of the event loop: that takes less
than waking another thread. A long one, and whatever finds the file or the writer busy, is the writer thread's, which
takes all that waits as one transaction. A turn is kept as what
it adds to an earlier turn of its session (`codec.Encoder`); after a restart, or when a session was quiet for long, the
next turn stands alone. It does not own what a session may do (`session`).
"""

from __future__ import annotations

import asyncio
import math
import queue
import sqlite3
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import orjson

from capture_proxy import codec, deltas, migrations
from capture_proxy.errors import StoreError
from capture_proxy.migrations import SCHEMA_VERSION as SCHEMA_VERSION
from capture_proxy.types import Capture, Session, Turn

_BUSY_MS = 15_000  # the trainer writes its own tables of the same file in short transactions
_HERE_BYTES = 32 * 1024  # of a request body: more takes the encoder longer than the other agents' streams should wait
_HERE_IN_A_ROW = 128  # then one through the writer thread, whose commits also move the log into the file
_MAX_ENCODER_BYTES = 256 * 2**20  # of what is remembered of all sessions, for the turns to come
_TURN = "seq, base, num_shared, prompt_ids, body, completion_ids, logprobs"
# A turn and everything it is told in terms of.
_CHAIN = (
    "WITH RECURSIVE chain(seq) AS (VALUES(?) UNION SELECT base FROM capture_turns JOIN chain USING (seq)"
    " WHERE base IS NOT NULL) "
)
_T = TypeVar("_T")
_Op: TypeAlias = Callable[[sqlite3.Connection], None]
_Item: TypeAlias = tuple[_Op, str | None, asyncio.Future[None]]  # the session whose turns it writes


class Store:
    """Sessions and turns in a SQLite file. `open` it, `await close()` it.

    Every method raises StoreError and nothing else; after a failed write nothing of it is kept.
    """

    def __init__(
        self, path: Path, writer: sqlite3.Connection, reader: sqlite3.Connection, here: sqlite3.Connection
    ) -> None:
        self._path = path
        self._writer, self._reader = writer, reader
        self._here = here  # the event loop's own, which never waits
        self._num_here = 0
        self._gathered: list[_Item] = []  # turns that this turn of the event loop has ended
        self._num_queued = 0  # writes that the writer thread has not answered for yet
        self._ops: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closed = False
        self._encoders: OrderedDict[str, codec.Encoder] = OrderedDict()  # recently used last; whoever writes has them
        self._encoder_bytes = 0
        self._session_rows: dict[str, tuple[Any, ...]] = {}  # as they are in the file, of sessions with an encoder
        # One reading thread: a connection must not be used by two threads at once.
        self._read_pool = ThreadPoolExecutor(1, thread_name_prefix="capture-read")
        self._thread = threading.Thread(target=self._write_loop, name="capture-write", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open or create the file. Raises StoreError when it cannot be used or is of a newer schema."""
        connections: list[sqlite3.Connection] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(3):
                connections.append(_connect(path))
            connections[2].execute("PRAGMA busy_timeout=0")
            connections[2].execute("PRAGMA wal_autocheckpoint=0")  # it would sync the file
            migrations.prepare(connections[0], path)
        except (sqlite3.Error, OSError) as error:
            for connection in connections:
                connection.close()
            raise StoreError(f"cannot open the store {path}: {error}") from error
        except StoreError:
            for connection in connections:
                connection.close()
            raise
        return cls(path, *connections)

    async def put_session(self, session: Session) -> None:
        """Insert the session, or replace what is known of it."""
        row = _session_row(session)

        def write(db: sqlite3.Connection) -> None:
            _put_session(db, row)
            self._session_rows.pop(session.session_id, None)
            if session.sealed:
                self._forget(session.session_id)

        await self._write(write)

    async def put_turn(self, turn: Turn, session: Session) -> None:
        """Keep the turn and the session's state after it, both or neither. The turn must not change meanwhile."""
        session_row = _session_row(session)

        def write(db: sqlite3.Connection) -> None:
            self._put_turn(db, turn)
            if self._session_rows.get(turn.session_id) != session_row:  # most turns change nothing of it
                _put_session(db, session_row)
                self._session_rows[turn.session_id] = session_row

        if len(turn.raw or b"") > _HERE_BYTES:
            await self._write(write, turn.session_id)
        else:
            await self._write_here(write, turn.session_id)

    async def put_event(self, session_id: str | None, kind: str, detail: str, at: float | None = None) -> None:
        """Note what happened beside the calls, e.g. ("r1", "egress_refused", "example.org"); None = of no session.

        `at` is when, in Unix seconds (None = now). An event that is there already, its time included, is not put twice.
        """
        row = (time.time() if at is None else at, session_id, kind, detail)
        await self._write(lambda db: _put_event(db, row))

    async def events(self, session_id: str | None) -> list[tuple[float, str, str]]:
        """(Unix seconds, kind, detail) of each event of the session, oldest first; None = those of no session."""
        sql = "SELECT at, kind, detail FROM capture_events WHERE session_id IS ? ORDER BY seq"
        return await self._read(lambda rows: [(at, kind, detail) for at, kind, detail in rows], sql, session_id)

    async def session_by_token(self, token: str) -> Session | None:
        found = await self._read(_sessions_of, "SELECT body FROM capture_sessions WHERE token = ?", token)
        return found[0] if found else None

    async def session(self, session_id: str) -> Session | None:
        sql = "SELECT body FROM capture_sessions WHERE session_id = ?"
        found = await self._read(_sessions_of, sql, session_id)
        return found[0] if found else None

    async def sessions(self) -> list[Session]:
        """All sessions, oldest first."""
        return await self._read(_sessions_of, _ALL_SESSIONS)

    async def open_sessions(self) -> list[Session]:
        """Those that are not sealed, oldest first."""
        sql = "SELECT body FROM capture_sessions WHERE json_extract(CAST(body AS TEXT), '$.sealed') = 0"
        return await self._read(_sessions_of, sql)

    async def last_turn(self, session_id: str) -> Turn | None:
        """The one recorded last; None = it has none."""
        return await self._turn_where("session_id = ?", session_id)

    async def turns(self, session_id: str) -> list[Turn]:
        """All turns of the session in order of arrival, without their raw bodies. What they share, they share here."""
        return await self._read(_turns_of, _ALL_TURNS, session_id)

    async def turn(self, session_id: str, turn_id: str) -> Turn | None:
        """One turn; None = the session has none of this id."""
        return await self._turn_where("session_id = ? AND turn_id = ?", session_id, turn_id)

    async def turn_by_body_hash(self, session_id: str, body_hash: bytes) -> Turn | None:
        """The newest OK turn of the session whose request body had this hash; None = there is none."""
        return await self._turn_where("session_id = ? AND body_hash = ? AND status = 'ok'", session_id, body_hash)

    async def raw_request(self, turn_id: str) -> bytes | None:
        """The request body of a turn as the agent sent it, decompressed; None = unknown turn, or never recorded."""
        sql = _CHAIN.replace("?", "(SELECT seq FROM capture_turns WHERE turn_id = ?)")
        sql += "SELECT seq, base, raw FROM capture_turns JOIN chain USING (seq) ORDER BY seq"
        return await self._read(_raw_of, sql, turn_id)

    async def close(self) -> None:
        """Write what is queued, then close the file. Idempotent."""
        if self._closed:
            return
        self._flush_here()
        self._closed = True
        self._ops.put(None)
        await asyncio.to_thread(self._thread.join)
        self._read_pool.shutdown(wait=True)
        for db in (self._here, self._reader, self._writer):
            db.close()

    async def _turn_where(self, condition: str, *params: Any) -> Turn | None:
        newest = f"(SELECT MAX(seq) FROM capture_turns WHERE {condition})"
        sql = f"{_CHAIN.replace('?', newest)}SELECT {_TURN} FROM capture_turns JOIN chain USING (seq) ORDER BY seq"
        found = await self._read(_decoded, sql, *params)
        return found[-1] if found else None

    def _put_turn(self, db: sqlite3.Connection, turn: Turn) -> None:
        encoder = self._encoders.setdefault(turn.session_id, codec.Encoder())
        self._encoders.move_to_end(turn.session_id)
        before = encoder.size
        seq = db.execute(migrations.INSERT_TURN, migrations.turn_row(turn, encoder.encode(turn))).lastrowid
        assert seq is not None
        encoder.remember(turn, seq)
        self._encoder_bytes += encoder.size - before
        while self._encoder_bytes > _MAX_ENCODER_BYTES and len(self._encoders) > 1:
            self._forget(next(iter(self._encoders)))

    def _forget(self, session_id: str | None) -> None:
        self._session_rows.pop(session_id or "", None)
        encoder = self._encoders.pop(session_id or "", None)
        self._encoder_bytes -= encoder.size if encoder else 0

    async def _write(self, op: _Op, session_id: str | None = None) -> None:
        if self._closed:
            raise StoreError("the store is closed")
        self._flush_here()  # an earlier write must not come later
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue((op, session_id, done))
        # A caller that is cancelled does not cancel the write, which shares its transaction with others.
        await asyncio.shield(done)

    def _queue(self, item: _Item) -> None:
        self._num_queued += 1
        item[2].add_done_callback(self._answered)
        self._ops.put(item)

    def _answered(self, done: asyncio.Future[None]) -> None:
        self._num_queued -= 1
        if not done.cancelled():
            done.exception()  # whoever waited may be gone

    async def _write_here(self, op: _Op, session_id: str) -> None:
        """Write in this thread, in one transaction with all that ends in the same turn of the event loop."""
        if self._closed:
            raise StoreError("the store is closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._gathered.append((op, session_id, done))
        if len(self._gathered) == 1:
            loop.call_soon(self._flush_here)
        await asyncio.shield(done)

    def _flush_here(self) -> None:
        batch, self._gathered = self._gathered, []
        if not batch:
            return
        if self._commit_here(batch):
            _settle([done for _, _, done in batch], None)
            return
        for item in batch:  # the writer thread says what is wrong, if it is wrong there too
            self._queue(item)

    def _commit_here(self, batch: list[_Item]) -> bool:
        """False = it is the writer thread's, and nothing has happened.

        Only while that thread is idle: it has the encoders otherwise, and an earlier write must not come later.
        """
        self._num_here = 0 if self._num_here >= _HERE_IN_A_ROW else self._num_here + 1
        if self._num_queued or not self._num_here:
            return False
        try:
            self._here.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # another program writes: a thread may wait for it
            return False
        try:
            for op, _, _ in batch:
                op(self._here)
            self._here.execute("COMMIT")
        except Exception:
            if self._here.in_transaction:
                self._here.execute("ROLLBACK")
            for _, session_id, _ in batch:
                self._forget(session_id)  # it remembers what was not kept
            return False
        return True

    async def _read(self, decode: Callable[[Iterable[tuple[Any, ...]]], _T], sql: str, *params: Any) -> _T:
        if self._closed:
            raise StoreError("the store is closed")

        def read() -> _T:  # decoding included: a long session is megabytes, and streams are waiting
            return decode(self._reader.execute(sql, params))

        try:
            return await asyncio.get_running_loop().run_in_executor(self._read_pool, read)
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            raise StoreError(f"cannot read the store {self._path}: {error}") from error

    def _write_loop(self) -> None:
        """The only thread that writes: takes all that is waiting and commits it as one transaction."""
        while (item := self._ops.get()) is not None:
            batch = [item]
            while not self._ops.empty() and len(batch) < 256:
                following = self._ops.get()
                if following is None:
                    self._ops.put(None)
                    break
                batch.append(following)
            self._commit(batch)

    def _commit(self, batch: list[_Item]) -> None:
        try:
            self._transaction([op for op, _, _ in batch])
        except Exception as error:  # a turn that cannot be encoded must not end this thread, nor its neighbours
            for _, session_id, _ in batch:
                self._forget(session_id)  # it remembers turns that were not kept
            if len(batch) > 1:
                for item in batch:
                    self._commit([item])
                return
            reason = str(error) if isinstance(error, sqlite3.Error) else f"{type(error).__name__}: {error}"
            _tell(batch, StoreError(f"cannot write the store {self._path}: {reason}"))
            return
        _tell(batch, None)

    def _transaction(self, ops: list[_Op]) -> None:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            for op in ops:
                op(self._writer)
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:  # SQLite itself rolls back on a full disk
                self._writer.execute("ROLLBACK")
            raise


def _tell(batch: list[_Item], error: StoreError | None) -> None:
    """Wake whoever waits for these writes, with one message to each event loop; called in the writer thread."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for _, _, done in batch:
        loops.setdefault(done.get_loop(), []).append(done)
    for loop, waiting in loops.items():
        with suppress(RuntimeError):  # a loop that is closed has nobody left who waits
            loop.call_soon_threadsafe(_settle, waiting, error)


def _settle(waiting: list[asyncio.Future[None]], error: StoreError | None) -> None:
    for done in waiting:
        if done.done():  # its caller was cancelled
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


_ALL_SESSIONS = "SELECT body FROM capture_sessions ORDER BY created_at, session_id"
_ALL_TURNS = f"SELECT {_TURN} FROM capture_turns WHERE session_id = ? ORDER BY seq"


def load_capture(path: Path, session_id: str) -> Capture | None:
    """A session and its turns straight from the file, for programs that are no gateway; None = it has no such session.

    Raises StoreError when the file cannot be read or is of a newer schema.
    """
    try:
        with closing(_connect(path)) as db:
            migrations.prepare(db, path)
            return capture_in(db, session_id)
    except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"cannot read the store {path}: {error}") from error


def capture_in(db: sqlite3.Connection, session_id: str) -> Capture | None:
    """The same from an open connection to a file of this schema, which it only reads.

    Raises sqlite3.Error, and ValueError, TypeError or KeyError for rows that are no turns.
    """
    found = _sessions_of(db.execute("SELECT body FROM capture_sessions WHERE session_id = ?", (session_id,)))
    return Capture(found[0], _turns_of(db.execute(_ALL_TURNS, (session_id,)))) if found else None


def load_sessions(path: Path) -> list[Session]:
    """All sessions straight from the file, oldest first, as `load_capture` reads one. Raises StoreError like it."""
    try:
        with closing(_connect(path)) as db:
            migrations.prepare(db, path)
            return _sessions_of(db.execute(_ALL_SESSIONS))
    except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"cannot read the store {path}: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    except BaseException:
        db.close()
        raise
    return db


def _session_row(session: Session) -> tuple[str, str, float, bytes]:
    try:
        body = orjson.dumps(codec.session_to_dict(session))
    except TypeError as error:
        raise StoreError(f"session {session.session_id} cannot be kept: {error}") from error
    return (session.session_id, session.token, session.created_at, body)


def _sessions_of(rows: Iterable[tuple[Any, ...]]) -> list[Session]:
    return [codec.session_from_dict(orjson.loads(row[0])) for row in rows]


def _put_session(db: sqlite3.Connection, row: tuple[str, str, float, bytes]) -> None:
    db.execute(
        "INSERT INTO capture_sessions VALUES (?, ?, ?, ?) ON CONFLICT (session_id) DO UPDATE SET body = excluded.body",
        row,
    )


def _put_event(db: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    known = "SELECT 1 FROM capture_events WHERE at = ? AND session_id IS ? AND kind = ? AND detail = ?"
    if db.execute(known, row).fetchone() is None:
        db.execute("INSERT INTO capture_events (at, session_id, kind, detail) VALUES (?, ?, ?, ?)", row)


def _decoded(rows: Iterable[tuple[Any, ...]]) -> list[Turn]:
    """Turns in the order they were written, which puts every base before what refers to it."""
    decoder = codec.Decoder()
    return [
        decoder.decode(
            seq,
            base,
            num_shared,
            array("i", prompt_ids),
            orjson.loads(body),
            array("i", completion_ids).tolist(),
            [None if math.isnan(x) else x for x in array("d", logprobs)],
        )
        for seq, base, num_shared, prompt_ids, body, completion_ids, logprobs in rows
    ]


def _turns_of(rows: Iterable[tuple[Any, ...]]) -> list[Turn]:
    return sorted(_decoded(rows), key=lambda turn: turn.index)


def _raw_of(rows: Iterable[tuple[Any, ...]]) -> bytes | None:
    raws: dict[int | None, bytes | None] = {None: b""}
    raw = None
    for seq, base, delta in rows:
        raw = raws[seq] = None if delta is None else deltas.decode(raws[base] or b"", delta)
    return raw
