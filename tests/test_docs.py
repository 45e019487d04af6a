"""What the docs show must run, and say what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import run_script

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / "docs" / "tour.py", *sorted((ROOT / "examples").glob("*.py"))]

NEEDED = {"06_trainer.py": ["accelerate"], "07_lightning.py": ["lightning"], "08_lora.py": ["peft"]}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_run(script: Path, tmp_path: Path) -> None:
    for library in NEEDED.get(script.name, ()):
        pytest.importorskip(library)
    done = run_script(script, tmp_path)
    assert done.status == 0, done.stderr
    assert done.stdout


def test_examples_are_short() -> None:
    assert all(len(script.read_text().splitlines()) < 100 for script in SCRIPTS[1:])


def test_the_readme_code_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "readme.py"
    script.write_text(code.group(1))
    done = run_script(script, tmp_path)
    assert (done.status, done.stdout.strip()) == (0, "True"), done.stderr


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
