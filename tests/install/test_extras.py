"""A verb whose extra is not installed says which one it is; any other missing module is a fault and stays one."""

import pytest

from kvlab.cli import main as cli
from kvlab.core.extras import EXTRAS, missing_extra


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_is_named(package):
    said = str(missing_extra(ModuleNotFoundError(f"No module named {package}", name=f"{package}.part")))
    assert package in said and f"kvlab[{EXTRAS[package]}]" in said and "\n" not in said


def test_the_command_line_ends_with_it(monkeypatch, capsys):
    def follow():
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("kvlab.core.parent_watch.follow_run", follow)
    with pytest.raises(SystemExit) as left:
        cli.main(["params"])
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith(
        "needs the package matplotlib; install it with: pip install 'kvlab[report]'\n"
    )


def test_another_missing_module_is_no_extra(monkeypatch):
    assert missing_extra(ModuleNotFoundError("No module named 'kvlab.nothing'", name="kvlab.nothing")) is None
