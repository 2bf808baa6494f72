"""Compiling the native kernels: chosen variant, private cache, one build for many processes, clear refusals."""

import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kernels.cpu import build, prebuild
from engine.kernels.cpu.build import ISA_VARIABLE, Isa, KernelsUnavailable, build_library, choose_isa

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a one-line source, and a compiler that notes each run in `runs`."""
    sources = tmp_path / "src"
    sources.mkdir()
    (sources / "api.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_compiler(tmp_path / "counting-c++", f'echo "$$ $@" >> {tmp_path}/runs\nsleep 0.2\nexec c++ "$@"')
    monkeypatch.setenv("CXX", str(tmp_path / "counting-c++"))
    return tmp_path


def write_compiler(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def num_builds(workshop: Path) -> int:
    runs = workshop / "runs"
    lines = runs.read_text().splitlines() if runs.exists() else []
    return sum("--version" not in line for line in lines)


def test_a_library_is_built_once_and_found_again(workshop: Path) -> None:
    path = build_library(Isa.PORTABLE)
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert build_library(Isa.PORTABLE) == path
    assert num_builds(workshop) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"], "nothing half-built stays"


def test_the_cache_is_for_its_owner_alone(workshop: Path) -> None:
    folder = build_library(Isa.PORTABLE).parent
    assert folder == workshop / "cache" / "kvrelay"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_changed_source_compiler_or_variant_is_another_library(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build_library(Isa.PORTABLE)]
    (workshop / "src" / "more.h").write_text("// a header\n")
    paths.append(build_library(Isa.PORTABLE))
    write_compiler(workshop / "other-c++", 'test "$1" = --version && echo other && exit\nexec c++ "$@"')
    monkeypatch.setenv("CXX", str(workshop / "other-c++"))
    paths.append(build_library(Isa.PORTABLE))
    paths.append(build_library(choose_isa()))
    assert len(set(paths)) == 4
    assert all(path.exists() for path in paths)


def test_processes_that_start_together_share_one_build(workshop: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(6) as pool:
        paths = pool.map(build_library, [Isa.PORTABLE] * 6)
    assert len(set(paths)) == 1
    assert num_builds(workshop) == 1


def test_a_dead_builder_does_not_block_the_next(workshop: Path) -> None:
    """What a killed process leaves behind: its lock file and a part of a library."""
    folder = workshop / "cache" / "kvrelay"
    folder.mkdir(parents=True, mode=0o700)
    name = build_library(Isa.PORTABLE).name
    (folder / name).unlink()
    (folder / f"{name}x.part").write_bytes(b"half")
    assert build_library(Isa.PORTABLE).read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_cache_that_others_can_write_to_is_refused(workshop: Path, mode: int) -> None:
    folder = workshop / "cache" / "kvrelay"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.raises(KernelsUnavailable, match="writable for nobody else"):
        build_library(Isa.PORTABLE)
    assert num_builds(workshop) == 0


def test_a_cache_that_cannot_be_made_is_named(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(workshop / "file"))
    with pytest.raises(KernelsUnavailable, match="cache of compiled kernels"):
        build_library(Isa.PORTABLE)


def test_a_failing_compiler_is_quoted(workshop: Path) -> None:
    (workshop / "src" / "api.cpp").write_text("int broken = nonsense;\n")
    with pytest.raises(KernelsUnavailable, match="nonsense"):
        build_library(Isa.PORTABLE)
    assert [p.suffix for p in (workshop / "cache" / "kvrelay").iterdir()] == [".lock"]


def test_no_compiler_is_said_so(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(workshop / "empty"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        build_library(Isa.PORTABLE)


def test_an_image_gets_every_variant_of_its_machines(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_cpu_flags", cpu_with("avx2"))
    assert prebuild.main() == 0
    names = {path.name.split("-")[1] for path in (workshop / "cache" / "kvrelay").glob("*.so")}
    assert names == {"avx512vnni", "avxvnni", "avx2", "portable"}
    assert num_builds(workshop) == 4
    build_library(Isa.AVX2)
    assert num_builds(workshop) == 4
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert build.variants() == (Isa.PORTABLE,)
    monkeypatch.setenv("PATH", str(workshop / "empty"))
    monkeypatch.delenv("CXX")
    assert prebuild.main() == 1
    assert "no C++ compiler" in capsys.readouterr().err


def cpu_with(*flags: str) -> Callable[[], frozenset[str]]:
    return lambda: frozenset(flags)


AVX2 = ("avx2", "fma", "f16c", "bmi2")
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), Isa.PORTABLE),
        (("avx2",), Isa.PORTABLE),
        (AVX2, Isa.AVX2),
        ((*AVX2, "avx_vnni"), Isa.AVXVNNI),
        ((*AVX2, *AVX512), Isa.AVX2),
        ((*AVX2, *AVX512, "avx512_vnni"), Isa.AVX512VNNI),
        ((*AVX2, *AVX512, "avx512_vnni", "avx_vnni"), Isa.AVX512VNNI),
    ],
)
def test_the_best_variant_of_the_cpu_is_chosen(
    flags: tuple[str, ...], expected: Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_cpu_flags", cpu_with(*flags))
    assert choose_isa() is expected


def test_a_variant_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu_flags", cpu_with(*AVX2))
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert choose_isa() is Isa.PORTABLE


@pytest.mark.parametrize("wanted", ["avx512vnni", "sse9"])
def test_a_variant_that_the_cpu_cannot_run_is_refused(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu_flags", cpu_with(*AVX2))
    monkeypatch.setenv(ISA_VARIABLE, wanted)
    with pytest.raises(KernelsUnavailable, match=f"{ISA_VARIABLE}={wanted}: this CPU runs avx2, portable"):
        choose_isa()


def test_this_machines_cpu_is_known() -> None:
    assert choose_isa() in Isa
    if os.uname().machine == "x86_64":
        assert "sse2" in build._cpu_flags()
