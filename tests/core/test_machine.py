"""What is known of the processor."""

from __future__ import annotations

import pytest

from kvlab.core import machine

ZEN3 = "model name\t: AMD EPYC\nflags\t\t: fpu sse2 fma avx avx2 vaes\n"
SKYLAKE = "model name\t: Xeon\nflags\t\t: fpu sse2 avx2 avx512f avx512bw avx512vl\n"
NEOVERSE = "Features\t: fp asimd bf16 sve\n"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    return machine.CPUINFO


@pytest.mark.parametrize(("told", "lacks"), [(ZEN3, True), (SKYLAKE, False), (NEOVERSE, False), ("", False)])
def test_x86_without_avx512_lacks_bfloat16(cpuinfo, told, lacks):
    cpuinfo.write_text(told)
    assert machine.lacks_bfloat16() == ("bfloat16" in machine.machine()) == lacks


def test_nothing_is_known_where_the_system_has_no_such_file(cpuinfo):
    assert not machine.lacks_bfloat16() and machine.cpu_name()


def test_a_processor_has_its_name(cpuinfo):
    cpuinfo.write_text(ZEN3)
    assert machine.cpu_name() == "AMD EPYC"
