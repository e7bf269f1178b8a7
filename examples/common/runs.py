"""How programs save and resume: files that are whole or absent, checksums that find damage, and settings that a folder keeps.

A checkpoint ends in its checksum; ``settings.json`` holds its own, and those of the tables in its folder.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

SETTINGS, LOCK = "settings.json", ".lock"
PREFIX = b"sha256:"
SEAL = len(PREFIX) + 64  # bytes
WRITTEN = "as it was written"
AGAIN = "It is damaged: take it from a backup, or delete it and run the same command again."
OTHER = "Restore it, or take another --output."


class RunError(ValueError):
    """An error of files or settings, in words for the user."""


def check_folder(option: str, folder: Path, kind: str = "a folder") -> None:
    """Raises a ``ValueError`` for a folder that cannot be made or written, and leaves nothing behind."""
    place = folder
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not place.is_dir():
            got = f"got {folder}, but {place} is a file"
            raise ValueError(f"Expected '{option}' to be {kind} that can be made ({got}). Choose another one.")
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        words = f"Expected '{option}' to be {kind} that can be written (got {error.strerror!r} for {place})."
        raise ValueError(f"{words} Make room or get the right, or choose another one.") from None


def check_file(option: str, path: Path) -> None:
    """Raises a ``ValueError`` for a file that cannot be written."""
    check_folder(option, path.parent, "in a folder")
    if path.is_dir():
        raise ValueError(f"Expected '{option}' to be a file (got {path}, which is a folder). Add a name.")


def check_model_folder(option: str, folder: Path) -> None:
    """Raises a ``ValueError`` for a folder that holds other files than those of a saved model."""
    check_folder(option, folder)
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if {*names} - {"README.md", "config.json", "model.safetensors", "tokenizer.json"}:
        words = f"Expected '{option}' to be a new or empty folder, or that of a saved model (got {folder}, with {', '.join(names[:3])})."
        raise ValueError(f"{words} Choose another one.")


def hold(folder: Path) -> contextlib.AbstractContextManager[Any]:
    """Locks a folder of output until the context or the process ends; refused while another process holds it."""
    try:
        return FileLock(folder / LOCK).acquire(blocking=False)
    except Timeout:
        words = f"Expected 'output' to be a folder in which no other process is at work (got {folder})."
        raise RunError(f"{words} Wait for it or stop it, or choose another one.") from None
    except OSError as error:
        raise _no_room(folder / LOCK, 0, error) from error


def write(path: Path, content: bytes | memoryview, seal: bytes = b"") -> None:
    """Writes a file that is complete at any moment, even if the power fails; if there is no room, the old file stays."""
    draft = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content)
            file.write(seal)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _no_room(path, len(content) + len(seal), error) from error


def _no_room(path: Path, size: int, error: OSError) -> RunError:
    words = f"Expected 'output' to have room for {path.name}, {size:,} bytes (got {error.strerror!r} in {path.parent})."
    return RunError(f"{words} What was written before is whole: make room and resume.")


def write_text(path: Path, text: str) -> None:
    """Writes a text, whole or not at all."""
    write(path, text.encode())


def read_text(path: Path, way_out: str = AGAIN, what: str = "a file of text") -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(path, what, error, way_out) from None


def _wrong(path: Path, what: str, got: object, way_out: str) -> RunError:
    if isinstance(got, OSError):
        got = "no such file" if isinstance(got, FileNotFoundError | NotADirectoryError) else got.strerror
    return RunError(f"Expected '{path}' to be {what} (got {got}). {way_out}")


def save_pretrained(folder: Path, model: Any, tokenizer: str | None, **card: Any) -> None:
    """Saves a model with a new card and the text of its tokenizer, if it has one."""
    for name in ("README.md", "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
    model.save_pretrained(folder, model_card_kwargs=card)
    if tokenizer is not None:
        write_text(folder / "tokenizer.json", tokenizer)


def write_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes what ``torch.save`` writes; the comment that ends the zip archive is the checksum of all bytes before it."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    content = buffer.getbuffer()
    assert content[-22:-18] == b"PK\5\6"  # the last record of an archive without comment
    content[-2:] = SEAL.to_bytes(2, "little")  # the length of the comment
    write(path, content, PREFIX + hashlib.sha256(content).hexdigest().encode())


def read_checkpoint(path: Path, way_out: str = AGAIN) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU; refused if a single bit is not what was written, or if there is no checksum."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _wrong(path, "a checkpoint", error, way_out) from None
    if PREFIX + hashlib.sha256(memoryview(content)[:-SEAL]).hexdigest().encode() != content[-SEAL:]:
        raise _wrong(path, WRITTEN, "other bytes than its checksum says", way_out)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read_state(path: Path, run: Mapping[str, Any], way_out: str = AGAIN, needed: bool = False) -> dict[str, Any]:
    """Reads the checkpoint of a run, with its settings as "run"; without a file empty unless ``needed``, refused for other settings."""
    if not needed and not path.exists():
        return {}
    state = read_checkpoint(path, way_out)
    stored = state.get("run") if isinstance(state, dict) else None
    if stored != run:
        other = [name for name, value in run.items() if not isinstance(stored, dict) or stored.get(name) != value]
        words = f"Expected '{path}' to be of the settings of this run (got other {', '.join(other)})."
        raise RunError(f"{words} Take another --output, or delete it.")
    return state


def _digest(content: Any) -> str:
    return hashlib.sha256(content if isinstance(content, bytes) else json.dumps(content).encode()).hexdigest()


def record_text(content: Mapping[str, Any]) -> str:
    """Plain data as JSON, with its checksum."""
    return json.dumps({**content, "sha256": _digest(content)}, indent=2) + "\n"


def write_record(path: Path, content: Mapping[str, Any]) -> None:
    """Writes plain data as JSON with its checksum, whole or not at all."""
    write_text(path, record_text(content))


def read_record(path: Path, way_out: str = AGAIN, what: str = WRITTEN) -> dict[str, Any]:
    text = read_text(path, way_out, what)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, what, f"no JSON: {error}", way_out) from None
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise _wrong(path, what, "other content than its checksum says", way_out)
    return content


NAMED = ("task", "data", "method", "attention", "density", "seed", "bias")


def settings_of(run: Any, group: str = "", shared: Sequence[str] = (), named: Iterable[str] = NAMED) -> dict[str, Any]:
    """Settings of a run, a dataclass, that its rows do not name: of all runs of a folder, or of a group such as a task."""
    settings = {name: value for name, value in dataclasses.asdict(run).items() if name not in named}
    of = {name: f" of {group}" if group and name not in shared else "" for name in settings}
    return {name.replace("_", "-") + of[name]: value for name, value in settings.items()}


def settings_of_all(runs: Sequence[Any], group: str, named: Iterable[str] = NAMED) -> dict[str, Any]:
    """The settings of all runs of a folder, each of its group: the task, say, in the field ``group``. All groups share the layers."""
    settings_of_runs = (settings_of(run, getattr(run, group), ["layers"], named) for run in runs)
    return {name: value for settings in settings_of_runs for name, value in settings.items()}


def random_word(*key: int) -> int:
    """Mixes integers, such as seed, purpose and step, into one random word of 62 bits."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 2)


