"""Libraries are those of the wheel, or what was compiled into a folder of one's own; without, reasons are plain."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retime.foundations import native
from retime.foundations.cpu_pool.pool import POOL, pool_library
from retime.foundations.native import NoLibraryError, OwnFolder, Source
from retime.mechanisms.cpu_accumulation.shared_sums import SUMS
from support.warm_start import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pool is for Linux")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library is kept in this test; it is compiled as a plain text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    pool_library.cache_clear()
    yield tmp_path / "retime"
    pool_library.cache_clear()


def kept(folder: Path, text: str = "code") -> Path:
    return OwnFolder(folder, 60).keep("pool", lambda path: path.write_bytes(text.encode()))


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_nobody_else_may_write_whatever_the_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = kept(folder)
    finally:
        os.umask(before)
    assert (mode(folder), mode(path)) == (0o700, 0o700)
    assert OwnFolder(folder, 60).find("pool") == path


def test_an_open_folder_is_closed(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert OwnFolder(folder, 60).find("pool") is None
    assert mode(folder) == 0o700


@pytest.mark.parametrize("harm", ["cut short", "another content", "another name", "open to all", "a link"])
def test_what_is_not_what_was_kept_is_removed(folder: Path, harm: str) -> None:
    path = kept(folder)
    if harm == "cut short":
        path.write_text("")
    elif harm == "another content":
        path.write_text("evil")
    elif harm == "another name":
        path = path.rename(folder / "pool-0123.so")
    elif harm == "open to all":
        path.chmod(0o777)
    else:
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    assert OwnFolder(folder, 60).find("pool") is None
    assert not os.path.lexists(path)
    again = kept(folder)
    assert OwnFolder(folder, 60).find("pool") == again


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to give files away")
def test_what_another_user_has_put_there_is_not_loaded(folder: Path) -> None:
    path = kept(folder)
    os.chown(path, 12345, 12345)
    assert OwnFolder(folder, 60).find("pool") is None
    os.chown(folder, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        OwnFolder(folder, 60)
    reason = pool_library()
    assert isinstance(reason, NoLibraryError)
    assert "set XDG_CACHE_HOME to a folder of your own" in str(reason)


def test_another_users_folder_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(folder)
    monkeypatch.setattr(native.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        OwnFolder(folder, 60)


def test_what_a_killed_build_left_is_removed(folder: Path) -> None:
    folder.mkdir()
    for name, age_s in {"unfinished-old": 10**6, "unfinished-new": 0}.items():
        (folder / name).mkdir()
        (folder / name / "pool").write_text("half")
        if age_s:
            os.utime(folder / name, (0, 0))
    kept(folder)
    assert [path.name for path in folder.glob("unfinished-*")] == ["unfinished-new"]


def test_a_file_is_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(native.os, "fsync", lambda file: steps.append("fsync"))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *paths: steps.append("replace") or replace(*paths))
    kept(folder)
    assert steps == ["fsync", "replace"]


def test_a_relative_cache_home_is_not_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native._cache_home() == tmp_path / ".cache"


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """A compiler that makes a copy of its first argument."""
    script = tmp_path / "copies"
    script.write_text('#!/bin/sh\nwhat=$1\nwhile [ "$1" != -o ]; do shift; done\ncat "$what" > "$2"\n')
    script.chmod(0o700)
    return script


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("'", 'CXX="\'" is no command'),
        ("no-such-compiler", "no-such-compiler.*install a C\\+\\+ compiler"),
        ("sh -c 'exec sleep 60'", "^(?!.*install).*sh was stopped after 0.05 s.*another compiler"),
        ("true", "by true.*it made nothing"),
        ("false", "by false.*ended with 1"),
        ("COPIES /dev/null", "copies made is not the library of the pool.*name another compiler in CXX"),
        ("COPIES FOREIGN", "copies made is not the library of the pool.*name another compiler in CXX"),
    ],
)
def test_a_bad_compiler_is_named(
    compiler: str, reason: str, folder: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (foreign, *_) = re.findall(r"/\S*/libc\.so\S*", Path("/proc/self/maps").read_text()) or ["/dev/null"]
    monkeypatch.setenv("CXX", compiler.replace("COPIES", str(copies)).replace("FOREIGN", foreign))
    monkeypatch.setattr(native, "_TIMEOUT_S", 0.05 if "sleep" in compiler else 120)
    library = pool_library()
    assert isinstance(library, NoLibraryError)
    assert re.search(reason, str(library), re.DOTALL)
    assert list(folder.iterdir()) == []


def test_a_library_that_was_cut_short_is_built_again(
    tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own, since a library is loaded once."""
    real = pool_library()
    if isinstance(real, NoLibraryError):
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{copies} {real._name}")
    program = "from retime.foundations.cpu_pool.pool import MemoryPool; assert MemoryPool().install()"

    def used() -> Path:
        run_program(program)
        (library,) = (tmp_path / "retime").iterdir()
        return library

    library = used()
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    assert used().read_bytes() == whole


@pytest.fixture
def source(tmp_path: Path, folder: Path) -> Source:
    """Of one function, that needs nothing of torch."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    own = tmp_path / "source"
    own.mkdir()
    (own / "one.cpp").write_text('extern "C" int retime_one() { return 1; }\n')
    return Source("one", "the one", own, "one.cpp", lambda library: library.retime_one, links_torch=False)


def test_what_the_wheel_has_is_loaded_without_a_compiler(
    source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.compile(source.shipped)
    monkeypatch.setenv("CXX", "no-such-compiler")
    library = source.library()
    assert not isinstance(library, NoLibraryError)
    assert (library.retime_one(), Path(library._name)) == (1, source.shipped)
    assert not list(folder.glob("one-*"))


@pytest.mark.parametrize("harm", ["another source", "another library", "no library", "another torch"])
def test_what_does_not_fit_is_compiled(
    harm: str, source: Source, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = replace(source, links_torch=harm == "another torch")
    source.compile(source.shipped)
    if harm == "another source":
        (source.folder / "one.cpp").write_text('extern "C" int retime_one() { return 2; }\n')
    elif harm == "another torch":
        monkeypatch.setattr(torch, "__version__", "0.0.1")
    elif harm == "no library":
        source.shipped.write_text("cut short")
    else:
        text = (source.folder / "one.cpp").read_text()
        (source.folder / "one.cpp").write_text("")
        source.compile(empty := source.folder / "empty.so")
        (source.folder / "one.cpp").write_text(text)
        empty.replace(source.shipped)
    library = source.library()
    assert not isinstance(library, NoLibraryError)
    assert Path(library._name).parent == folder
    assert library.retime_one() == 1 + (harm == "another source")


def test_sums_fit_every_torch_and_the_pool_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {source: source.shipped for source in (SUMS, POOL)}
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert [source.shipped == before[source] for source in (SUMS, POOL)] == [True, False]
