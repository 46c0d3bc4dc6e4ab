"""The files for those who operate a node say what the commands understand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "examples" / "blocktrain-node.service"
OPTIONS = json.loads(Path(__file__).with_name("cli_options.json").read_text())


def test_the_unit_uses_options_that_exist() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    program, *words = line.split()
    used = {word for word in words if word.startswith("--")}
    assert used
    assert used <= set(OPTIONS[Path(program).name])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    here = UNIT.read_text().replace("/opt/blocktrain/bin/blocktrain-node", "/bin/true")
    unit = tmp_path / UNIT.name
    unit.write_text(here.replace("User=blocktrain", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, complaints) == (0, [])