def fingerprint(parts: Iterable[bytes]) -> str:
    """A short checksum of data that decide a run."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def checksums(**files: Sequence[Path]) -> dict[str, str]:
    """Settings that name the contents of files."""
    return {f"checksum of {name}": fingerprint(map(Path.read_bytes, paths)) for name, paths in files.items()}


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Tells at a stop that the same command resumes from a folder; :func:`examples.common.command.stopped` prints the note of Ctrl-C."""
    words = f"The same command goes on from what is in {folder}."
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(words)
        raise
    except SystemExit as stop:
        if isinstance(stop.code, int) and stop.code > 128:  # a signal, which `fit` has waited for
            print(f"\nStopped. {words}", file=sys.stderr)
        raise


@contextlib.contextmanager
def claim(folder: Path, program: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Takes a folder of output, whose ``settings.json`` decides all runs in it, and refuses runs of other settings.

    Settings that the file does not have yet are added: those of another task, for example.
    """
    check_folder("output", folder)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder), resumable(folder):
        path, record = folder / SETTINGS, _folder(folder)
        if not record and (folder / "rows.csv").exists():
            raise _wrong(path, "what rows.csv was made with", "no such file", OTHER)
        stored = record.get("settings", {})
        settings = {"program": program, **settings}
        for name, value in settings.items():
            if stored.get(name, value) != value:
                words = f"Expected '{name}' to be {stored[name]!r} as in {path} (got {value!r})."
                raise RunError(f"{words} Take another --output for other settings.")
        if settings.keys() - stored.keys():
            write_record(path, {"settings": {**stored, **settings}, "tables": record.get("tables", {})})
        yield


def _folder(folder: Path) -> dict[str, Any]:
    """The content of the ``settings.json`` of a folder, or nothing."""
    record = read_record(folder / SETTINGS, OTHER) if (folder / SETTINGS).exists() else {}
    if record and not isinstance(record.get("tables"), dict):
        raise _wrong(folder / SETTINGS, "of this program", ", ".join(record), OTHER)
    return record


def read_table(path: Path) -> str:
    """The text of a table; refused if the folder's settings have another checksum of it."""
    text, digests = read_text(path), _folder(path.parent).get("tables", {}).get(path.name)
    if digests is not None and _digest(text.encode()) not in digests:
        raise _wrong(path, WRITTEN, f"other bytes than {SETTINGS} says", AGAIN)
    return text


def write_table(path: Path, old: str, new: str) -> None:
    """Replaces the text of a table; settings hold the checksums of both, so that a kill between the two files does no harm."""
    if record := _folder(path.parent):
        record["tables"][path.name] = [_digest(text.encode()) for text in (old, new) if text]
        write_record(path.parent / SETTINGS, record)
    write_text(path, new)
