"""The journal on disk: locks, damage, full disks, and SIGKILL at any moment."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aimaster.errors import AlreadyRunning, FolderUnusable, NoSpace
from aimaster.ids import Incarnation
from aimaster.journal.errors import JournalCorrupt, JournalDiverged, JournalNewer
from aimaster.journal.replay import replay
from aimaster.journal.sqlite import SqliteJournal
from tests.unit.aimaster.journal.stories import WALL_S, a_job, records, write

PAGE_BYTES = 4096

WRITER = """
import sys
from pathlib import Path
from aimaster.core.policy import Policy
from aimaster.ids import Incarnation
from aimaster.journal.sqlite import SqliteJournal
from tests.unit.aimaster.journal.stories import WALL_S, a_job, records

journal = SqliteJournal.open(Path(sys.argv[1]))
play = a_job()
journal.begin_life(Incarnation("m1"), policy=play.machine.policy, at_s=0.0, wall_s=WALL_S)
written = records(play)
for record in written[:4]:
    journal.append([record])
print("ready", flush=True)
done = 4
while True:
    # Only whole jobs can be replayed, so one batch says the rest, and then nothing that changes the state.
    rest = written[done:] or [written[0]]
    journal.append([rest[0]])
    done += 1
    print(done, flush=True)
"""


def test_killed_at_any_moment_it_opens_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    for attempt in range(6):
        path = tmp_path / f"journal-{attempt}.db"
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[4],
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.002 * attempt)  # another moment each time; whatever it is, the promise holds
        process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        process.wait()
        process.stdout.close()
        with SqliteJournal.open(path) as journal:
            acknowledged = said[-1] if said else 4
            last = journal.last()
            assert last is not None
            assert acknowledged <= last.seq <= acknowledged + 1
            entries = list(journal.entries())
            assert [entry.seq for entry in entries] == list(range(1, last.seq + 1))
            replayable = records(a_job())[: last.seq]
            assert [entry.record for entry in entries[: len(replayable)]] == replayable


@pytest.mark.parametrize("torn", [False, True])
def test_a_log_that_ends_anywhere_opens_with_whole_records(tmp_path: Path, torn: bool) -> None:
    """A power cut may keep any part of the log's last write, or leave a page of which half is old."""
    written = records(a_job())
    with SqliteJournal.open(tmp_path / "whole.db") as journal:
        journal.begin_life(Incarnation("m1"), policy=a_job().machine.policy, at_s=0.0, wall_s=WALL_S)
        for record in written:
            journal.append([record])
        database = (tmp_path / "whole.db").read_bytes()
        log = (tmp_path / "whole.db-wal").read_bytes()
    frame, head = PAGE_BYTES + 24, 32
    cuts = sorted(
        {cut for at in range(head, len(log) + 1, frame) for cut in (at - 700, at - 1, at) if cut > 0}
    )
    path, known = tmp_path / "cut.db", 0
    for cut in cuts:
        for suffix in ("-wal", "-shm", ".lock"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.write_bytes(database)
        kept = log[:cut]
        if torn:
            kept = kept[: -PAGE_BYTES // 2] + b"\0" * min(PAGE_BYTES // 2, len(kept))
        path.with_name(path.name + "-wal").write_bytes(kept)
        with SqliteJournal.open(path) as journal:
            found = [entry.record for entry in journal.entries()]
            assert found == written[: len(found)]
            assert len(found) >= known
            if found:
                assert replay(journal).digest() == found[-1].digest
            known = len(found)
    assert known == len(written) - torn


def test_only_one_master_writes_and_readers_may_watch(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with SqliteJournal.open(path) as journal:
        write(journal, a_job())
        with pytest.raises(AlreadyRunning, match="another master"):
            SqliteJournal.open(path)
        with SqliteJournal.read(path) as reader:
            assert replay(reader).digest() == replay(journal).digest()
            with pytest.raises(FolderUnusable):
                reader.begin_life(
                    journal.lives()[0].incarnation, policy=journal.lives()[0].policy, at_s=0.0, wall_s=0.0
                )
    with SqliteJournal.open(path) as journal:
        assert journal.last() is not None


def test_a_reader_sees_what_is_appended_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with SqliteJournal.open(path) as journal:
        written = records(a_job())
        write(journal, a_job())
        with SqliteJournal.read(path) as reader:
            assert len(list(reader.entries())) == len(written)
            journal.append(written[:1])
            assert [entry.seq for entry in reader.entries(after=len(written))] == [len(written) + 1]


def test_a_journal_of_a_newer_version_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SqliteJournal.open(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    for opening in (SqliteJournal.open, SqliteJournal.read):
        with pytest.raises(JournalNewer, match="schema 99") as caught:
            opening(path)
        assert caught.value.exit_code == 3
        assert "--rdzv-id" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be one" * 40, b"SQLite format 3\0"]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(content)
    with pytest.raises(JournalCorrupt):
        SqliteJournal.open(path)
    assert path.read_bytes() == content


def test_somebody_elses_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()
    with pytest.raises(JournalCorrupt, match="not a journal"):
        SqliteJournal.open(path)


def test_an_entry_that_was_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with SqliteJournal.open(path) as journal:
        write(journal, a_job())
    with sqlite3.connect(path) as database:
        database.execute("UPDATE entries SET event = replace(event, '\"a.net\"', '\"x.net\"') WHERE seq = 2")
    database.close()
    with SqliteJournal.open(path) as journal, pytest.raises(JournalDiverged, match="entry 2"):
        replay(journal)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE entries SET event = '{}' WHERE seq = 3")
    database.close()
    with SqliteJournal.open(path) as journal, pytest.raises(JournalCorrupt, match="not a known Event"):
        list(journal.entries())


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FolderUnusable, match="--state-dir"):
        SqliteJournal.open(tmp_path / "none" / "journal.db")
    with pytest.raises(FolderUnusable, match="no journal"):
        SqliteJournal.read(tmp_path / "journal.db")


def test_a_full_disk_is_said_nothing_is_half_written_and_it_goes_on_later(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with SqliteJournal.open(path) as journal:
        write(journal, a_job())
        before = journal.last()
        assert before is not None
        # The same answer from SQLite as on a full file system, without one.
        pages = journal._database.execute("PRAGMA page_count").fetchone()[0]
        journal._database.execute(f"PRAGMA max_page_count = {pages}")
        record = records(a_job())[0]
        with pytest.raises(NoSpace, match="disk is full"):
            journal.append([record] * 2000)
        assert journal.last() == before
        journal._database.execute("PRAGMA max_page_count = 1000000")
        assert journal.append([record]) == before.seq + 1


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    path = tmp_path / "journal.db"
    with SqliteJournal.open(path) as journal:
        write(journal, a_job())
        with pytest.raises(AlreadyRunning):
            SqliteJournal.open(path)
    path.write_bytes(b"broken" * 100)
    with pytest.raises(JournalCorrupt):
        SqliteJournal.open(path)
    assert set(os.listdir("/proc/self/fd")) == before
